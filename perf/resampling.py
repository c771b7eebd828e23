"""Percentiles and shares with confidence intervals, and drift.

Two ways to an interval, and the hull of both is taken. Drawing samples anew sees that requests that follow each other
share a queue: blocks of neighbours are drawn, not single requests, and a request's token gaps stay together. But what
was not seen is never drawn, so of a few requests it is far too sure of a p99, or of a share near 1. Bounds by ranks (of
percentiles) and by Clopper and Pearson (of shares) hold whatever the distribution, for independent requests.

Where neighbours depend strongly on each other (an overloaded server) the hull holds less often than it says:
docs/decisions/2026-11-30-intervals-that-hold.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 400
LEVEL = 0.95
TAIL = (1.0 - LEVEL) / 2.0
QUANTILES = (0.5, 0.9, 0.99)
DRIFT_RATIO = 1.25
DRIFT_SHARE = 0.1
MIN_DRIFT_SAMPLES = 30
HALF_TAIL = 0.0829
"""Two figures whose intervals leave so much out on each side make a ratio whose interval leaves out TAIL."""


class Interval(msgspec.Struct, frozen=True):
    """A figure and where it lies with LEVEL confidence. A bound is None where so few values can't give one."""

    value: float
    low: float | None
    high: float | None

    def times(self, factor: float) -> Interval:
        """`factor` is not negative."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Interval(self.value * factor, low, high)

    def around(self, write: Callable[[float], str]) -> str:
        """The bounds in words: "11.9 to 12.8", "at least 11.9", "at most 12.8" or "not bounded"."""
        if self.low is None:
            return "not bounded" if self.high is None else f"at most {write(self.high)}"
        return f"at least {write(self.low)}" if self.high is None else f"{write(self.low)} to {write(self.high)}"


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a quantity. `count` values; seconds throughout."""

    count: int
    mean: float
    p50: Interval
    p90: Interval
    p99: Interval
    largest: float


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The last third of a run beside its first: medians of a latency, with `change` their ratio; or shares, with
    `change` their difference. `flagged`: it surely left 1 / DRIFT_RATIO to DRIFT_RATIO, or changed by more than
    DRIFT_SHARE, so figures over the whole run describe no steady state."""

    first: float
    last: float
    change: Interval
    flagged: bool


def blocks(count: int, rng: np.random.Generator, resamples: int = RESAMPLES) -> npt.NDArray[np.int64]:
    """Indices of `resamples` samples of `count`, made of runs of neighbours (wrapping round) of length count^(1/2)."""
    length = max(1, round(count**0.5))
    starts = rng.integers(0, count, size=(resamples, -(-count // length)))
    runs = (starts[:, :, None] + np.arange(length)) % count
    return np.asarray(runs.reshape(resamples, -1)[:, :count], dtype=np.int64)


def distribution(values: Sequence[float], rng: np.random.Generator) -> Distribution | None:
    """None for no values. One value per request, in the order of the requests."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    sampled = np.percentile(array[blocks(len(array), rng)], _percent(QUANTILES), axis=1)
    return _distribution(np.sort(array), sampled, [len(array)] * len(QUANTILES))


def grouped_distribution(groups: Sequence[Sequence[float]], rng: np.random.Generator) -> Distribution | None:
    """As `distribution` over all values of all groups (a request's gaps), drawing whole groups."""
    groups = [group for group in groups if len(group)]
    if not groups:
        return None
    ordered, owners = in_order(groups)
    sampled = np.empty((len(QUANTILES), RESAMPLES))
    for column, drawn in enumerate(blocks(len(groups), rng)):
        # How often each group was drawn weighs its values; the percentile is where the weights pass it.
        weights = weights_of(drawn, owners, len(groups))
        at = np.searchsorted(weights, np.array(QUANTILES) * weights[-1])
        sampled[:, column] = ordered[np.minimum(at, len(ordered) - 1)]
    return _distribution(ordered, sampled, [_worth(ordered, owners, quantile) for quantile in QUANTILES])


def in_order(groups: Sequence[Sequence[float]]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """All values of all groups, ascending, and of which group each is."""
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups])
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    return values[order], owners[order]


def weights_of(drawn: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], groups: int) -> npt.NDArray[np.int64]:
    """How many values lie at each place or before it if so many `groups` are drawn as often as `drawn` says."""
    return np.cumsum(np.bincount(drawn, minlength=groups)[owners])


def _worth(ordered: Floats, owners: npt.NDArray[np.int64], quantile: float) -> int:
    """How many independent values these are worth, for the share of them below a quantile: as many as give that share
    the variance that it has between groups (Kish's effective size). As many as groups where that can't be told."""
    sizes = np.bincount(owners)
    if len(sizes) < 2:
        return 1
    at = np.percentile(ordered, 100.0 * quantile)
    worth = []
    for below in {int(np.searchsorted(ordered, at, side="left")), int(np.searchsorted(ordered, at, side="right"))}:
        if 0 < below < len(ordered):
            part = below / len(ordered)
            apart = np.bincount(owners[:below], minlength=len(sizes)) - part * sizes
            variance = len(sizes) / (len(sizes) - 1) * float(apart @ apart) / len(ordered) ** 2
            worth.append(part * (1.0 - part) / variance if variance > 0.0 else len(ordered))
    return max(1, min(int(min(worth, default=len(sizes))), len(ordered)))


