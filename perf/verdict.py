"""What a comparison found, in words. The sentences follow from the figures; none is there beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtpd.perf.compare_arms import CHUNKED, COLOCATED, SPLIT
from trtpd.perf.compare_ending import unusable_why
from trtpd.perf.compare_ratio import Ratio, Served, ratio_at, ratio_of_bests, served, usable
from trtpd.perf.comparison import Comparison, Point
from trtpd.perf.goodput import DEFINITIONS, attainment_over_scale
from trtpd.perf.records import Record
from trtpd.perf.report import number
from trtpd.perf.stages import handed_off

TARGETS = {COLOCATED: 2.0, CHUNKED: 1.2}
STEADY = 1.3
NEARLY_ALL = 0.9
WORDS = {
    "ahead": "disaggregation pays here",
    "behind": "disaggregation does not pay here",
    "not shown": "it is not shown whether disaggregation pays here",
}
AT_RATES = {"ahead": "ahead at", "behind": "behind at", "not shown": "no difference shown at"}
MISSES = {
    "late:ttft": "first token late",
    "late:tpot": "further tokens too slow",
    "late:both": "first token late and further ones too slow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """An arm's highest goodput over the rates it was measured at most often (one lucky run is no best): over all its
    `runs` there, and its least and greatest run."""

    rate: float
    goodput: float
    low: float
    high: float
    runs: int


def goodput_at(points: Sequence[Point], arm: str, rate: float) -> list[float | None]:
    """Goodput (requests/s) of each usable run; None where the definition's goal was missed."""
    return [point.good_per_s for point in usable(points, arm, rate)]


def measured(comparison: Comparison, arm: str) -> list[Served]:
    """What an arm served at each rate it was measured at."""
    return [found for rate in comparison.rates if (found := served(comparison, arm, rate)) is not None]


def most_often(comparison: Comparison, arm: str) -> list[Served]:
    """Those of the rates it was measured at most often."""
    found = measured(comparison, arm)
    most = max((one.runs for one in found), default=0)
    return [one for one in found if one.runs == most]


def best(comparison: Comparison, arm: str) -> Best | None:
    """None for an arm without a usable run, or one that missed the definition's goal at all of the rates it was
    measured at most often."""
    found: Best | None = None
    for one in most_often(comparison, arm):
        if one.per_s is None or (found is not None and one.per_s <= found.goodput):
            continue
        runs = [value for value in goodput_at(comparison.points, arm, one.rate) if value is not None] or [one.per_s]
        found = Best(rate=one.rate, goodput=one.per_s, low=min(runs), high=max(runs), runs=one.runs)
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
    """When disaggregation pays here, when it does not, and why, as far as the runs say: six lines at most."""
    if found_nothing(comparison):
        arms = [SPLIT] if not measured(comparison, SPLIT) else list(TARGETS)
        which = "; ".join(f"{arm} has no usable run{unusable_why(comparison, arm)}" for arm in arms)
        return [f"No verdict yet: {which}."]
    lines = []
    for arm, target in TARGETS.items():
        if measured(comparison, arm):
            lines.append(_against(comparison, arm, target))
        else:
            lines.append(f"No usable run of {arm} yet{unusable_why(comparison, arm)}.")
    lines.append(_at_equal_rates(comparison))
    lines.append(_misses(comparison))
    if details := [*_steadiness(comparison), *_cost(comparison)]:
        lines.append(" ".join(details))
    if not comparison.complete:
        lines.append("Not all runs were made: this may change when the same command goes on.")
    return lines


def found_nothing(comparison: Comparison) -> bool:
    """Whether disaggregated can't be set beside any of the arms that it has to beat."""
    return not measured(comparison, SPLIT) or not any(measured(comparison, arm) for arm in TARGETS)


def best_ratio(comparison: Comparison, arm: str) -> Ratio | None:
    """Of the disaggregated arm's best goodput to another's. Where the definition has a goal each resample has a best
    rate of its own."""
    chosen: list[list[float]] = []
    for name in (SPLIT, arm):
        rates = [one.rate for one in most_often(comparison, name)]
        top = best(comparison, name)
        if top is not None and DEFINITIONS[comparison.plan.definition].goal is None:
            rates = [top.rate]
        chosen.append(rates)
    return ratio_of_bests(comparison, SPLIT, arm, (chosen[0], chosen[1]))


def _against(comparison: Comparison, arm: str, target: float) -> str:
    sides = f"At best {_best_text(comparison, SPLIT)} against {_best_text(comparison, arm)}"
    ratio = best_ratio(comparison, arm)
    assert ratio is not None, "both have usable runs"
    return f"Against {arm}, {WORDS[ratio.word]}: {ratio_text(ratio)}; aim {target:g}: {_aim(ratio, target)}. {sides}."


def _aim(ratio: Ratio, target: float) -> str:
    if ratio.word != "not shown" and ratio.low >= target:
        return "reached"
    return "not reached" if ratio.high < target else "not shown to be reached"


def ratio_text(ratio: Ratio) -> str:
    """1.66 times (95 %: 1.31 to 2.1)."""
    if np.isinf(ratio.value):
        return f"no ratio, since the other served none (95 %: from {number(ratio.low)} times on)"
    high = "no bound" if np.isinf(ratio.high) else number(ratio.high)
    return f"{number(ratio.value)} times (95 %: {number(ratio.low)} to {high})"


