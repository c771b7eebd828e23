"""What a comparison found, in words. The sentences follow from the figures; none is there beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtpd.perf.compare_arms import CHUNKED, COLOCATED, SPLIT
from trtpd.perf.comparison import Comparison, Point
from trtpd.perf.goodput import attainment_over_scale
from trtpd.perf.records import Record
from trtpd.perf.report import number

CLEAR = 1.1
"""Below this ratio two arms are called alike."""

TARGETS = {COLOCATED: 2.0, CHUNKED: 1.2}
STEADY = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """An arm's highest goodput over the rates it was measured at most often (one lucky run is no best): mean over
    repeats, and its least and greatest."""

    rate: float
    goodput: float
    low: float
    high: float


def usable(points: Sequence[Point], arm: str, rate: float | None = None) -> list[Point]:
    """An arm's runs whose figures may be used."""
    return [p for p in points if p.file.arm == arm and not p.file.fault and (rate is None or p.file.rate == rate)]


def goodput_at(points: Sequence[Point], arm: str, rate: float) -> list[float]:
    """Goodput (requests/s) of each usable run."""
    goods = [point.figures.goodput["trtpd"].per_s for point in usable(points, arm, rate)]
    return [good.value for good in goods if good is not None]


def best(comparison: Comparison, arm: str) -> Best | None:
    """None for an arm without a usable run."""
    found: Best | None = None
    runs = {rate: goodput_at(comparison.points, arm, rate) for rate in comparison.rates}
    most = max(map(len, runs.values()), default=0)
    for rate, values in runs.items():
        if values and len(values) == most and (found is None or float(np.mean(values)) > found.goodput):
            found = Best(rate=rate, goodput=float(np.mean(values)), low=min(values), high=max(values))
    return found


def arms_of(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(choice.arm for choice in comparison.choices))


def tpot_spread(records: Sequence[Record]) -> float | None:
    """p99 over p50 of the TPOT of finished requests with three tokens or more; None below 20 of them."""
    found = [r.tpot_s for r in records if r.state == "finished" and r.output_tokens > 2 and r.tpot_s]
    if len(found) < 20:
        return None
    p50, p99 = np.percentile(np.array(found, dtype=np.float64), (50, 99))
    return float(p99 / p50)


def short_kind(comparison: Comparison) -> str | None:
    """The kind of request with the shortest prompts, if there are several kinds: those that long prompts disturb."""
    lengths: dict[str, list[int]] = {}
    for point in comparison.points:
        for record in point.records:
            lengths.setdefault(record.kind, []).append(record.prompt_tokens)
    return min(lengths, key=lambda kind: float(np.median(lengths[kind]))) if len(lengths) > 1 else None


def verdict(comparison: Comparison) -> list[str]:
    """When disaggregation pays here and when it does not, as far as the runs say."""
    split = best(comparison, SPLIT)
    if split is None:
        return ["No usable run of the disaggregated arm yet: no verdict."]
    lines = []
    for arm, target in TARGETS.items():
        other = best(comparison, arm)
        if other is None:
            lines.append(f"No usable run of {arm} yet.")
            continue
        lines.append(_against(split, other, arm, target))
    lines += _crossing(comparison)
    lines += _steadiness(comparison)
    lines += _cost(comparison)
    if not comparison.complete:
        lines.append("The budget ended before all runs were made; the same command goes on.")
    return lines


def _against(split: Best, other: Best, arm: str, target: float) -> str:
    if other.goodput <= 0.0:
        return (
            f"{arm} served no request within the targets at any rate; disaggregated {number(split.goodput)} a second."
        )
    ratio = split.goodput / other.goodput
    overlap = split.low <= other.high and other.low <= split.high
    word = (
        "pays"
        if ratio > CLEAR and not overlap
        else "costs"
        if ratio < 1 / CLEAR and not overlap
        else "makes no clear difference"
    )
    return (
        f"Against {arm}, disaggregation {word} here: best goodput {number(split.goodput)} against "
        f"{number(other.goodput)} requests/s, {ratio:.2f} times (aim: {target:g}, "
        f"{'reached' if ratio >= target else 'not reached'})."
    )


def _crossing(comparison: Comparison) -> list[str]:
    """The rates at which it pays against the better of the two others."""
    wins: list[str] = []
    losses: list[str] = []
    for rate in comparison.rates:
        mine = goodput_at(comparison.points, SPLIT, rate)
        others = [values for arm in TARGETS if (values := goodput_at(comparison.points, arm, rate))]
        if mine and others:
            (wins if min(mine) > max(max(values) for values in others) else losses).append(f"{rate:g}")
    found = []
    if wins:
        found.append(f"It is ahead of both at {', '.join(wins)} requests/s in every repeat.")
    if losses:
        found.append(f"It is not clearly ahead at {', '.join(losses)} requests/s.")
    return found


def _steadiness(comparison: Comparison) -> list[str]:
    """How even the pace of the requests that long prompts disturb is, each arm at its best rate."""
    kind = short_kind(comparison)
    said = []
    for arm in arms_of(comparison):
        top = best(comparison, arm)
        if top is None:
            continue
        records = short_records(comparison, arm, top.rate)
        spread, gaps = tpot_spread(records), gap_spread(records)
        if spread is not None and gaps is not None:
            said.append(f"{arm} {number(spread)} ({number(gaps)}) at {top.rate:g} requests/s")
    if not said:
        return []
    whose = f"the {kind} requests'" if kind else "the requests'"
    return [f"p99 over p50 of {whose} TPOT, and in brackets of their single gaps: {'; '.join(said)} (aim: {STEADY:g})."]


def short_records(comparison: Comparison, arm: str, rate: float) -> list[Record]:
    """Requests of the shortest kind behind the warm-up, over the usable runs."""
    kind = short_kind(comparison)
    return [
        record
        for point in usable(comparison.points, arm, rate)
        for record in point.records
        if (kind is None or record.kind == kind) and record.scheduled_s >= point.figures.warm_up_s
    ]


def gap_spread(records: Sequence[Record]) -> float | None:
    """p99 over p50 of all token gaps of finished requests; None below 100 of them."""
    gaps = [gap for record in records if record.state == "finished" for gap in record.gaps_s()]
    if len(gaps) < 100:
        return None
    p50, p99 = np.percentile(np.array(gaps, dtype=np.float64), (50, 99))
    return float(p99 / p50) if p50 > 0.0 else None


def _cost(comparison: Comparison) -> list[str]:
    """What the hand-off costs."""
    told = [
        record.server
        for point in usable(comparison.points, SPLIT)
        for record in point.records
        if record.server is not None and record.server.transfer_bytes
    ]
    prefill_s = sum(times.prefill_s or 0.0 for times in told)
    if not told or prefill_s <= 0.0:
        return []
    exposed_s = sum(times.exposed_s or 0.0 for times in told)
    return [
        f"The hand-off takes {exposed_s / prefill_s:.2%} of the prefill's time beyond it, over {len(told)} requests."
    ]


def scale_curve(comparison: Comparison, arm: str, rate: float, scales: Sequence[float]) -> list[tuple[float, float]]:
    """Goodput over the scale of all targets, mean over the usable repeats."""
    curves = []
    for point in usable(comparison.points, arm, rate):
        figures = point.figures
        shares = attainment_over_scale(point.records, comparison.slo, scales, warm_up_s=figures.warm_up_s)
        offered = figures.offered_per_s or 0.0
        curves.append([(share or 0.0) * offered for _, share in shares])
    if not curves:
        return []
    return [(scale, float(np.mean(values))) for scale, values in zip(scales, zip(*curves, strict=True), strict=True)]
