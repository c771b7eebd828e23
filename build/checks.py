"""What can't work together in a pipeline, found before it is built or served. Pure: one function per concern.

Whether a machine holds it is machine_checks.py's.
"""

from __future__ import annotations

from collections.abc import Iterator

from trtpd.build.accuracy import KL_BOUND_NATS, accuracy_words
from trtpd.build.engines import ENGINES
from trtpd.build.findings import Deployment, Finding, error, warning
from trtpd.build.machine import Machine
from trtpd.build.machine_checks import check_cores, check_elastic_room, check_room
from trtpd.build.resolve import ResolvedRole
from trtpd.kv_transfer.layout import CONVERTIBLE

PRECISION_CODES = ("precision_differs", "precision_error")
"""Findings that depend on what a build has measured."""


def check(deployment: Deployment, machine: Machine) -> list[Finding]:
    """All findings, errors first."""
    found = [finding for checker in _CHECKERS for finding in checker(deployment, machine)]
    return sorted(found, key=lambda finding: finding.severity != "error")


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


_CHECKERS = (
    _precisions_known,
    _kv_dtypes,
    _conversion_unused,
    _tokens_per_block,
    _tp,
    check_cores,
    _steps,
    _sequence,
    _precisions,
    check_room,
    _elastic,
    check_elastic_room,
)