def _distribution(ordered: Floats, sampled: Floats, worth: Sequence[int]) -> Distribution:
    """`worth`: how many independent values they are, for each quantile."""
    p50, p90, p99 = (
        _hull(float(np.percentile(ordered, 100.0 * quantile)), drawn, *rank_bounds(ordered, quantile, size=size))
        for quantile, drawn, size in zip(QUANTILES, sampled, worth, strict=True)
    )
    return Distribution(
        count=len(ordered), mean=float(ordered.mean()), p50=p50, p90=p90, p99=p99, largest=float(ordered[-1])
    )


def _hull(value: float, drawn: Floats, low: float | None, high: float | None) -> Interval:
    """Of the figure, what resampling gave, and bounds got otherwise; what these leave open stays so."""
    least, most = np.percentile(drawn, _percent((TAIL, 1.0 - TAIL)))
    return Interval(
        value,
        None if low is None else min(value, float(least), low),
        None if high is None else max(value, float(most), high),
    )


def rank_bounds(
    ordered: Floats, quantile: float, *, size: int | None = None, tail: float = TAIL
) -> tuple[float | None, float | None]:
    """Values between which a quantile lies whatever the distribution, but for `tail` on each side: so many of a sample
    lie below it as a coin with that chance falls on heads. None where no rank will do. `size`: how many independent
    values they are worth."""
    size = len(ordered) if size is None else size
    chances = np.cumsum(np.exp(_log_ways(size) + _log_odds(size, quantile)))
    below, above = int(np.searchsorted(chances, tail, side="right")), int(np.searchsorted(chances, 1.0 - tail)) + 1
    each = len(ordered) / size
    return (
        None if below == 0 else float(ordered[int((below - 1) * each)]),
        None if above > size else float(ordered[min(int(np.ceil(above * each)), len(ordered)) - 1]),
    )


def share_bounds(good: int, count: int) -> tuple[float, float]:
    """By Clopper and Pearson: between these lies the share of which `good` of `count` were seen."""
    return _least_share(good, count), 1.0 - _least_share(count - good, count)


def _least_share(good: int, count: int) -> float:
    """The share at which as many as `good` or more of `count` come with a chance of TAIL."""
    if good == 0:
        return 0.0
    ways = _log_ways(count)[good:]
    low, high = 0.0, good / count
    for _ in range(50):
        middle = (low + high) / 2.0
        if middle <= 0.0 or float(np.exp(ways + _log_odds(count, middle)[good:]).sum()) < TAIL:
            low = middle
        else:
            high = middle
    return low


def _log_ways(count: int) -> Floats:
    """Logarithms of the ways to choose 0, 1, ... of `count`."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    return np.asarray(factorials[-1] - factorials - factorials[::-1], dtype=np.float64)


def _log_odds(count: int, chance: float) -> Floats:
    """Logarithms of the chance of one such choice."""
    chosen = np.arange(count + 1)
    return np.asarray(chosen * np.log(chance) + (count - chosen) * np.log1p(-chance), dtype=np.float64)


def _percent(shares: Sequence[float]) -> list[float]:
    return [100.0 * share for share in shares]


def share(flags: Sequence[bool], rng: np.random.Generator) -> Interval | None:
    """How many of them are true; None for none at all. Both bounds are there."""
    if not flags:
        return None
    array = np.asarray(flags, dtype=np.float64)
    means = array[blocks(len(array), rng)].mean(axis=1)
    return _hull(float(array.mean()), means, *share_bounds(sum(flags), len(flags)))


def drift(values: Sequence[float], rng: np.random.Generator) -> Drift | None:
    """Of a latency. None for too few values to tell, or a median of 0. In the order of the requests."""
    thirds = _thirds(values)
    if thirds is None or float(np.median(thirds[0])) <= 0.0:
        return None
    first, last = thirds
    medians = [np.median(part[blocks(len(part), rng)], axis=1) for part in thirds]
    (first_low, first_high), (last_low, last_high) = (rank_bounds(np.sort(one), 0.5, tail=HALF_TAIL) for one in thirds)
    change = _hull(
        float(np.median(last)) / float(np.median(first)),
        medians[1] / np.maximum(medians[0], 1e-12),
        last_low / first_high if last_low is not None and first_high else None,
        last_high / first_low if last_high is not None and first_low else None,
    )
    return Drift(
        first=float(np.median(first)),
        last=float(np.median(last)),
        change=change,
        flagged=_beyond(change, 1.0 / DRIFT_RATIO, DRIFT_RATIO),
    )


def share_drift(flags: Sequence[bool], rng: np.random.Generator) -> Drift | None:
    """Of a share. None for too few to tell. In the order of the requests."""
    thirds = _thirds(flags)
    if thirds is None:
        return None
    (first, last), count = (float(part.mean()) for part in thirds), len(thirds[0])
    means = [part[blocks(count, rng)].mean(axis=1) for part in thirds]
    (first_low, first_high), (last_low, last_high) = (share_bounds(int(part.sum()), count) for part in thirds)
    # Newcombe's way to put two intervals together.
    change = _hull(
        last - first,
        means[1] - means[0],
        last - first - float(np.hypot(last - last_low, first_high - first)),
        last - first + float(np.hypot(last_high - last, first - first_low)),
    )
    return Drift(first=first, last=last, change=change, flagged=_beyond(change, -DRIFT_SHARE, DRIFT_SHARE))


def _thirds(values: Sequence[float]) -> tuple[Floats, Floats] | None:
    """The first and the last."""
    if len(values) < MIN_DRIFT_SAMPLES:
        return None
    array = np.asarray(values, dtype=np.float64)
    return array[: len(array) // 3], array[-(len(array) // 3) :]


def _beyond(change: Interval, low: float, high: float) -> bool:
    return (change.low is not None and change.low > high) or (change.high is not None and change.high < low)
