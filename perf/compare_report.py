"""A comparison as a page, JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trtpd.perf import interference, plots
from trtpd.perf.bench_report import setting_table, stage_bars
from trtpd.perf.bench_result import SCALES
from trtpd.perf.comparison import Comparison, Point
from trtpd.perf.report import NOTHING, Page, Section, Table, number, write_report
from trtpd.perf.resampling import Distribution
from trtpd.perf.verdict import (
    arms_of,
    best,
    gap_spread,
    goodput_at,
    scale_curve,
    short_kind,
    short_records,
    tpot_spread,
    usable,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("client", "router", "Triton", "launcher")


def write(folder: Path, comparison: Comparison, *, command: str) -> Path:
    """Writes the report; returns the page. Raises InputError."""
    drawn = figures_of(comparison)
    plan = comparison.plan
    page = Page(
        title=f"trtpd compare: {plan.workload}",
        subtitle=f"{comparison.environment.made_at} · {comparison.environment.cpu}, cores {_cores(comparison)}",
        summary=verdict(comparison),
        remarks=remarks(comparison),
        sections=_sections(comparison, drawn),
        command=command,
    )
    return write_report(folder, page, document(comparison), drawn, {"points.csv": points_csv(comparison)})


def document(comparison: Comparison) -> dict[str, Any]:
    """report.json."""
    return {
        "plan": msgspec.to_builtins(comparison.plan),
        "targets": msgspec.to_builtins(comparison.slo),
        "rates": list(comparison.rates),
        "tuning": msgspec.to_builtins(comparison.choices),
        "complete": comparison.complete,
        "skipped": list(comparison.skipped),
        "late_limit_s": comparison.late_limit_s,
        "patience_s": comparison.patience_s,
        "verdict": verdict(comparison),
        "remarks": remarks(comparison),
        "environment": msgspec.to_builtins(comparison.environment),
        "points": [
            {"run": msgspec.to_builtins(p.file), "figures": msgspec.to_builtins(p.figures)} for p in comparison.points
        ],
    }


def remarks(comparison: Comparison) -> list[str]:
    """Runs that can't be used, drift, and what was not measured."""
    found = []
    for point in comparison.points:
        where = f"{point.file.arm} at {point.file.rate:g} requests/s, repeat {point.file.repeat}"
        if point.file.fault:
            found.append(f"{where}: left out, {point.file.fault}.")
        elif any(drift.flagged for drift in point.figures.drift.values()):
            found.append(f"{where}: latencies or attainment drifted, so it was no steady state.")
    found += comparison.skipped
    environment = comparison.environment
    if environment.load_average > 0.5 * environment.cpus_usable:
        found.append(f"The load average was {environment.load_average:g} at the start: other work ran here.")
    return found


