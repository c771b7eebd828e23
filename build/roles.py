"""What each role's engine is built for: role → RoleProfile. Pure.

Prefill is bound by arithmetic: it wants many tokens in one step. Decode is bound by memory and must not
jitter: its steps are small, a batch of sequences plus a bounded budget for prompts it computes itself. Mixed
does both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtpd.build.manifest import RoleName, RoleProfile
from trtpd.kv_transfer.layout import KVLayout

LOCAL_PREFILL_TOKENS = 256
"""What a decode engine may compute of prompts beside its batch in one step."""

_KNEE = 0.95
_STEP_CANDIDATES = (256, 512, 1024, 2048, 4096, 8192)
_BATCH_CANDIDATES = (4, 8, 16, 32, 64, 128)

MeasureStep = Callable[[RoleName, int], float]
"""Seconds of one step: of so many prompt tokens for prefill and mixed, of so many sequences for decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWishes:
    """What the pipeline file says of a role; None leaves it to the role."""

    max_batch: int | None = None
    max_step_tokens: int | None = None
    chunk_tokens: int | None = None
    kv_tokens: int | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRoom:
    """What a role's instances have: the CPUs of the pool, its instances, and the KV tokens each has room
    for."""

    cores: tuple[int, ...]
    instances: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """`max_step_tokens` of decode comes on top of its batch."""

    max_step_tokens: int
    chunk_tokens: int
    max_batch: int


_DEFAULTS: dict[RoleName, _Defaults] = {
    "prefill": _Defaults(max_step_tokens=2048, chunk_tokens=512, max_batch=16),
    "decode": _Defaults(max_step_tokens=LOCAL_PREFILL_TOKENS, chunk_tokens=LOCAL_PREFILL_TOKENS, max_batch=32),
    "mixed": _Defaults(max_step_tokens=2048, chunk_tokens=512, max_batch=32),
}


def profile_for(
    role: RoleName,
    wishes: RoleWishes,
    room: RoleRoom,
    layout: KVLayout,
    *,
    tpot_s: float | None = None,
    measure: MeasureStep | None = None,
) -> RoleProfile:
    """The profile of a role: the file's wishes, else what `measure` finds best, else the role's defaults.

    What the file doesn't say fits what it says: a step has a token for each sequence, and a chunk fits into
    a step. Wishes that don't fit each other are kept for lint to name. KV is rounded down to whole blocks,
    but at least one.
    """
    defaults = _DEFAULTS[role]
    max_batch = wishes.max_batch or defaults.max_batch
    step = wishes.max_step_tokens
    if measure is not None and role == "decode" and wishes.max_batch is None and tpot_s is not None:
        max_batch = _batch_within(tpot_s, measure)
    if measure is not None and role != "decode" and step is None:
        step = _saturating_step(role, measure)
    if step is None:
        step = defaults.max_step_tokens
        step = max_batch + step if role == "decode" else max(max_batch, step)
    kv_tokens = wishes.kv_tokens or room.kv_tokens
    return RoleProfile(
        max_step_tokens=step,
        chunk_tokens=wishes.chunk_tokens or min(defaults.chunk_tokens, step),
        max_batch=max_batch,
        kv_blocks=max(1, kv_tokens // layout.tokens_per_block),
        threads=wishes.threads or max(1, len(room.cores) // max(1, room.instances)),
        cores=room.cores,
    )


def _saturating_step(role: RoleName, measure: MeasureStep) -> int:
    """The smallest step whose tokens a second come near the best: more only adds to everyone's wait."""
    rates = {tokens: tokens / measure(role, tokens) for tokens in _STEP_CANDIDATES}
    best = max(rates.values())
    return next(tokens for tokens, rate in rates.items() if rate >= _KNEE * best)


def _batch_within(tpot_s: float, measure: MeasureStep) -> int:
    """The largest batch whose step keeps the target; the smallest candidate if none does."""
    kept = [batch for batch in _BATCH_CANDIDATES if measure("decode", batch) <= tpot_s]
    return max(kept, default=_BATCH_CANDIDATES[0])


def split_cores(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Deals `cores` out in `parts` runs as equal as can be, the first ones larger; with fewer cores than
    parts each part gets one, shared with others."""
    if len(cores) < parts:
        return [(cores[part % len(cores)],) for part in range(parts)]
    small, extra = divmod(len(cores), parts)
    runs, start = [], 0
    for part in range(parts):
        end = start + small + (1 if part < extra else 0)
        runs.append(tuple(cores[start:end]))
        start = end
    return runs
