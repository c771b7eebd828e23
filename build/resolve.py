"""A pipeline file with every `auto` filled in for one model and one machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from trtpd.build import gpu_roles
from trtpd.build.backends.tensorrt_llm.settings import natural_kv_dtype
from trtpd.build.engines import (
    ENGINES,
    EngineName,
    engine_architecture,
    engine_layout,
    pool_bytes,
    weights_bytes,
)
from trtpd.build.machine import Machine
from trtpd.build.manifest import Architecture, Precision, RoleName, RoleProfile, TensorRTConfig
from trtpd.build.roles import MeasureStep, RoleRoom, RoleWishes, profile_for, split_cores
from trtpd.build.spec import PipelineSpec, PoolSpec
from trtpd.kv_transfer.layout import KVDtype, KVLayout

_SHM_SHARE = 0.8
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRole:
    """One role, ready to build. `cores` has an entry for each instance."""

    role: RoleName
    instances: tuple[str, ...]
    tp: int
    precision: Precision
    layout: KVLayout
    profile: RoleProfile
    cores: dict[str, tuple[int, ...]]
    tensorrt_llm: TensorRTConfig | None = None

    @property
    def pool_bytes(self) -> int:
        """Shared memory one instance's KV pools take."""
        return pool_bytes(self.layout, self.profile.kv_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPipeline:
    """A pipeline without anything left open. `architecture` is what the engine computes."""

    spec: PipelineSpec
    model: str
    architecture: Architecture
    max_seq_tokens: int
    roles: dict[RoleName, ResolvedRole]

    @property
    def engine(self) -> EngineName:
        return self.spec.engine

    @property
    def prefix_cache(self) -> str:
        """Which prompts share KV. In f32 another split of a prompt into steps changes no token, so all may."""
        exact = all(role.precision == role.layout.dtype == "f32" for role in self.roles.values())
        return self.spec.kv.prefix_cache or ("all" if exact else "answers")

    def settings(self) -> dict[str, object]:
        """The pipeline file as plain data, with the values that were found in place of `auto`."""
        data: dict[str, Any] = self.spec.model_dump(exclude_none=True)
        data["name"] = self.model
        data["kv"]["max_seq_tokens"] = self.max_seq_tokens
        layouts = [role.layout for role in self.roles.values()]
        data["kv"] |= {"dtype": layouts[0].dtype, "tokens_per_block": layouts[0].tokens_per_block}
        data["kv"]["prefix_cache"] = self.prefix_cache
        for name, role in self.roles.items():
            profile = role.profile
            data["pools"][name] |= {
                "precision": role.precision,
                "kv_dtype": role.layout.dtype,
                "cores": list(profile.cores) or None,
                "threads": profile.threads,
                "max_batch": profile.max_batch,
                "max_step_tokens": profile.max_step_tokens,
                "chunk_tokens": profile.chunk_tokens,
                "kv_tokens": profile.kv_blocks * role.layout.tokens_per_block,
                "widen_weights": profile.widen_weights,
            }
        return data


def model_name(spec: PipelineSpec) -> str:
    """What the model is called: the file's `name`, else its folder's or file's name."""
    path = Path(spec.model)
    return spec.name or (path.stem if path.suffix == ".gguf" else path.name)


def resolve(
    spec: PipelineSpec,
    architecture: Architecture,
    machine: Machine,
    *,
    measure: MeasureStep | None = None,
    tuned: Mapping[RoleName, RoleWishes] | None = None,
) -> ResolvedPipeline:
    """Fills in every `auto`; `tuned` stands in for what the file says of a role. What comes out may still be
    impossible: that is for lint to say.

    Depends on the machine's sizes but not on how much of them is free, so that a second build finds the same
    values.
    """
    spec = _with_found(spec, tuned or {})
    pools = spec.pools.given()
    layouts = {role: _layout(spec, pool, architecture, machine) for role, pool in pools.items()}
    room_tokens = _room_tokens(spec, pools, layouts, architecture, machine)
    max_seq_tokens = spec.kv.max_seq_tokens or _longest(pools, layouts, room_tokens, architecture)
    cores = _cores(pools, machine) if ENGINES[spec.engine].on_cpu else _given_cores(pools)
    tpot_s = spec.slo.tpot_ms / 1000 if spec.slo.tpot_ms else None
    precisions = {role: _precision(spec, pool, architecture, machine) for role, pool in pools.items()}
    prompt = 0
    if spec.engine == "tensorrt_llm":
        prompt = gpu_roles.longest_prompt(spec, precisions, architecture, machine, layouts, max_seq_tokens)
    roles: dict[RoleName, ResolvedRole] = {}
    for role, pool in pools.items():
        room = RoleRoom(cores=cores[role], instances=pool.instances, kv_tokens=room_tokens[role])
        names = tuple(f"{role}_{index}" for index in range(pool.instances))
        precision, layout = precisions[role], layouts[role]
        defaults = None
        if spec.engine == "tensorrt_llm":
            defaults = gpu_roles.role_defaults(spec, role, precision, architecture, machine, layout, prompt)
        wishes = (tuned or {}).get(role) or wishes_of(pool)
        profile = profile_for(role, wishes, room, layout, tpot_s=tpot_s, measure=measure, defaults=defaults)
        profile = _sharing(spec, profile, layout)
        resolved = ResolvedRole(
            role=role,
            instances=names,
            tp=pool.tp,
            precision=precision,
            layout=layout,
            profile=profile,
            cores=dict(zip(names, split_cores(cores[role], len(names)), strict=True)) if names and cores[role] else {},
        )
        if spec.engine == "tensorrt_llm":
            config = gpu_roles.role_config(
                spec, role, precision, architecture, machine, layout, profile, max_seq_tokens, prompt
            )
            resolved = replace(resolved, tensorrt_llm=config)
        roles[role] = resolved
    return ResolvedPipeline(
        spec=spec,
        model=model_name(spec),
        architecture=engine_architecture(spec.engine, architecture),
        max_seq_tokens=max_seq_tokens,
        roles=roles,
    )


def _sharing(spec: PipelineSpec, profile: RoleProfile, layout: KVLayout) -> RoleProfile:
    """How the KV pool of an engine that we schedule is shared out."""
    if spec.engine == "tensorrt_llm":
        return profile
    tokens = spec.kv.prefix_cache_tokens
    return structs.replace(
        profile,
        growth_kept=spec.kv.growth_kept,
        prefix_cache=spec.kv.prefix_cache != "none",
        prefix_cache_blocks=None if tokens is None else tokens // layout.tokens_per_block,
    )


def wishes_of(pool: PoolSpec) -> RoleWishes:
    """What the file says of a role."""
    return RoleWishes(
        max_batch=pool.max_batch,
        max_step_tokens=pool.max_step_tokens,
        chunk_tokens=pool.chunk_tokens,
        kv_tokens=pool.kv_tokens,
        threads=pool.threads,
        widen_weights=pool.widen_weights,
        precision=pool.precision,
        cores=None if pool.cores is None else tuple(pool.cores),
    )


def _with_found(spec: PipelineSpec, tuned: Mapping[RoleName, RoleWishes]) -> PipelineSpec:
    """The pipeline file as if it named the precision and the cores that were found for a role."""
    pools: dict[str, PoolSpec] = {}
    for role, pool in spec.pools.given().items():
        found = tuned.get(role, RoleWishes())
        cores = pool.cores if found.cores is None else list(found.cores)
        pools[role] = pool.model_copy(update={"precision": found.precision or pool.precision, "cores": cores})
    return spec.model_copy(update={"pools": spec.pools.model_copy(update=pools)})


def _precision(spec: PipelineSpec, pool: PoolSpec, architecture: Architecture, machine: Machine) -> Precision:
    if found := pool.precision or spec.precision:
        return found
    if spec.engine == "tensorrt_llm":
        return "fp8" if architecture.quantization else "bf16"
    return "bf16" if spec.engine == "openvino" and machine.bf16 else "f32"


def _layout(spec: PipelineSpec, pool: PoolSpec, architecture: Architecture, machine: Machine) -> KVLayout:
    rules = ENGINES[spec.engine]
    return engine_layout(
        spec.engine,
        architecture,
        tokens_per_block=spec.kv.tokens_per_block or rules.default_tokens_per_block,
        dtype=pool.kv_dtype or spec.kv.dtype or _kv_dtype(spec, architecture, machine),
        tp=pool.tp,
    )


def _kv_dtype(spec: PipelineSpec, architecture: Architecture, machine: Machine) -> KVDtype:
    """One dtype for all roles: on a CPU bf16 only if no role computes in f32, since f32 promises exact tokens."""
    precisions = [_precision(spec, pool, architecture, machine) for pool in spec.pools.given().values()]
    if spec.engine == "tensorrt_llm":
        return natural_kv_dtype(architecture, precisions[0])
    return "bf16" if machine.bf16 and spec.engine == "openvino" and "f32" not in precisions else "f32"


def _room_tokens(
    spec: PipelineSpec,
    pools: dict[RoleName, PoolSpec],
    layouts: dict[RoleName, KVLayout],
    architecture: Architecture,
    machine: Machine,
) -> dict[RoleName, int]:
    """Tokens the KV pool of one instance gets where the file doesn't say: the engine's usual size, the
    longest sequence asked for, or an equal share of what memory allows, whichever of the first two is larger
    and fits."""
    rules = ENGINES[spec.engine]
    precisions = {role: _precision(spec, pool, architecture, machine) for role, pool in pools.items()}
    if not rules.on_cpu:
        return {
            role: gpu_roles.estimate(spec, precisions[role], architecture, machine, layout).kv_tokens
            for role, layout in layouts.items()
        }
    wanted = max(rules.pool_tokens, spec.kv.max_seq_tokens or 0)
    weights = sum(
        pool.instances * weights_bytes(spec.engine, architecture, precisions[role], pool.tp)
        for role, pool in pools.items()
    )
    budget = min(_SHM_SHARE * machine.shm_bytes, _MEMORY_SHARE * max(0, machine.memory_bytes - weights))
    token_bytes = {role: pool_bytes(layout, 1) // layout.tokens_per_block for role, layout in layouts.items()}
    asked = sum(pool.instances * (pool.kv_tokens or 0) * token_bytes[role] for role, pool in pools.items())
    sharing = sum(pool.instances for pool in pools.values() if pool.kv_tokens is None)
    share = max(0.0, budget - asked) / max(1, sharing)
    return {role: min(wanted, int(share) // size) for role, size in token_bytes.items()}


def _longest(
    pools: dict[RoleName, PoolSpec],
    layouts: dict[RoleName, KVLayout],
    room_tokens: dict[RoleName, int],
    architecture: Architecture,
) -> int:
    """The longest sequence that the model knows positions for and every pool holds."""
    held = [
        (pool.kv_tokens or room_tokens[role]) // layouts[role].tokens_per_block * layouts[role].tokens_per_block
        for role, pool in pools.items()
    ]
    return max(1, min(architecture.max_position_embeddings, *held))


def _given_cores(pools: dict[RoleName, PoolSpec]) -> dict[RoleName, tuple[int, ...]]:
    """For engines on GPUs: as the file says, else none, for those near an instance's GPUs are known when it starts."""
    return {role: tuple(pool.cores or ()) for role, pool in pools.items()}


def _cores(pools: dict[RoleName, PoolSpec], machine: Machine) -> dict[RoleName, tuple[int, ...]]:
    """CPUs of each pool: as the file says, else an even split of the others' rest between the running
    pools."""
    taken = {core for pool in pools.values() for core in pool.cores or ()}
    free = tuple(core for core in machine.cores if core not in taken) or machine.cores
    open_roles = [role for role, pool in pools.items() if pool.cores is None and pool.instances > 0]
    cores = dict(zip(open_roles, split_cores(free, len(open_roles)), strict=True)) if open_roles else {}
    for role, pool in pools.items():
        if pool.cores is not None:
            cores[role] = tuple(pool.cores)
        elif role not in cores:
            cores[role] = machine.cores
    return cores
