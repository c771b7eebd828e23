"""Whether something that was watched for long grew: a line through the means of equal spans of time.

Samples that follow each other are not independent (what a process holds now is what it held a moment ago), so a line
through all of them would be far too sure of itself. The means of a few long spans nearly are, as long as what is held
is forgotten well within a span: of noise that wanders for a third of one the intervals hold 92 % of the time, of noise
that wanders for a whole one 79 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from trtpd.perf.resampling import Floats

Verdict = Literal["flat", "one step", "grows", "unclear", "too short"]

SPANS = 10
T_QUANTILE = 2.306
"""Of Student's t for SPANS - 2 degrees of freedom at 95 %, two-sided."""

HOUR_S = 3600.0


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """`per_hour` lies between `low` and `high` with 95 % confidence; `later_per_hour` is that of the second half alone.
    `level`: the mean. `flat`: even `high` is within the limit; `grows`: even `low` is above 0, and `per_hour` is above
    the limit; `unclear` lies between. `one step`: it would be flat but for one jump between two neighbouring samples,
    `step` at `step_at_s`, no larger than an hour's limit: allocators take memory in such pieces (CPython: 1 MiB), and
    only a longer watch tells the first of a staircase from the only one."""

    samples: int
    level: float
    per_hour: float
    low: float
    high: float
    later_per_hour: float
    limit_per_hour: float
    verdict: Verdict
    step: float = 0.0
    step_at_s: float | None = None


def growth(at_s: Sequence[float] | Floats, values: Sequence[float] | Floats, *, limit_per_hour: float) -> Growth:
    """Of values seen at those instants, in order. Below two samples a span the verdict is `too short`."""
    level = float(np.mean(values)) if len(values) else 0.0
    hours, seen = np.asarray(at_s, dtype=np.float64) / HOUR_S, np.asarray(values, dtype=np.float64)
    if len(seen) < 2 * SPANS or hours[-1] <= hours[0]:
        return Growth(
            samples=len(seen),
            level=level,
            per_hour=0.0,
            low=0.0,
            high=0.0,
            later_per_hour=0.0,
            limit_per_hour=limit_per_hour,
            verdict="too short",
        )
    x, y = _span_means(hours), _span_means(seen)
    slope, low, high = _slope(x, y)
    verdict = _verdict(slope, low, high, limit_per_hour)
    at = int(np.argmax(np.diff(seen))) + 1
    step = float(seen[at] - seen[at - 1])
    if verdict in ("grows", "unclear") and 0.0 < step <= limit_per_hour:
        rest = _slope(x, _span_means(seen - step * (np.arange(len(seen)) >= at)))
        verdict = "one step" if _verdict(*rest, limit_per_hour) == "flat" else verdict
    return Growth(
        samples=len(seen),
        level=level,
        per_hour=slope,
        low=low,
        high=high,
        later_per_hour=_line(x[SPANS // 2 :], y[SPANS // 2 :])[0],
        limit_per_hour=limit_per_hour,
        verdict=verdict,
        step=max(step, 0.0),
        step_at_s=float(at_s[at]) if step > 0.0 else None,
    )


def _verdict(slope: float, low: float, high: float, limit: float) -> Verdict:
    if high <= limit:
        return "flat"
    return "grows" if low > 0.0 and slope > limit else "unclear"


def _slope(x: Floats, y: Floats) -> tuple[float, float, float]:
    """With the ends of its interval."""
    slope, error = _line(x, y)
    return slope, slope - T_QUANTILE * error, slope + T_QUANTILE * error


def _span_means(values: Floats) -> Floats:
    return np.array([part.mean() for part in np.array_split(values, SPANS)])


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope and its standard error, by least squares."""
    apart = x - x.mean()
    spread = float(apart @ apart)
    slope = float(apart @ y) / spread
    left = y - y.mean() - slope * apart
    return slope, float(np.sqrt(left @ left / (len(x) - 2) / spread))
