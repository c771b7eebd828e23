"""What can't work together in a pipeline, found before it is built or served. Pure: one function per
concern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trtpd.build.accuracy import KL_BOUND_NATS, accuracy_words
from trtpd.build.engines import ENGINES, EngineName, weights_bytes
from trtpd.build.machine import Machine
from trtpd.build.manifest import Accuracy, Architecture
from trtpd.build.resolve import ResolvedPipeline, ResolvedRole
from trtpd.kv_transfer.layout import CONVERTIBLE

Severity = Literal["error", "warning"]
_MIB = 1 << 20
PRECISION_CODES = ("precision_differs", "precision_error")
"""Findings that depend on what a build has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that can't work (error) or likely isn't meant (warning). `values` are the two that clash,
    `where` is a key of the pipeline file or a path inside a build."""

    code: str
    severity: Severity
    where: str
    values: tuple[str, str]
    message: str
    mend: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.code}] {self.where}: {self.message}; {self.mend}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What the checks look at: the same for a pipeline file and for a build. `accuracy` is what the build measured."""

    engine: EngineName
    architecture: Architecture
    max_seq_tokens: int
    roles: tuple[ResolvedRole, ...]
    accuracy: Mapping[str, Accuracy] = field(default_factory=dict)
    elastic: bool = False
    convert_dtype: bool = False

    @classmethod
    def of(cls, pipeline: ResolvedPipeline) -> Deployment:
        return cls(
            engine=pipeline.engine,
            architecture=pipeline.architecture,
            max_seq_tokens=pipeline.max_seq_tokens,
            roles=tuple(pipeline.roles.values()),
            elastic=pipeline.spec.pools.elastic,
            convert_dtype=pipeline.spec.transfer.convert_dtype,
        )

    @property
    def converts(self) -> bool:
        """Whether its roles may differ in KV dtype, as far as one can be made of the other."""
        return self.convert_dtype and self.engine != "tensorrt_llm"


