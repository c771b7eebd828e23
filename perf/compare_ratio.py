"""How two arms of a comparison stand to each other: the ratio of what they served well, and how sure it is.

All arms get the same requests, so chance in which requests there were is the same for both: blocks of consecutive
arrivals are drawn again and again, the same ones for both arms, run by run. What this can't see is a machine that was
slower in one run than in another; only repeats show that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trtpd.perf.comparison import Comparison, Point
from trtpd.perf.goodput import DEFINITIONS
from trtpd.perf.resampling import LEVEL, blocks

RESAMPLES = 2000
LEAST_APART = 6
"""With fewer requests that one arm alone served well, even all of them on one side would not be significant (a sign
test of 5 has p = 0.06), whatever resampling so few says."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """What one arm served well over what another did. `value` and `high` are infinite where the other served nothing.
    `runs`: of each arm. `requests`: of the first arm's, that were counted. `apart`: how many of them (or of the better
    arm's, where the rates differ) speak for a difference."""

    value: float
    low: float
    high: float
    runs: tuple[int, int]
    requests: int
    apart: int

    @property
    def word(self) -> Literal["ahead", "behind", "not shown"]:
        """What the interval says."""
        if self.apart < LEAST_APART or self.low <= 1.0 <= self.high:
            return "not shown"
        return "ahead" if self.low > 1.0 else "behind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What an arm served at a rate, its usable runs together. `per_s`: its goodput; None where the definition's goal
    was missed."""

    rate: float
    runs: int
    good: int
    offered: int
    per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The counted requests of a run in the order of arrival: their numbers, and whether each was served well."""

    repeat: int
    numbers: tuple[int, ...]
    good: Floats
    window_s: float

    @classmethod
    def of(cls, point: Point, comparison: Comparison) -> _Run:
        judge = DEFINITIONS[comparison.plan.definition]
        kept = sorted(
            (record for record in point.records if record.scheduled_s >= point.figures.warm_up_s),
            key=lambda record: (record.scheduled_s, record.number),
        )
        good = np.array([judge.verdict(record, comparison.slo) == "good" for record in kept], dtype=np.float64)
        return cls(
            repeat=point.file.repeat,
            numbers=tuple(record.number for record in kept),
            good=good,
            window_s=point.figures.window_s,
        )

    def only(self, numbers: Sequence[int]) -> _Run:
        """Those requests, in that order."""
        at = {number: index for index, number in enumerate(self.numbers)}
        good = self.good[[at[number] for number in numbers]]
        return _Run(repeat=self.repeat, numbers=tuple(numbers), good=good, window_s=self.window_s)


def usable(points: Sequence[Point], arm: str, rate: float | None = None) -> list[Point]:
    """An arm's runs whose figures may be used."""
    return [p for p in points if p.file.arm == arm and not p.file.fault and (rate is None or p.file.rate == rate)]


def served(comparison: Comparison, arm: str, rate: float) -> Served | None:
    """None without a usable run that offered something."""
    runs = _runs(comparison, arm, rate)
    if not runs:
        return None
    good = float(sum(run.good.sum() for run in runs))
    offered, window_s = sum(len(run.good) for run in runs), sum(run.window_s for run in runs)
    per_s = float(_per_s(comparison, np.array([good]), np.array([float(offered)]), window_s)[0])
    missed = DEFINITIONS[comparison.plan.definition].goal is not None and per_s == 0.0
    return Served(rate=rate, runs=len(runs), good=int(good), offered=offered, per_s=None if missed else per_s)


def ratio_at(comparison: Comparison, arm: str, other: str, rate: float) -> Ratio | None:
    """Of the requests served well at one rate, over the repeats that both were measured in; None where there are none.
    A goal the definition may have is left aside."""
    theirs = {run.repeat: run for run in _runs(comparison, other, rate)}
    pairs = [(run, theirs[run.repeat]) for run in _runs(comparison, arm, rate) if run.repeat in theirs]
    pairs = [both for a, b in pairs if (both := _paired(a, b)) is not None]
    if not pairs:
        return None
    mine, others = (sum(_drawn(run, rate).sum(axis=1) for run in side) for side in zip(*pairs, strict=True))
    return _ratio(
        np.asarray(mine),
        np.asarray(others),
        runs=(len(pairs), len(pairs)),
        requests=sum(len(a.numbers) for a, _ in pairs),
        apart=int(sum(np.abs(a.good - b.good).sum() for a, b in pairs)),
    )


