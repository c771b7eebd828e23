"""What a build has to do: the manifest it will have, and for each role whether to write, link or keep.
Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from trtpd import __version__
from trtpd.build.backends import backend_of
from trtpd.build.backends.base import Backend
from trtpd.build.checkpoint import Checkpoint
from trtpd.build.files import digest_of
from trtpd.build.manifest import (
    FORMAT,
    EngineConfig,
    Manifest,
    RoleEntry,
    RoleName,
    current_features,
    current_versions,
    read_engine_config,
)
from trtpd.build.resolve import ResolvedPipeline, ResolvedRole
from trtpd.build.spec import ROLES
from trtpd.errors import BuildError, EngineError, SpecError

Action = Literal["write", "link", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """The build that is there already."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What to do for one role: "write" its settings and weights; "link" weights that are there already,
    under its new settings; or "keep" it as it is.

    `weights` names the weights' content, None for an engine that has none. `linked_role` is the role whose
    weights are linked, in the new build if `from_new`, else in the former one.
    """

    config: EngineConfig
    action: Action
    weights: str | None
    linked_role: RoleName | None = None
    from_new: bool = False

    @property
    def role(self) -> RoleName:
        return self.config.role


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """The manifest the build will have, and its roles in the order they are made. `digest` names the model's
    weights, None for an engine that has none."""

    manifest: Manifest
    roles: tuple[RolePlan, ...]
    digest: str | None


def plan_build(
    pipeline: ResolvedPipeline,
    checkpoint: Checkpoint,
    former: Former | None,
    *,
    role: RoleName | None = None,
    force: bool = False,
) -> BuildPlan:
    """Plans all roles, or only `role` beside the former build's others; `force` links and keeps nothing of
    the former build. Reads all weights once, for their digest.

    Raises SpecError if the pipeline has no such role, BuildError if the others aren't there or can't pair
    with it.
    """
    if role is not None and role not in pipeline.roles:
        raise SpecError(f"--role {role}: the pipeline has no pool {role}; it has {', '.join(pipeline.roles)}")
    backend = backend_of(pipeline.engine)
    digest = checkpoint.digest() if backend is not None else None
    pair_fingerprint = _pair_fingerprint(pipeline, digest)
    settings: dict[str, Any] = pipeline.settings()
    entries: dict[str, RoleEntry] = {}
    if role is not None:
        entries = _kept_entries(pipeline, former, role, pair_fingerprint)
        settings["pools"] |= {name: _pools(former)[name] for name in entries}
    plans: list[RolePlan] = []
    for name in pipeline.roles if role is None else (role,):
        config = _engine_config(pipeline, pipeline.roles[name], checkpoint, digest, pair_fingerprint)
        key = backend.key(digest, config) if backend is not None and digest is not None else None
        plans.append(_plan_role(config, key, plans, None if force else former, backend))
        entries[name] = _entry(pipeline.roles[name], config)
    manifest = Manifest(
        format=FORMAT,
        trtpd=__version__,
        model=pipeline.model,
        pair_fingerprint=pair_fingerprint,
        roles={name: entries[name] for name in ROLES if name in entries},
        settings=settings,
    )
    return BuildPlan(manifest=manifest, roles=tuple(plans), digest=digest)


def _pools(former: Former | None) -> dict[str, Any]:
    assert former is not None, "roles are kept only from a former build"
    return cast(dict[str, Any], former.manifest.settings["pools"])


def _kept_entries(
    pipeline: ResolvedPipeline, former: Former | None, role: RoleName, pair_fingerprint: str
) -> dict[str, RoleEntry]:
    """The former build's other roles, which the new one must be able to pair with."""
    there = former.manifest.roles if former else {}
    others = [name for name in pipeline.roles if name != role]
    missing = [name for name in others if name not in there]
    if missing:
        raise BuildError(f"--role {role}: there is no {' and no '.join(missing)} yet; build without --role first")
    if others and former is not None and former.manifest.pair_fingerprint != pair_fingerprint:
        raise BuildError(
            f"--role {role}: the other roles in {former.folder} were built from another model, precision, KV layout "
            "or version, and could not pair with it; build without --role"
        )
    return {name: there[name] for name in others}


def _plan_role(
    config: EngineConfig,
    weights: str | None,
    earlier: list[RolePlan],
    former: Former | None,
    backend: Backend | None,
) -> RolePlan:
    if former is not None:
        directory = former.folder / config.role
        whole = backend is None or backend.found_key(directory, config) == weights
        if whole and _fingerprint(former, config.role) == config.fingerprint:
            return RolePlan(config=config, action="keep", weights=weights)
    if backend is not None:
        for plan in earlier:
            if plan.weights == weights:
                return RolePlan(config=config, action="link", weights=weights, linked_role=plan.role, from_new=True)
        for role in ROLES if former is not None else ():
            if former is not None and backend.found_key(former.folder / role, config) == weights:
                return RolePlan(config=config, action="link", weights=weights, linked_role=role)
    return RolePlan(config=config, action="write", weights=weights)


def _fingerprint(former: Former, role: RoleName) -> str | None:
    """The former role's fingerprint, if its manifest and its own directory agree on it."""
    entry = former.manifest.roles.get(role)
    try:
        found = read_engine_config(former.folder / role).fingerprint
    except EngineError:
        return None
    return found if entry is not None and entry.fingerprint == found else None


def _pair_fingerprint(pipeline: ResolvedPipeline, digest: str | None) -> str:
    """Covers what two instances must share to continue each other's answers, and nothing that only changes
    speed."""
    precisions = {name: role.precision for name, role in pipeline.roles.items()}
    convert = pipeline.spec.transfer.convert_dtype
    keys = sorted({role.layout.pairing_key_for(convert_dtype=convert) for role in pipeline.roles.values()})
    versions = current_versions(pipeline.engine)
    settings = [role.tensorrt_llm for role in pipeline.roles.values()]
    movers = sorted({(one.release, one.transceiver) for one in settings if one is not None})
    return digest_of(
        digest,
        pipeline.model,
        pipeline.architecture,
        precisions,
        keys,
        versions,
        pipeline.max_seq_tokens,
        movers,
    )


def _engine_config(
    pipeline: ResolvedPipeline,
    role: ResolvedRole,
    checkpoint: Checkpoint,
    digest: str | None,
    pair_fingerprint: str,
) -> EngineConfig:
    config = EngineConfig(
        format=FORMAT,
        engine=pipeline.engine,
        role=role.role,
        model=pipeline.model,
        tp=role.tp,
        precision=role.precision,
        architecture=pipeline.architecture,
        layout=role.layout,
        profile=role.profile,
        max_seq_tokens=pipeline.max_seq_tokens,
        end_ids=checkpoint.end_ids,
        fingerprint="",
        versions=current_versions(pipeline.engine),
        cpu_features=current_features(pipeline.engine),
        tensorrt_llm=role.tensorrt_llm,
        emulated=pipeline.spec.emulated.model_dump() if pipeline.engine == "emulated" else {},
        pair_fingerprint=pair_fingerprint,
    )
    return msgspec.structs.replace(config, fingerprint=digest_of(digest, config))


def _entry(role: ResolvedRole, config: EngineConfig) -> RoleEntry:
    return RoleEntry(
        directory=role.role,
        fingerprint=config.fingerprint,
        engine=config.engine,
        precision=config.precision,
        layout=config.layout,
        instances=role.instances,
        cores=role.cores,
    )
