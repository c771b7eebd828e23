"""Percentiles with confidence intervals, and drift, by resampling.

Requests that follow each other share a queue, so they are not independent: blocks of neighbours are drawn, not
single requests, and a request's token gaps stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 400
LEVEL = 0.95
DRIFT_RATIO = 1.25
MIN_DRIFT_SAMPLES = 30


class Interval(msgspec.Struct, frozen=True):
    """A figure and where it lies with LEVEL confidence."""

    value: float
    low: float
    high: float


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a quantity. `count` values; seconds throughout."""

    count: int
    mean: float
    p50: Interval
    p90: Interval
    p99: Interval
    largest: float


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The median of the last third over that of the first. `flagged`: it surely left 1 / DRIFT_RATIO to
    DRIFT_RATIO, so figures over the whole run describe no steady state."""

    ratio: Interval
    flagged: bool


def blocks(count: int, rng: np.random.Generator, resamples: int = RESAMPLES) -> npt.NDArray[np.int64]:
    """Indices of `resamples` samples of `count`, made of runs of neighbours (wrapping round) of length count^(1/3)."""
    length = max(1, round(count ** (1 / 3)))
    starts = rng.integers(0, count, size=(resamples, -(-count // length)))
    runs = (starts[:, :, None] + np.arange(length)) % count
    return np.asarray(runs.reshape(resamples, -1)[:, :count], dtype=np.int64)


def distribution(values: Sequence[float], rng: np.random.Generator) -> Distribution | None:
    """None for no values. One value per request, in the order of the requests."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    sampled = np.percentile(array[blocks(len(array), rng)], (50, 90, 99), axis=1)
    return _distribution(array, sampled)


def grouped_distribution(groups: Sequence[Sequence[float]], rng: np.random.Generator) -> Distribution | None:
    """As `distribution` over all values of all groups (a request's gaps), drawing whole groups."""
    groups = [group for group in groups if len(group)]
    if not groups:
        return None
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups])
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    ordered, owners = values[order], owners[order]
    sampled = np.empty((3, RESAMPLES))
    for column, drawn in enumerate(blocks(len(groups), rng)):
        # How often each group was drawn weighs its values; the percentile is where the weights pass it.
        weights = np.cumsum(np.bincount(drawn, minlength=len(groups))[owners])
        at = np.searchsorted(weights, np.array([0.5, 0.9, 0.99]) * weights[-1])
        sampled[:, column] = ordered[np.minimum(at, len(ordered) - 1)]
    return _distribution(values, sampled)


def _distribution(values: Floats, sampled: Floats) -> Distribution:
    found = np.percentile(values, (50, 90, 99))
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low, high = np.percentile(sampled, (tail, 100.0 - tail), axis=1)
    p50, p90, p99 = (
        Interval(float(value), float(min(value, a)), float(max(value, b)))
        for value, a, b in zip(found, low, high, strict=True)
    )
    return Distribution(
        count=len(values), mean=float(values.mean()), p50=p50, p90=p90, p99=p99, largest=float(values.max())
    )


def share(flags: Sequence[bool], rng: np.random.Generator) -> Interval | None:
    """How many of them are true; None for none at all."""
    if not flags:
        return None
    array = np.asarray(flags, dtype=np.float64)
    means = array[blocks(len(array), rng)].mean(axis=1)
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low, high = np.percentile(means, (tail, 100.0 - tail))
    value = float(array.mean())
    return Interval(value, min(value, float(low)), max(value, float(high)))


def drift(values: Sequence[float], rng: np.random.Generator) -> Drift | None:
    """None for too few values to tell, or a median of 0. In the order of the requests."""
    if len(values) < MIN_DRIFT_SAMPLES:
        return None
    array = np.asarray(values, dtype=np.float64)
    third = len(array) // 3
    first, last = array[:third], array[-third:]
    base = float(np.median(first))
    if base <= 0.0:
        return None
    drawn = blocks(third, rng)
    ratios = np.median(last[blocks(third, rng)], axis=1) / np.maximum(np.median(first[drawn], axis=1), 1e-12)
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low, high = (float(one) for one in np.percentile(ratios, (tail, 100.0 - tail)))
    value = float(np.median(last)) / base
    return Drift(
        ratio=Interval(value, min(value, low), max(value, high)), flagged=low > DRIFT_RATIO or high < 1.0 / DRIFT_RATIO
    )