def check(deployment: Deployment, machine: Machine) -> list[Finding]:
    """All findings, errors first."""
    found = [finding for checker in _CHECKERS for finding in checker(deployment, machine)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def error(code: str, where: str, values: tuple[object, object], message: str, mend: str) -> Finding:
    pair = (str(values[0]), str(values[1]))
    return Finding(code=code, severity="error", where=where, values=pair, message=message, mend=mend)


def warning(code: str, where: str, values: tuple[object, object], message: str, mend: str) -> Finding:
    pair = (str(values[0]), str(values[1]))
    return Finding(code=code, severity="warning", where=where, values=pair, message=message, mend=mend)


def _precisions_known(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    known = ENGINES[deployment.engine].precisions
    for role in deployment.roles:
        if role.precision not in known:
            yield error(
                "precision_unsupported",
                f"pools.{role.role}.precision",
                (role.precision, ", ".join(known)),
                f"is {role.precision}; {deployment.engine} has weights in {', '.join(known)}",
                f"use precision: {known[0]}",
            )


def _kv_dtypes_differ(deployment: Deployment, role: ResolvedRole, where: str) -> Iterator[Finding]:
    first, dtype = deployment.roles[0], role.layout.dtype
    values = (first.layout.dtype, dtype)
    if dtype == first.layout.dtype:
        return
    if deployment.converts and CONVERTIBLE.issuperset(values):
        yield warning(
            "kv_dtype_converted",
            where,
            values,
            f"{first.role} has {first.layout.dtype} KV and {role.role} {dtype}: it is converted on its way, which "
            "costs time and, towards bf16, digits; answers may differ from those of one pool alone",
            "give one kv.dtype where exact tokens matter",
        )
        return
    can = "" if CONVERTIBLE.issuperset(values) else f" (only {' and '.join(sorted(CONVERTIBLE))} convert)"
    yield error(
        "kv_dtype_differs",
        where,
        values,
        f"{first.role} has {first.layout.dtype} KV and {role.role} {dtype}, so KV can't move between them{can}",
        "give one dtype as kv.dtype and leave the pools' kv_dtype at auto"
        + (", or set transfer.convert_dtype: true" if not can and deployment.engine != "tensorrt_llm" else ""),
    )


def _conversion_unused(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    dtypes = {role.layout.dtype for role in deployment.roles}
    if deployment.convert_dtype and (len(dtypes) < 2 or not deployment.converts):
        why = f"all pools have {min(dtypes)} KV" if len(dtypes) < 2 else f"{deployment.engine} moves its KV itself"
        yield warning(
            "convert_dtype_unused",
            "transfer.convert_dtype",
            ("true", ", ".join(sorted(dtypes))),
            f"is true, but {why}",
            "leave it out, or give the pools different kv_dtype",
        )


def _kv_dtypes(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    rules = ENGINES[deployment.engine]
    for role in deployment.roles:
        where, dtype = f"pools.{role.role}.kv_dtype", role.layout.dtype
        yield from _kv_dtypes_differ(deployment, role, where)
        feature = rules.kv_dtypes.get(dtype)
        if dtype not in rules.kv_dtypes:
            yield error(
                "kv_dtype_unsupported",
                where,
                (dtype, ", ".join(rules.kv_dtypes)),
                f"{deployment.engine} has no {dtype} KV",
                f"use kv.dtype: {next(iter(rules.kv_dtypes))}",
            )
        elif feature is not None and feature not in machine.cpu_features:
            yield error(
                "kv_dtype_cpu",
                where,
                (dtype, ", ".join(machine.cpu_features)),
                f"{dtype} KV needs a CPU that computes in {feature.upper()}; on this one results would be wrong",
                "use kv.dtype: f32 (weights may still be bf16 or int8)",
            )


def _tokens_per_block(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    allowed, found = ENGINES[deployment.engine].tokens_per_block, deployment.roles[0].layout.tokens_per_block
    if allowed is not None and found not in allowed:
        choice = ", ".join(map(str, allowed))
        yield error(
            "tokens_per_block",
            "kv.tokens_per_block",
            (found, choice),
            f"is {found}; {deployment.engine} has blocks of {choice} tokens",
            "leave it at auto",
        )


def _tp(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    heads = deployment.architecture.num_attention_heads
    for role in deployment.roles:
        if ENGINES[deployment.engine].has_weights and role.tp > heads:
            yield error(
                "tp_heads",
                f"pools.{role.role}.tp",
                (role.tp, heads),
                f"is {role.tp}, but the model has {heads} attention heads to share out",
                f"set it to {heads} or less",
            )


def _cores(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    owner: dict[int, str] = {}
    here = ", ".join(map(str, machine.cores))
    if not ENGINES[deployment.engine].on_cpu:
        return
    for role in deployment.roles:
        where, cores = f"pools.{role.role}.cores", role.profile.cores
        absent = [core for core in cores if core not in machine.cores]
        if absent:
            yield error(
                "cores_missing",
                where,
                (", ".join(map(str, absent)), here),
                f"names CPU {', '.join(map(str, absent))}; this machine lets us use {here}",
                "name CPUs that are there, or leave it at auto",
            )
        if not role.instances:
            continue
        shared = {owner[core]: core for core in cores if core in owner}
        for other, core in shared.items():
            yield warning(
                "cores_shared",
                where,
                (other, role.role),
                f"CPU {core} belongs to {other} as well, so the two slow each other down",
                "give each pool CPUs of its own",
            )
        owner |= dict.fromkeys(cores, role.role)
        share = max(1, len(cores) // len(role.instances))
        if role.profile.threads > share:
            yield warning(
                "threads_over_cores",
                f"pools.{role.role}.threads",
                (role.profile.threads, share),
                f"is {role.profile.threads}, but an instance has {share} of the pool's {len(cores)} CPUs",
                f"set it to {share} or leave it at auto",
            )


def _steps(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    for role in deployment.roles:
        profile = role.profile
        if profile.max_step_tokens < profile.max_batch:
            yield error(
                "step_below_batch",
                f"pools.{role.role}.max_step_tokens",
                (profile.max_step_tokens, profile.max_batch),
                f"is {profile.max_step_tokens}; a batch of {profile.max_batch} needs that many tokens a step",
                "raise it, or lower max_batch",
            )
        if profile.chunk_tokens > profile.max_step_tokens:
            yield error(
                "chunk_above_step",
                f"pools.{role.role}.chunk_tokens",
                (profile.chunk_tokens, profile.max_step_tokens),
                f"is {profile.chunk_tokens}; a step computes at most {profile.max_step_tokens} tokens",
                "lower it, or raise max_step_tokens",
            )


def _sequence(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    longest, known = deployment.max_seq_tokens, deployment.architecture.max_position_embeddings
    if longest > known:
        yield error(
            "max_seq_tokens",
            "kv.max_seq_tokens",
            (longest, known),
            f"is {longest}; the model knows {known} positions (max_position_embeddings)",
            f"set it to {known} or less",
        )
    for role in deployment.roles:
        block = role.layout.tokens_per_block
        if longest <= block:
            yield error(
                "max_seq_tokens_small",
                "kv.max_seq_tokens",
                (longest, block),
                f"is {longest}; a sequence must be longer than one block of {block} tokens",
                f"set it to {block + 1} or more",
            )
            break
    for role in deployment.roles:
        held = role.profile.kv_blocks * role.layout.tokens_per_block
        if held < longest:
            yield error(
                "kv_pool_small",
                f"pools.{role.role}.kv_tokens",
                (held, longest),
                f"holds {held} tokens, less than one sequence of {longest}",
                "raise it, or lower kv.max_seq_tokens",
            )


def _precisions(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    first = deployment.roles[0]
    for role in deployment.roles[1:]:
        if role.precision != first.precision:
            pair = [found for found in (first.precision, role.precision) if found in deployment.accuracy]
            measured = "; ".join(accuracy_words(found, deployment.accuracy[found]) for found in pair)
            yield warning(
                "precision_differs",
                f"pools.{role.role}.precision",
                (first.precision, role.precision),
                f"{first.role} has {first.precision} weights and {role.role} {role.precision}, so an answer depends "
                f"on which of them computed it{f' ({measured})' if measured else ''}",
                "use one precision unless that difference is small enough for you"
                + ("" if measured else " (`trtpd build` measures it)"),
            )
    for role in deployment.roles:
        figures = deployment.accuracy[role.precision].figures if role.precision in deployment.accuracy else None
        if figures is not None and figures.kl_nats > KL_BOUND_NATS:
            yield warning(
                "precision_error",
                f"pools.{role.role}.precision",
                (f"{figures.kl_nats:.3f}", KL_BOUND_NATS),
                f"{accuracy_words(role.precision, deployment.accuracy[role.precision])}; KL is above {KL_BOUND_NATS}",
                "use a wider precision for this model",
            )


def _room(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    if not ENGINES[deployment.engine].on_cpu:
        return
    pools = sum(len(role.instances) * role.pool_bytes for role in deployment.roles)
    weights = sum(len(role.instances) * _weights_bytes(deployment, role) for role in deployment.roles)
    mend = "lower kv_tokens or the number of instances"
    yield from _fits("shm_room", "the KV pools", "/dev/shm", pools, machine.shm_bytes, machine.shm_free_bytes, mend)
    yield from _fits(
        "memory_room",
        "weights and KV pools",
        "memory",
        weights + pools,
        machine.memory_bytes,
        machine.memory_free_bytes,
        mend,
    )


def _weights_bytes(deployment: Deployment, role: ResolvedRole) -> int:
    """Of one instance, as it holds them."""
    held = "f32" if role.profile.widen_weights else role.precision
    return weights_bytes(deployment.engine, deployment.architecture, held, role.tp)


def _elastic(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    """An instance that takes the other role runs that role's engine where it runs now."""
    if not deployment.elastic:
        return
    pair = {role.role: role for role in deployment.roles if role.role != "mixed"}
    if len(pair) < 2:
        mend = "give pools.prefill and pools.decode, or set it to false"
        yield error("elastic_pair", "pools.elastic", (True, "mixed"), "is true, but there are no two roles", mend)
        return
    prefill, decode = pair["prefill"], pair["decode"]
    if prefill.tp != decode.tp:
        yield error(
            "elastic_tp",
            "pools.elastic",
            (prefill.tp, decode.tp),
            f"is true, but prefill has tp {prefill.tp} and decode tp {decode.tp}: an instance can't take the other "
            "role on its own ranks",
            "give both one tp, or set it to false",
        )
    if len(prefill.instances) + len(decode.instances) < 3:
        yield warning(
            "elastic_few",
            "pools.elastic",
            (len(prefill.instances), len(decode.instances)),
            "is true, but each pool has one instance, and the last of a role never switches",
            "give one pool more instances",
        )
    if ENGINES[deployment.engine].on_cpu:
        yield from _elastic_room(deployment, machine, prefill, decode)


def _elastic_room(
    deployment: Deployment, machine: Machine, prefill: ResolvedRole, decode: ResolvedRole
) -> Iterator[Finding]:
    """The worst it can come to: all but one instance in the role that takes more."""
    count = len(prefill.instances) + len(decode.instances)
    mixed = [role for role in deployment.roles if role.role == "mixed"]
    mend = "lower kv_tokens or the number of instances, or set pools.elastic to false"

    def worst(bytes_of: Callable[[ResolvedRole], int]) -> int:
        small, large = sorted((bytes_of(prefill), bytes_of(decode)))
        return (count - 1) * large + small + sum(len(role.instances) * bytes_of(role) for role in mixed)

    pools = worst(lambda role: role.pool_bytes)
    weights = worst(lambda role: _weights_bytes(deployment, role))
    shm, memory = (machine.shm_bytes, machine.shm_free_bytes), (machine.memory_bytes, machine.memory_free_bytes)
    yield from _fits("elastic_shm_room", "the KV pools, most instances in one role,", "/dev/shm", pools, *shm, mend)
    what = "weights and KV pools, most instances in one role,"
    yield from _fits("elastic_memory_room", what, "memory", weights + pools, *memory, mend)


def _fits(
    code: str, what: str, place: str, needed_bytes: int, total_bytes: int, free_bytes: int, mend: str
) -> Iterator[Finding]:
    """An error if it can never fit; a warning if it doesn't now, since what fills it may be gone by then."""
    needed = f"{needed_bytes // _MIB} MiB"
    if needed_bytes > total_bytes:
        size = f"{total_bytes // _MIB} MiB"
        yield error(code, "pools", (needed, size), f"{what} need {needed}; {place} has {size} in all", mend)
    elif needed_bytes > free_bytes:
        free = f"{free_bytes // _MIB} MiB"
        yield warning(code, "pools", (needed, free), f"{what} need {needed}; {place} has {free} free now", mend)


_CHECKERS = (
    _precisions_known,
    _kv_dtypes,
    _conversion_unused,
    _tokens_per_block,
    _tp,
    _cores,
    _steps,
    _sequence,
    _precisions,
    _room,
    _elastic,
)
