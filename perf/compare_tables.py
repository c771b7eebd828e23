"""The tables of a comparison's report, and its CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

import numpy as np

from trtpd.perf.compare_ratio import Ratio, usable
from trtpd.perf.compare_stages import finished, first_tokens, shown_rate
from trtpd.perf.comparison import Comparison, Point
from trtpd.perf.report import NOTHING, Table, number
from trtpd.perf.resampling import Distribution
from trtpd.perf.stages import handed_off
from trtpd.perf.verdict import (
    TARGETS,
    arms_of,
    best,
    best_ratio,
    equal_rates,
    gap_spread,
    goodput_at,
    short_kind,
    short_records,
    tpot_spread,
)

ROLES = ("client", "router", "Triton", "launcher")


def goodput_table(comparison: Comparison) -> Table:
    arms = arms_of(comparison)
    rows = []
    for rate in comparison.rates:
        cells = [(arm, goodput_at(comparison.points, arm, rate)) for arm in arms]
        rows.append((f"{rate:g}", *(_mean_range(values) or _state(comparison, arm, rate) for arm, values in cells)))
    tops = [best(comparison, arm) for arm in arms]
    cores = len(comparison.plan.cores)
    rows.append(("best", *(NOTHING if top is None else number(top.goodput) for top in tops)))
    rows.append(("best per core", *(NOTHING if top is None else number(top.goodput / cores) for top in tops)))
    return Table(headings=("requests/s offered", *arms), rows=rows)


def _state(comparison: Comparison, arm: str, rate: float) -> str:
    """Why there is no figure."""
    found = {run.state for run in comparison.runs if run.arm == arm and run.rate == rate}
    return "left out" if "left out" in found else "not run"


def _mean_range(runs: Sequence[float | None]) -> str:
    """Of the runs; a dash where the goal was missed in all, and how many met it where not all did."""
    values = [value for value in runs if value is not None]
    if not runs:
        return ""
    if not values:
        return NOTHING
    met = "" if len(values) == len(runs) else f" in {len(values)} of {len(runs)} runs"
    return f"{number(float(np.mean(values)))} ({number(min(values))} to {number(max(values))}){met}"


def ratio_table(comparison: Comparison) -> Table:
    def row(name: str, ratio: Ratio) -> tuple[str, ...]:
        bounds = f"{_times(ratio.low)} to {_times(ratio.high)}"
        runs = f"{ratio.runs[0]}, {ratio.runs[1]}"
        return name, _times(ratio.value), bounds, runs, str(ratio.requests), ratio.word

    rows = []
    for arm in TARGETS:
        top = best_ratio(comparison, arm)
        if top is not None:
            rows.append(row(f"{arm}, best against best", top))
        rows += [row(f"{arm}, both at {rate:g} requests/s", one) for rate, one in equal_rates(comparison, arm)]
    return Table(headings=("against", "times", "95 %", "runs of each", "requests", "disaggregated is"), rows=rows)


def _times(value: float) -> str:
    return "no bound" if np.isinf(value) else number(value)


def hand_off_table(comparison: Comparison) -> Table:
    rate, rows = shown_rate(comparison), []
    for arm in first_tokens(comparison):
        found = handed_off(finished(comparison, arm, rate))
        share = NOTHING if found.share_of_prefill is None else f"{found.share_of_prefill:.2%}"
        rows.append((arm, f"{found.moved} of {found.requests}", number(found.mean_ms), number(found.moved_ms), share))
    headings = (
        f"hand-offs at {rate:g} requests/s",
        "handed off",
        "waited for, mean of all, ms",
        "mean of those handed off, ms",
        "of their prefill",
    )
    return Table(headings=headings, rows=rows)


def latency_table(comparison: Comparison) -> Table:
    kind = short_kind(comparison)
    of_kind = f" of {kind}" if kind else ""
    headings = (
        "arm, requests/s", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99", "ITL p50, ms", "p99", "2nd token p99, ms",
        "completion", f"TPOT p99/p50{of_kind}", f"ITL p99/p50{of_kind}",
    )  # fmt: skip
    rows = []
    for arm in arms_of(comparison):
        for rate in comparison.rates:
            points = usable(comparison.points, arm, rate)
            if points:
                records = short_records(comparison, arm, rate)
                spreads = number(tpot_spread(records)), number(gap_spread(records))
                rows.append((f"{arm}, {rate:g}", *_latency_cells(points), *spreads))
    return Table(headings=headings, rows=rows)


def _latency_cells(points: Sequence[Point]) -> list[str]:
    """Means over the runs, in ms."""

    def mean(read: Callable[[Point], float | None]) -> float | None:
        values = [value for point in points if (value := read(point)) is not None]
        return float(np.mean(values)) if values else None

    def quantile(name: str, which: str) -> str:
        def read(point: Point) -> float | None:
            found: Distribution | None = getattr(point.figures, name)
            return None if found is None else float(getattr(found, which).value) * 1e3

        return number(mean(read))

    wanted = (
        ("ttft", "p50"),
        ("ttft", "p99"),
        ("tpot", "p50"),
        ("tpot", "p99"),
        ("itl", "p50"),
        ("itl", "p99"),
        ("second_token", "p99"),
    )
    done = mean(lambda point: None if point.figures.completion is None else point.figures.completion.value)
    return [*(quantile(name, which) for name, which in wanted), NOTHING if done is None else f"{done:.1%}"]


def cpu_table(comparison: Comparison) -> Table:
    """Cores in use, and whether the client kept up, each arm at its best rate."""
    rows = []
    kinds: dict[str, None] = {}
    used = {}
    for arm in arms_of(comparison):
        top = best(comparison, arm)
        points = usable(comparison.points, arm, top.rate) if top is not None else []
        if top is not None and points:
            used[arm] = (top.rate, points, cpu_cores(points))
            kinds |= dict.fromkeys(used[arm][2])
    for arm, (rate, points, cores) in used.items():
        late = [point.file.health for point in points]
        lateness = max(one.late_p99_s for one in late), max(one.lag_p99_s for one in late)
        others = [one for point in points if (one := point.file.others_cores) is not None]
        nice = ", ".join(sorted({f"{point.file.client_nice:d}" for point in points}))
        cells = [number(cores.get(kind)) for kind in kinds]
        other = number(max(others)) if others else NOTHING
        rows.append((f"{arm}, {rate:g}", *cells, other, *(f"{one * 1e3:.1f}" for one in lateness), nice))
    client = ("other work, cores, at most", "client sent late p99, ms", "saw late p99, ms", "its nice")
    return Table(headings=("arm, requests/s", *(f"{kind}, cores" for kind in kinds), *client), rows=rows)


def cpu_cores(points: Sequence[Point]) -> dict[str, float]:
    """Cores used by each kind of process, engines together; mean over the runs."""
    used: dict[str, list[float]] = {}
    for point in points:
        wall_s = point.file.health.wall_s
        kinds: dict[str, float] = {}
        for name, seconds in point.file.cpu_s.items():
            kind = name if name in ROLES else "stage stubs" if name.startswith("stub of") else "engines"
            kinds[kind] = kinds.get(kind, 0.0) + seconds / wall_s
        for kind, cores in kinds.items():
            used.setdefault(kind, []).append(cores)
    return {kind: float(np.mean(values)) for kind, values in sorted(used.items())}


def tuning_table(comparison: Comparison) -> Table:
    rows = []
    for choice in comparison.choices:
        for label, good in choice.tried.items():
            rows.append((choice.arm, f"{label}{' (taken)' if label == choice.variant else ''}", number(good)))
        rows += [(choice.arm, f"{label} (disturbed, not ranked)", NOTHING) for label in choice.unusable]
        if not choice.tried:
            rows.append((choice.arm, f"{choice.variant} (the only one)", NOTHING))
    return Table(headings=("arm", "variant", "share served in time"), rows=rows)


def points_csv(comparison: Comparison) -> bytes:
    """One line per run; those that were not made are there too, without figures."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = ("ttft", "tpot", "itl", "second_token")
    writer.writerow(
        ["arm", "variant", "rate", "repeat", "state", "reason", "offered", "good", "goodput_per_s", "completion"]
        + [f"{name}_{which}_s" for name in names for which in ("p50", "p99")]
    )
    points = {(p.file.arm, p.file.variant, p.file.rate, p.file.repeat): p for p in comparison.points}
    for run in comparison.runs:
        point = points.get((run.arm, run.variant, run.rate, run.repeat))
        row: list[object] = [run.arm, run.variant, run.rate, run.repeat, run.state, run.reason]
        writer.writerow(row + (_figures(point, names) if point is not None else [""] * (4 + 2 * len(names))))
    return buffer.getvalue().encode()


def _figures(point: Point, names: Sequence[str]) -> list[object]:
    figures = point.figures
    good = figures.goodput[point.definition]
    row: list[object] = [figures.offered, good.good, "" if good.per_s is None else good.per_s.value]
    row += ["" if figures.completion is None else figures.completion.value]
    for name in names:
        found: Distribution | None = getattr(figures, name)
        row += ["", ""] if found is None else [found.p50.value, found.p99.value]
    return row