def figures_of(comparison: Comparison) -> dict[str, Figure]:
    """All plots there is data for."""
    drawn: dict[str, Figure] = {}
    curves = [line for arm in arms_of(comparison) if (line := _goodput_line(comparison, arm)).x]
    if curves:
        drawn["goodput"] = plots.lines(
            "Goodput against the rate offered (band: least and greatest repeat)",
            curves,
            x_label="requests offered a second",
            y_label="within targets, a second",
            diagonal=True,
        )
    if scales := _scale_lines(comparison):
        drawn["slo_scale"] = plots.lines(
            "Goodput when all targets are scaled, each arm at its best rate",
            scales,
            x_label="targets times",
            y_label="within targets, a second",
            mark_x=1.0,
        )
    if comparison.interference:
        drawn["interference"] = interference.plot(comparison.interference)
    middle = comparison.rates[len(comparison.rates) // 2]
    bars = {arm: one for arm in arms_of(comparison) if (one := _stages(usable(comparison.points, arm, middle)))}
    if bars:
        drawn["stages"] = plots.stacked(f"Mean time to first token at {middle:g} requests/s", bars, unit="ms")
    cpu = {arm: one for arm in arms_of(comparison) if (one := _cpu(usable(comparison.points, arm, middle)))}
    if cpu:
        drawn["cpu"] = plots.stacked(f"CPU at {middle:g} requests/s", cpu, unit="cores")
    return drawn


def _goodput_line(comparison: Comparison, arm: str) -> plots.Line:
    rates = [rate for rate in comparison.rates if goodput_at(comparison.points, arm, rate)]
    values = [goodput_at(comparison.points, arm, rate) for rate in rates]
    return plots.Line(
        name=arm,
        x=rates,
        y=[float(np.mean(one)) for one in values],
        low=[min(one) for one in values],
        high=[max(one) for one in values],
    )


def _scale_lines(comparison: Comparison) -> list[plots.Line]:
    found = []
    for arm in arms_of(comparison):
        top = best(comparison, arm)
        curve = scale_curve(comparison, arm, top.rate, SCALES) if top is not None else []
        if top is not None and curve:
            x, y = zip(*curve, strict=True)
            found.append(plots.Line(name=f"{arm}, {top.rate:g} requests/s", x=x, y=y))
    return found


def _stages(points: Sequence[Point]) -> dict[str, float]:
    records = [r for p in points for r in p.records if r.state == "finished" and r.scheduled_s >= p.figures.warm_up_s]
    return stage_bars(records).get("mean of all", {})


def _cpu(points: Sequence[Point]) -> dict[str, float]:
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


def _cpu_table(comparison: Comparison) -> Table:
    """Cores in use, and whether the client kept up, each arm at its best rate."""
    rows = []
    kinds: dict[str, None] = {}
    used = {}
    for arm in arms_of(comparison):
        top = best(comparison, arm)
        points = usable(comparison.points, arm, top.rate) if top is not None else []
        if top is not None and points:
            used[arm] = (top.rate, points, _cpu(points))
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


def _sections(comparison: Comparison, drawn: Mapping[str, object]) -> list[Section]:
    def there(*names: str) -> list[str]:
        return [name for name in names if name in drawn]

    return [
        Section(
            heading="Goodput",
            paragraphs=[f"Targets, fixed from an unloaded server before any loaded run: {comparison.slo}."],
            tables=[_goodput_table(comparison)],
            plots=there("goodput", "slo_scale"),
        ),
        Section(
            heading="Interference",
            paragraphs=[
                "Four answers are written throughout; long prompts arrive. Each dot is the gap before one token."
            ],
            plots=there("interference"),
        ),
        Section(heading="Latency", tables=[_latency_table(comparison)]),
        Section(heading="Where the time to the first token goes", plots=there("stages")),
        Section(
            heading="CPU: client, Triton, router and engines share the cores in every arm",
            tables=[_cpu_table(comparison)],
            plots=there("cpu"),
        ),
        Section(
            heading="Tuning",
            tables=[_tuning_table(comparison)],
            note="On requests of another seed: the share served within targets, mean over targets times 0.5 to 2.",
        ),
        Section(heading="Setting", tables=[setting_table(comparison.environment, _setting(comparison))]),
    ]


def _goodput_table(comparison: Comparison) -> Table:
    arms = arms_of(comparison)
    rows = []
    for rate in comparison.rates:
        cells = [goodput_at(comparison.points, arm, rate) for arm in arms]
        rows.append((f"{rate:g}", *(_mean_range(values) for values in cells)))
    tops = [best(comparison, arm) for arm in arms]
    cores = len(comparison.plan.cores)
    rows.append(("best", *(NOTHING if top is None else number(top.goodput) for top in tops)))
    rows.append(("best per core", *(NOTHING if top is None else number(top.goodput / cores) for top in tops)))
    return Table(headings=("requests/s offered", *arms), rows=rows)


def _mean_range(values: Sequence[float]) -> str:
    if not values:
        return NOTHING
    return f"{number(float(np.mean(values)))} ({number(min(values))} to {number(max(values))})"


def _latency_table(comparison: Comparison) -> Table:
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


def _tuning_table(comparison: Comparison) -> Table:
    rows = []
    for choice in comparison.choices:
        for label, good in choice.tried.items():
            rows.append((choice.arm, f"{label}{' (taken)' if label == choice.variant else ''}", number(good)))
        if not choice.tried:
            rows.append((choice.arm, f"{choice.variant} (the only one)", NOTHING))
    return Table(headings=("arm", "variant", "share served in time"), rows=rows)


def _cores(comparison: Comparison) -> str:
    return ", ".join(map(str, comparison.plan.cores))


def _setting(comparison: Comparison) -> list[tuple[str, str]]:
    slo = comparison.slo
    points = ", ".join(f"{tokens}: {seconds * 1e3:.0f} ms" for tokens, seconds in slo.unloaded)
    return [
        ("workload", f"{comparison.plan.workload}, seed {comparison.plan.seed}; {'; '.join(comparison.notes)}"),
        ("cores", _cores(comparison)),
        ("build", comparison.plan.fingerprint),
        ("unloaded first token by prompt tokens", points),
        ("a point lasts about", f"{comparison.plan.point_s:g} s"),
        ("a client gives up after", f"{comparison.patience_s:.1f} s"),
        ("a run is left out if the client was late (p99) by more than", f"{comparison.late_limit_s * 1e3:.1f} ms"),
    ]


def points_csv(comparison: Comparison) -> bytes:
    """One line per run."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = ("ttft", "tpot", "itl", "second_token")
    writer.writerow(
        ["arm", "variant", "rate", "repeat", "fault", "offered", "good", "goodput_per_s", "completion"]
        + [f"{name}_{which}_s" for name in names for which in ("p50", "p99")]
    )
    for point in comparison.points:
        figures, file = point.figures, point.file
        good = figures.goodput["trtpd"]
        row: list[object] = [file.arm, file.variant, file.rate, file.repeat, file.fault, figures.offered, good.good]
        row += ["" if good.per_s is None else good.per_s.value]
        row += ["" if figures.completion is None else figures.completion.value]
        for name in names:
            found: Distribution | None = getattr(figures, name)
            row += ["", ""] if found is None else [found.p50.value, found.p99.value]
        writer.writerow(row)
    return buffer.getvalue().encode()
