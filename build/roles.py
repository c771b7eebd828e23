"""What each role's engine is built for: role → RoleProfile. Pure.

Prefill is bound by arithmetic: it wants many tokens in one step. Decode is bound by memory and must not
jitter: its steps are small, a batch of sequences plus a bounded budget for prompts it computes itself. Mixed
does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from trtpd.build.manifest import Precision, RoleName, RoleProfile
from trtpd.kv_transfer.layout import KVLayout

LOCAL_PREFILL_TOKENS = 256
"""What a decode engine may compute of prompts beside its batch in one step."""

GPU_LOCAL_PREFILL_TOKENS = 512
GPU_PREFILL_STEP_TOKENS = 8192
"""Where the arithmetic of a GPU is saturated at the latest; a step of prefill is never smaller."""

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
    widen_weights: bool | None = None
    precision: Precision | None = None
    cores: tuple[int, ...] | None = None


def with_settings(wishes: RoleWishes, settings: Mapping[str, object]) -> RoleWishes:
    """The wishes with these of their fields set, as a manifest has them. Raises msgspec.ValidationError for a value of
    another type."""
    return msgspec.convert(asdict(wishes) | dict(settings), RoleWishes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRoom:
    """What a role's instances have: the CPUs of the pool, its instances, and the KV tokens each has room
    for."""

    cores: tuple[int, ...]
    instances: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDefaults:
    """What a role gets where neither the file nor a measurement says. `max_step_tokens` of decode comes on top
    of `tokens_per_sequence` for each of its batch (more than one where it decodes speculatively). `chunk_tokens`
    None: a chunk may fill the step. `prompt_tokens`: the batch must fill a step with prompts of that length.
    `steps` and `batches` are what a measurement tries."""

    max_step_tokens: int
    chunk_tokens: int | None
    max_batch: int
    tokens_per_sequence: int = 1
    prompt_tokens: int | None = None
    steps: tuple[int, ...] = _STEP_CANDIDATES
    batches: tuple[int, ...] = _BATCH_CANDIDATES


CPU_DEFAULTS: dict[RoleName, RoleDefaults] = {
    "prefill": RoleDefaults(max_step_tokens=2048, chunk_tokens=512, max_batch=16),
    "decode": RoleDefaults(max_step_tokens=LOCAL_PREFILL_TOKENS, chunk_tokens=LOCAL_PREFILL_TOKENS, max_batch=32),
    "mixed": RoleDefaults(max_step_tokens=2048, chunk_tokens=512, max_batch=32),
}


def gpu_defaults(
    role: RoleName, *, decode_batch: int, prompt_tokens: int, least_step_tokens: int = 0, draft_tokens: int = 0
) -> RoleDefaults:
    """What a role gets on a GPU: prefill a step where the arithmetic saturates and a batch of usual prompts that
    fills it; decode the batch that its KV and the TPOT target allow, with a small budget for prompts of its own.

    `least_step_tokens` is what a step of prefill must hold where prompts can't be cut into chunks.
    """
    if role == "decode":
        return RoleDefaults(
            max_step_tokens=GPU_LOCAL_PREFILL_TOKENS,
            chunk_tokens=GPU_LOCAL_PREFILL_TOKENS,
            max_batch=decode_batch,
            tokens_per_sequence=1 + draft_tokens,
            batches=tuple(range(8, 257, 8)) + tuple(range(320, 2049, 64)),
        )
    step = max(GPU_PREFILL_STEP_TOKENS, least_step_tokens)
    return RoleDefaults(
        max_step_tokens=step,
        chunk_tokens=None,
        max_batch=1 if role == "prefill" else decode_batch,
        prompt_tokens=prompt_tokens,
        steps=tuple(max(step, candidate) for candidate in (8192, 16_384, 32_768)),
    )


def profile_for(
    role: RoleName,
    wishes: RoleWishes,
    room: RoleRoom,
    layout: KVLayout,
    *,
    tpot_s: float | None = None,
    measure: MeasureStep | None = None,
    defaults: RoleDefaults | None = None,
) -> RoleProfile:
    """The profile of a role: the file's wishes, else what `measure` finds best, else the role's defaults
    (CPU_DEFAULTS unless given).

    What the file doesn't say fits what it says: a step has a token for each sequence, and a chunk fits into
    a step. Wishes that don't fit each other are kept for lint to name. KV is rounded down to whole blocks,
    but at least one.
    """
    defaults = defaults or CPU_DEFAULTS[role]
    max_batch = wishes.max_batch or defaults.max_batch
    step = wishes.max_step_tokens
    if measure is not None and role == "decode" and wishes.max_batch is None and tpot_s is not None:
        max_batch = _batch_within(tpot_s, measure, defaults.batches)
    if measure is not None and role != "decode" and step is None:
        step = _saturating_step(role, measure, defaults.steps)
    if step is None:
        step = defaults.max_step_tokens
        step = max_batch * defaults.tokens_per_sequence + step if role == "decode" else max(max_batch, step)
    if defaults.prompt_tokens is not None and wishes.max_batch is None:
        max_batch = max(max_batch, min(step, -(-step // defaults.prompt_tokens)))
    kv_tokens = wishes.kv_tokens or room.kv_tokens
    return RoleProfile(
        max_step_tokens=step,
        chunk_tokens=wishes.chunk_tokens or min(defaults.chunk_tokens or step, step),
        max_batch=max_batch,
        kv_blocks=max(1, kv_tokens // layout.tokens_per_block),
        threads=wishes.threads or max(1, len(room.cores) // max(1, room.instances)),
        cores=room.cores,
        widen_weights=bool(wishes.widen_weights),
    )


def _saturating_step(role: RoleName, measure: MeasureStep, steps: tuple[int, ...]) -> int:
    """The smallest step whose tokens a second come near the best: more only adds to everyone's wait."""
    rates = {tokens: tokens / measure(role, tokens) for tokens in steps}
    best = max(rates.values())
    return next(tokens for tokens, rate in rates.items() if rate >= _KNEE * best)


def _batch_within(tpot_s: float, measure: MeasureStep, batches: tuple[int, ...]) -> int:
    """The largest batch whose step keeps the target; the smallest candidate if none does."""
    kept = [batch for batch in batches if measure("decode", batch) <= tpot_s]
    return max(kept, default=batches[0])


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
