"""Whether two instruments see the same: the ratio of their medians, how uncertain it is, and what is shown by that.

Request n is of the same lengths in both, so requests are drawn anew in pairs, with their neighbours (they share a
queue): what long and short prompts differ by is no uncertainty of the ratio. So are the turns, of one run each: what
changed on the machine between two runs is none of the instruments'. Of few pairs that is too sure; the interval is
the hull with the one that ranks give of the pairs' own ratios, which holds whatever their distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from trtpd.perf.resampling import RESAMPLES, TAIL, Floats, Interval, blocks, in_order, rank_bounds, weights_of

AGREE = 0.10
TURNS_LEAST = 2
"""Of one turn nothing tells the instruments from what changed on the machine meanwhile."""

Verdict = Literal["yes", "no", "not shown", "not compared"]


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, in seconds; ITL over all gaps between responses. None where nothing was measured. `requests` are
    those that the figures are of; `unfinished` those that did not finish, by why, the first ones included."""

    requests: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    unfinished: dict[str, int] = {}


class RunLatencies(Latencies, frozen=True, kw_only=True):
    """And what they are of, by the request's number in the workload."""

    ttft_s: dict[int, float] = {}
    gaps_s: dict[int, tuple[float, ...]] = {}


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Both instruments at one load: medians over the runs, and ours over theirs with its 95 % interval. `pairs`: how
    many requests both have figures of, over all `turns`."""

    load: str
    theirs: Latencies
    ours: Latencies
    ttft_ratio: Interval | None
    itl_ratio: Interval | None
    pairs: int
    turns: int
    agree: Verdict

    @property
    def ratios(self) -> list[Interval]:
        """Those that are known."""
        return [ratio for ratio in (self.ttft_ratio, self.itl_ratio) if ratio is not None]


def agreement(
    load: str, theirs: Sequence[RunLatencies], ours: Sequence[RunLatencies], rng: np.random.Generator
) -> Agreement:
    """Of all runs at one load, the nth of each being one turn."""
    mine, other = _median(ours), _median(theirs)
    turns = list(zip(theirs, ours, strict=False))
    ttft = [({n: (s,) for n, s in one.ttft_s.items()}, {n: (s,) for n, s in two.ttft_s.items()}) for one, two in turns]
    ttft_ratio = _ratio(mine.ttft_p50_s, other.ttft_p50_s, ttft, rng)
    itl_ratio = _ratio(mine.itl_p50_s, other.itl_p50_s, [(one.gaps_s, two.gaps_s) for one, two in turns], rng)
    found = Agreement(
        load=load,
        theirs=other,
        ours=mine,
        ttft_ratio=ttft_ratio,
        itl_ratio=itl_ratio,
        pairs=sum(len(one.ttft_s.keys() & two.ttft_s.keys()) for one, two in turns),
        turns=len(turns),
        agree="not compared",
    )
    return msgspec.structs.replace(found, agree=_verdict(found))


def _verdict(found: Agreement) -> Verdict:
    """Of the ratios that are known: "yes" if each surely lies within AGREE of 1, "no" if one surely doesn't. Nothing is
    compared where requests did not finish: the figures of those that did are of another load then."""
    if found.theirs.unfinished or found.ours.unfinished or not found.ratios:
        return "not compared"
    if found.turns < TURNS_LEAST:
        return "not shown"
    bounds = [
        (-np.inf if one.low is None else one.low, np.inf if one.high is None else one.high) for one in found.ratios
    ]
    if any(low > 1.0 + AGREE or high < 1.0 - AGREE for low, high in bounds):
        return "no"
    within = all(low >= 1.0 - AGREE and high <= 1.0 + AGREE for low, high in bounds)
    return "yes" if within else "not shown"


def _median(runs: Sequence[Latencies]) -> Latencies:
    def middle(name: str) -> float | None:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        return float(np.median(values)) if values else None

    return Latencies(
        requests=sum(run.requests for run in runs),
        ttft_p50_s=middle("ttft_p50_s"),
        ttft_p99_s=middle("ttft_p99_s"),
        itl_p50_s=middle("itl_p50_s"),
        itl_p99_s=middle("itl_p99_s"),
        unfinished=dict(sum((Counter(run.unfinished) for run in runs), Counter())),
    )


_Values = Mapping[int, Sequence[float]]


def _ratio(
    mine: float | None, other: float | None, turns: Sequence[tuple[_Values, _Values]], rng: np.random.Generator
) -> Interval | None:
    """`mine` over `other`, between the bounds that the values of each turn, theirs and ours by request, leave."""
    if mine is None or not other:
        return None
    told = [pairs for theirs, ours in turns if (pairs := _pairs(theirs, ours))]
    each = [float(np.median(two) / np.median(one)) for pairs in told for one, two in pairs if np.median(one) > 0.0]
    low, high = rank_bounds(np.sort(each), 0.5) if each else (None, None)
    if low is None or high is None:
        return Interval(mine / other, None, None)
    drawn = _drawn_ratios(told, rng)
    least, most = np.percentile(drawn, (100.0 * TAIL, 100.0 * (1.0 - TAIL)))
    return Interval(mine / other, min(mine / other, float(least), low), max(mine / other, float(most), high))


_Pair = tuple[Sequence[float], Sequence[float]]


def _pairs(theirs: _Values, ours: _Values) -> list[_Pair]:
    """Of the requests that both have values of, in their order."""
    return [(theirs[n], ours[n]) for n in sorted(theirs.keys() & ours.keys()) if len(theirs[n]) and len(ours[n])]


def _drawn_ratios(turns: Sequence[Sequence[_Pair]], rng: np.random.Generator) -> Floats:
    """Of RESAMPLES draws of turns, and in each of its requests: the ratio of the medians of the turns' medians."""
    theirs, ours = np.empty((len(turns), RESAMPLES)), np.empty((len(turns), RESAMPLES))
    for turn, pairs in enumerate(turns):
        drawn = blocks(len(pairs), rng)
        theirs[turn], ours[turn] = (_medians([pair[side] for pair in pairs], drawn) for side in (0, 1))
    chosen = rng.integers(0, len(turns), size=(len(turns), RESAMPLES))
    below, above = (np.median(np.take_along_axis(side, chosen, axis=0), axis=0) for side in (theirs, ours))
    return np.asarray(above / np.maximum(below, 1e-12), dtype=np.float64)


def _medians(groups: Sequence[Sequence[float]], drawn: npt.NDArray[np.int64]) -> Floats:
    """Of all values of the groups that were drawn, for each row of `drawn`."""
    ordered, owners = in_order(groups)
    found = np.empty(len(drawn))
    for row, numbers in enumerate(drawn):
        weights = weights_of(numbers, owners, len(groups))
        # The middle of an even count lies between two values, as np.median has it.
        middle = np.searchsorted(weights, [(weights[-1] + 1) // 2, weights[-1] // 2 + 1])
        found[row] = ordered[middle].mean()
    return found
