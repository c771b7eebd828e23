"""From points measured to the terms of a step's time, and how far off they are.

Least squares of the relative error with terms of at least 0: a long prefill and a short decode step count alike. With
so few terms every choice of those that are 0 can be tried, which gives the optimum itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from trtpd.build.cost_profile import Residuals, StepFit, StepPoint, TransferFit, TransferPoint
from trtpd.perf.resampling import Floats

TERMS = (
    "fixed_s",
    "prefill_step_s",
    "prefill_token_s",
    "prefill_pair_s",
    "decode_step_s",
    "decode_sequence_s",
    "decode_kv_token_s",
)
POINTS_LEAST = 3
"""Of a kind of work, before its terms are fitted."""

SIZES_LEAST = 2
"""Of hand-offs, before a rate is fitted."""

_BETTER = 1e-9


def work_of(point: StepPoint) -> tuple[float, ...]:
    """What the point's steps held, in the order of TERMS."""
    return (
        float(point.steps),
        float(point.prefill_steps),
        float(point.prefill_tokens),
        point.prefill_pairs,
        float(point.decode_steps),
        float(point.decode_sequences),
        float(point.decode_kv_tokens),
    )


def points_of_each_kind(points: Sequence[StepPoint]) -> dict[str, int]:
    """Of prefill and of decode: a fit needs POINTS_LEAST of each."""
    kinds = [point.kind for point in points]
    return {kind: kinds.count(kind) for kind in ("prefill", "decode")}


def fit_steps(points: Sequence[StepPoint]) -> StepFit | None:
    """None while there are too few points of prefill or of decode to tell."""
    if min(points_of_each_kind(points).values()) < POINTS_LEAST:
        return None
    work = np.array([work_of(point) for point in points])
    seconds = np.array([point.seconds for point in points])
    terms = nonnegative(work / seconds[:, None], np.ones(len(points)))
    return StepFit(**dict(zip(TERMS, terms.tolist(), strict=True)), residuals=residuals(work @ terms, seconds))


def fit_transfer(points: Sequence[TransferPoint]) -> TransferFit | None:
    """None for fewer than SIZES_LEAST sizes, or where larger ones take no longer."""
    if len({point.bytes for point in points}) < SIZES_LEAST:
        return None
    work = np.array([(1.0, float(point.bytes)) for point in points])
    seconds = np.array([point.seconds for point in points])
    terms = nonnegative(work / seconds[:, None], np.ones(len(points)))
    fixed_s, byte_s = terms.tolist()
    if byte_s <= 0.0:
        return None
    return TransferFit(fixed_s=fixed_s, bytes_per_s=1.0 / byte_s, residuals=residuals(work @ terms, seconds))


def transfer_s(fit: TransferFit, moved_bytes: int) -> float:
    """What the fit says of so many bytes."""
    return fit.fixed_s + moved_bytes / fit.bytes_per_s


def predicted_s(fit: StepFit, point: StepPoint) -> float:
    """What the fit says of a point."""
    return float(sum(getattr(fit, term) * count for term, count in zip(TERMS, work_of(point), strict=True)))


def nonnegative(work: Floats, target: Floats) -> Floats:
    """The x >= 0 with the least |work x - target|; of equally good ones the one with the fewest terms."""
    scale = np.linalg.norm(work, axis=0)
    usable = [column for column in range(work.shape[1]) if scale[column] > 0.0]
    best, best_error = np.zeros(work.shape[1]), float(target @ target)
    for count in range(1, len(usable) + 1):
        for columns in combinations(usable, count):
            chosen = list(columns)
            found, _, _, _ = np.linalg.lstsq(work[:, chosen] / scale[chosen], target, rcond=None)
            if (found < 0.0).any():
                continue
            left = work[:, chosen] @ (found / scale[chosen]) - target
            error = float(left @ left)
            if error < best_error - _BETTER * len(target):
                best, best_error = np.zeros(work.shape[1]), error
                best[chosen] = found / scale[chosen]
    return best


def residuals(predicted: Floats, measured: Floats) -> Residuals:
    errors = np.abs(predicted / measured - 1.0)
    p50, p95 = np.quantile(errors, (0.5, 0.95)).tolist()
    return Residuals(points=len(errors), p50=p50, p95=p95, worst=float(errors.max()))
