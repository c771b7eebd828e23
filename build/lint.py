"""`trtpd lint`: what can't work in a pipeline file, or in a build on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast, get_args

from trtpd.build.backends.openvino import weights_file
from trtpd.build.checkpoint import Checkpoint, open_architecture, open_checkpoint
from trtpd.build.checks import Deployment, Finding, check
from trtpd.build.engines import ENGINES, EngineName
from trtpd.build.machine import Machine, this_machine
from trtpd.build.manifest import (
    EngineConfig,
    Manifest,
    RoleName,
    current_features,
    load_faults,
    read_engine_config,
    read_manifest,
)
from trtpd.build.resolve import ResolvedRole, resolve
from trtpd.build.spec import PipelineSpec, load_spec
from trtpd.build.tensors import TensorFile
from trtpd.errors import CheckpointError, EngineError, InputError

_REBUILD = "build it again with `trtpd build`"


def lint(path: Path, *, machine: Machine | None = None) -> list[Finding]:
    """Findings on a pipeline file or a build directory, errors first.

    Raises SpecError, CheckpointError or InputError for what can't even be read.
    """
    if path.is_dir():
        return lint_build(path, machine=machine)
    spec = load_spec(path)
    machine = machine or this_machine(openvino=spec.engine == "openvino")
    return lint_spec(spec, open_model(spec), machine)


def open_model(spec: PipelineSpec) -> Checkpoint:
    """The spec's model; weights are looked at only if its engine has any. Raises CheckpointError."""
    opener = open_checkpoint if ENGINES[spec.engine].has_weights else open_architecture
    return opener(Path(spec.model))


def lint_spec(spec: PipelineSpec, checkpoint: Checkpoint, machine: Machine) -> list[Finding]:
    """Findings on a pipeline file with its model."""
    findings = check(Deployment.of(resolve(spec, checkpoint.architecture, machine)), machine)
    if not checkpoint.end_ids:
        findings.append(
            Finding(
                code="no_end_token",
                severity="warning",
                where="model",
                values=("eos_token_id", "absent"),
                message=f"{checkpoint.path} names no eos_token_id, so answers end at max_tokens only",
                mend="add eos_token_id to its generation_config.json",
            )
        )
    return findings


def lint_build(build: Path, *, machine: Machine | None = None) -> list[Finding]:
    """Findings on a build directory as it would be served here."""
    manifest = read_manifest(build)
    configs: dict[RoleName, EngineConfig] = {}
    findings: list[Finding] = []
    for name, entry in manifest.roles.items():
        role = cast(RoleName, name)
        try:
            configs[role] = read_engine_config(build / entry.directory)
        except EngineError as error:
            findings.append(_broken(entry.directory, str(error)))
    if configs:
        findings += _lint_engines(build, manifest, configs, machine)
    if not (build / "model_repo").is_dir():
        findings.append(_broken("model_repo", "the Triton model repository is missing"))
    return sorted(findings, key=lambda finding: finding.severity != "error")


def _lint_engines(
    build: Path, manifest: Manifest, configs: dict[RoleName, EngineConfig], machine: Machine | None
) -> Iterator[Finding]:
    engine = next(iter(configs.values())).engine
    if engine not in get_args(EngineName):
        raise InputError(f"{build}: built for engine {engine!r}, which this trtpd doesn't know; {_REBUILD}")
    machine = machine or this_machine(openvino=engine == "openvino")
    for role, config in configs.items():
        entry = manifest.roles[role]
        yield from _fingerprints(manifest, entry.directory, entry.fingerprint, config)
        yield from _loadable(entry.directory, config)
        if ENGINES[cast(EngineName, engine)].has_weights:
            yield from _weights(build / entry.directory, entry.directory, config)
    yield from check(_deployment(manifest, configs), machine)


def _deployment(manifest: Manifest, configs: dict[RoleName, EngineConfig]) -> Deployment:
    first = next(iter(configs.values()))
    roles = tuple(
        ResolvedRole(
            role=role,
            instances=manifest.roles[role].instances,
            tp=config.tp,
            precision=config.precision,
            layout=config.layout,
            profile=config.profile,
            cores=manifest.roles[role].cores,
        )
        for role, config in configs.items()
    )
    return Deployment(
        engine=cast(EngineName, first.engine),
        architecture=first.architecture,
        max_seq_tokens=max(config.max_seq_tokens for config in configs.values()),
        roles=roles,
    )


def _broken(where: str, message: str) -> Finding:
    return Finding(
        code="incomplete",
        severity="error",
        where=where,
        values=("built", "broken"),
        message=message,
        mend=_REBUILD,
    )


def _fingerprints(manifest: Manifest, where: str, expected: str, config: EngineConfig) -> Iterator[Finding]:
    pairs = {
        "fingerprint": (expected, config.fingerprint),
        "pair_fingerprint": (manifest.pair_fingerprint, config.pair_fingerprint),
    }
    for name, (wanted, found) in pairs.items():
        if wanted != found:
            yield Finding(
                code="fingerprint_differs",
                severity="error",
                where=where,
                values=(wanted, found),
                message=f"its {name} is {found}, the manifest says {wanted}: it is of another build",
                mend=_REBUILD,
            )


def _loadable(where: str, config: EngineConfig) -> Iterator[Finding]:
    for fault in load_faults(config):
        yield Finding(
            code="not_loadable",
            severity="error",
            where=where,
            values=("build", "here"),
            message=fault,
            mend=_REBUILD,
        )
    more = sorted(set(current_features(config.engine)) - set(config.cpu_features))
    if more:
        yield Finding(
            code="cpu_has_more",
            severity="warning",
            where=where,
            values=(", ".join(config.cpu_features), ", ".join(more)),
            message=f"this CPU also has {', '.join(more)}, which the build makes no use of",
            mend=f"{_REBUILD} --force to use it",
        )


def _weights(directory: Path, where: str, config: EngineConfig) -> Iterator[Finding]:
    for rank in range(config.tp):
        try:
            TensorFile(directory / weights_file(rank))
        except CheckpointError as error:
            yield _broken(where, str(error))