def ratio_of_bests(
    comparison: Comparison, arm: str, other: str, rates: tuple[Sequence[float], Sequence[float]]
) -> Ratio | None:
    """Of goodputs, each arm at the best of its `rates`: with a definition that has a goal, the highest at which a
    resample meets it. Where both have one and the same rate, over the repeats that both were measured in."""
    if len(rates[0]) == 1 and list(rates[0]) == list(rates[1]) and DEFINITIONS[comparison.plan.definition].goal is None:
        return ratio_at(comparison, arm, other, rates[0][0])
    sides, found = [], []
    for name, its in zip((arm, other), rates, strict=True):
        runs = {rate: _runs(comparison, name, rate) for rate in its}
        sampled = [_goodputs(comparison, its_runs, rate) for rate, its_runs in runs.items() if its_runs]
        if not sampled:
            return None
        sides.append(np.max(sampled, axis=0))
        found.append([run for its_runs in runs.values() for run in its_runs])
    goods = [int(sum(run.good.sum() for run in runs)) for runs in found]
    return _ratio(
        *sides,
        runs=(len(found[0]), len(found[1])),
        requests=sum(len(run.numbers) for run in found[0]),
        apart=max(goods),
    )


def _runs(comparison: Comparison, arm: str, rate: float) -> list[_Run]:
    runs = [_Run.of(point, comparison) for point in usable(comparison.points, arm, rate)]
    return [run for run in runs if run.numbers and run.window_s > 0.0]


def _paired(a: _Run, b: _Run) -> tuple[_Run, _Run] | None:
    """The requests that both counted, in the order of the first's arrivals (a session's later turns come when its
    server is done with the former)."""
    there = set(b.numbers)
    numbers = [number for number in a.numbers if number in there]
    return (a.only(numbers), b.only(numbers)) if numbers else None


def _drawn(run: _Run, rate: float) -> Floats:
    """The run's flags as they are, then RESAMPLES times drawn anew. The draws depend on nothing but the run's place and
    size, so that two arms' are of the same requests."""
    rng = np.random.default_rng([23, run.repeat, round(rate * 1e6), len(run.good)])
    drawn = run.good[blocks(len(run.good), rng, RESAMPLES)]
    return np.concatenate([run.good[None, :], drawn])


def _goodputs(comparison: Comparison, runs: Sequence[_Run], rate: float) -> Floats:
    """Of all runs together: as they are, then for each resample. 0 where the goal is missed."""
    good = np.sum([_drawn(run, rate).sum(axis=1) for run in runs], axis=0)
    offered = np.full_like(good, sum(len(run.good) for run in runs))
    return _per_s(comparison, good, offered, sum(run.window_s for run in runs))


def _per_s(comparison: Comparison, good: Floats, offered: Floats, window_s: float) -> Floats:
    goal = DEFINITIONS[comparison.plan.definition].goal
    counted = good if goal is None else np.where(good / offered >= goal, offered, 0.0)
    return np.asarray(counted / window_s, dtype=np.float64)


def _ratio(mine: Floats, others: Floats, *, runs: tuple[int, int], requests: int, apart: int) -> Ratio:
    """The first of each is what was measured. Nothing over nothing shows no difference: 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where((mine == 0.0) & (others == 0.0), 1.0, mine / others)
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low = float(np.percentile(ratios[1:], tail, method="lower"))
    high = float(np.percentile(ratios[1:], 100.0 - tail, method="higher"))
    value = float(ratios[0])
    return Ratio(value=value, low=min(value, low), high=max(value, high), runs=runs, requests=requests, apart=apart)