def _best_text(comparison: Comparison, arm: str) -> str:
    """An arm's best, or where it has none, and what it did at rates that it was measured at less often."""
    top = best(comparison, arm)
    often = most_often(comparison, arm)
    if top is not None and top.goodput > 0.0:
        return f"{number(top.goodput)} requests/s within targets of {top.rate:g} offered ({_runs_text(top.runs)})"
    judge = DEFINITIONS[comparison.plan.definition]
    what = "no request within the targets" if judge.goal is None else f"less than {judge.goal:.0%} within the targets"
    rates = ", ".join(f"{one.rate:g}" for one in often)
    said = f"{what} of {rates} requests/s offered ({_runs_text(often[0].runs)}{' each' if len(often) > 1 else ''})"
    others = [one for one in measured(comparison, arm) if one.runs < often[0].runs and one.per_s]
    if others:
        more = ", ".join(f"{number(one.per_s)} of {one.rate:g} ({_runs_text(one.runs)})" for one in others)
        said += f", though {more}"
    return said


def _runs_text(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def equal_rates(comparison: Comparison, arm: str) -> list[tuple[float, Ratio]]:
    """The rates at which the disaggregated arm and another were both measured, on the same requests."""
    found = ((rate, ratio_at(comparison, SPLIT, arm, rate)) for rate in comparison.rates)
    return [(rate, ratio) for rate, ratio in found if ratio is not None]


def _at_equal_rates(comparison: Comparison) -> str:
    """When it pays and when not: rate by rate, beside each arm."""
    said = []
    for arm in TARGETS:
        if not measured(comparison, arm):
            continue
        rates = [
            f"{AT_RATES[ratio.word]} {rate:g} requests/s, {ratio_text(ratio)}"
            for rate, ratio in equal_rates(comparison, arm)
        ]
        said.append(f"eside {arm}: {'; '.join(rates) or 'measured at no rate in common'}.")
    return f"At equal rates, disaggregated b{' B'.join(said)}"


def _misses(comparison: Comparison) -> str:
    """Why: what missed its targets, each arm at the disaggregated one's best rate, or at its own if it has no run
    there."""
    top = best(comparison, SPLIT)
    said = []
    for arm in arms_of(comparison):
        often = most_often(comparison, arm)
        if not often:
            continue
        own = best(comparison, arm)
        rates = [one.rate for one in (top, own, often[-1]) if one is not None]
        rate = next(rate for rate in rates if usable(comparison.points, arm, rate))
        said.append(f"{arm} {_missed(comparison, arm, rate)}")
    return f"What missed the targets: {'; '.join(said)}.{_other_rates(comparison)}"


def _other_rates(comparison: Comparison) -> str:
    """Whether the rates were such that no arm could be better than another."""
    shares = [one.good / one.offered for arm in arms_of(comparison) for one in measured(comparison, arm)]
    if min(shares) >= NEARLY_ALL:
        return " Every arm served nearly all at these rates: only higher ones could tell them apart."
    if max(shares) <= 1.0 - NEARLY_ALL:
        return " No arm served more than a few at these rates: only lower ones could tell them apart."
    return ""


def _missed(comparison: Comparison, arm: str, rate: float) -> str:
    """12 of 40 at 0.8 requests/s (first token late 3, further tokens too slow 9)."""
    judge = DEFINITIONS[comparison.plan.definition]
    verdicts = Counter(
        judge.verdict(record, comparison.slo)
        for point in usable(comparison.points, arm, rate)
        for record in point.records
        if record.scheduled_s >= point.figures.warm_up_s
    )
    total = verdicts.total()
    missed = [(word, count) for word, count in verdicts.most_common() if word != "good"]
    if not missed:
        return f"none of {total} at {rate:g} requests/s"
    which = ", ".join(f"{MISSES.get(word, word.replace(':', ' by '))} {count}" for word, count in missed)
    return f"{total - verdicts['good']} of {total} at {rate:g} requests/s ({which})"


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
    found = handed_off([record for point in usable(comparison.points, SPLIT) for record in point.records])
    if found.share_of_prefill is None:
        return []
    share = f"{found.share_of_prefill:.2%}"
    return [f"The hand-off takes {share} of the prefill's time beyond it, over {found.moved} requests."]


def scale_curve(comparison: Comparison, arm: str, rate: float, scales: Sequence[float]) -> list[tuple[float, float]]:
    """Goodput over the scale of all targets, mean over the usable repeats; not a number where one of them missed the
    definition's goal."""
    goal = DEFINITIONS[comparison.plan.definition].goal
    curves = []
    for point in usable(comparison.points, arm, rate):
        figures = point.figures
        shares = attainment_over_scale(
            point.records, comparison.slo, scales, warm_up_s=figures.warm_up_s, definition=comparison.plan.definition
        )
        offered = figures.offered_per_s or 0.0
        curves.append([_counted(share or 0.0, goal) * offered for _, share in shares])
    if not curves:
        return []
    return [(scale, float(np.mean(values))) for scale, values in zip(scales, zip(*curves, strict=True), strict=True)]


def _counted(share: float, goal: float | None) -> float:
    """What of the offered counts."""
    if goal is None:
        return share
    return 1.0 if share >= goal else float("nan")
