"""A comparison as a page, JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trtpd.perf import interference, plots
from trtpd.perf.bench_report import setting_table
from trtpd.perf.bench_result import SCALES
from trtpd.perf.compare_ending import ending
from trtpd.perf.compare_ratio import RESAMPLES, served, usable
from trtpd.perf.compare_stages import first_tokens, shown_rate
from trtpd.perf.compare_tables import (
    cpu_cores,
    cpu_table,
    goodput_table,
    hand_off_table,
    latency_table,
    points_csv,
    ratio_table,
    tuning_table,
)
from trtpd.perf.comparison import Comparison
from trtpd.perf.goodput import DEFINITIONS
from trtpd.perf.report import Page, Section, write_report
from trtpd.perf.verdict import TARGETS, arms_of, best, best_ratio, equal_rates, goodput_at, scale_curve, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        "end": msgspec.to_builtins(comparison.end) | {"lines": ending(comparison)},
        "runs": msgspec.to_builtins(comparison.runs),
        "skipped": list(comparison.skipped),
        "late_limit_s": comparison.late_limit_s,
        "patience_s": comparison.patience_s,
        "verdict": verdict(comparison),
        "ratios": _ratios(comparison),
        "tuned_on": comparison.tuned_on,
        "asides": msgspec.to_builtins(comparison.asides),
        "remarks": remarks(comparison),
        "environment": msgspec.to_builtins(comparison.environment),
        "points": [
            {"run": msgspec.to_builtins(p.file), "figures": msgspec.to_builtins(p.figures)} for p in comparison.points
        ],
    }


def _ratios(comparison: Comparison) -> list[dict[str, Any]]:
    """How the disaggregated arm stands to the others: at the best rates (`rate` null), then at equal ones."""
    found: list[dict[str, Any]] = []
    for arm in TARGETS:
        rows = [(None, best_ratio(comparison, arm)), *equal_rates(comparison, arm)]
        found += [
            {"against": arm, "rate": rate, "word": one.word, **msgspec.to_builtins(one)} for rate, one in rows if one
        ]
    return found


def remarks(comparison: Comparison) -> list[str]:
    """How it ended, runs that can't be used, drift, and what was not measured."""
    found = [] if comparison.complete else [f"{line[0].upper()}{line[1:]}." for line in ending(comparison)[:2]]
    for point in comparison.points:
        where = f"{point.file.arm} at {point.file.rate:g} requests/s, repeat {point.file.repeat}"
        if point.file.fault:
            found.append(f"{where}: left out, {point.file.fault}.")
        elif any(drift.flagged for drift in point.figures.drift.values()):
            found.append(f"{where}: latencies or attainment drifted, so it was no steady state.")
    for what, aside in comparison.asides.items():
        if aside.fault:
            found.append(f"{what}: disturbed though it was made again, {aside.fault}.")
    return [*found, *comparison.skipped, *comparison.environment.load_remarks]


def figures_of(comparison: Comparison) -> dict[str, Figure]:
    """All plots there is data for."""
    drawn: dict[str, Figure] = {}
    curves = [line for arm in arms_of(comparison) if (line := _goodput_line(comparison, arm)).x]
    if curves:
        drawn["goodput"] = plots.lines(
            "Goodput against the rate offered" + (" (band: least and greatest repeat)" if curves[0].low else ""),
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
    rate = shown_rate(comparison)
    bars = {arm: one.parts_ms for arm, one in first_tokens(comparison).items()}
    if bars:
        drawn["stages"] = plots.stacked(f"Mean time to first token at {rate:g} requests/s", bars, unit="ms")
    cpu = {arm: one for arm in arms_of(comparison) if (one := cpu_cores(usable(comparison.points, arm, rate)))}
    if cpu:
        drawn["cpu"] = plots.stacked(f"CPU at {rate:g} requests/s", cpu, unit="cores")
    return drawn


def _goodput_line(comparison: Comparison, arm: str) -> plots.Line:
    told = [(rate, one.per_s) for rate in comparison.rates if (one := served(comparison, arm, rate)) is not None]
    found = [(rate, per_s) for rate, per_s in told if per_s is not None]
    runs = [[v for v in goodput_at(comparison.points, arm, rate) if v is not None] for rate, _ in found]
    band = DEFINITIONS[comparison.plan.definition].goal is None
    return plots.Line(
        name=arm,
        x=[rate for rate, _ in found],
        y=[per_s for _, per_s in found],
        low=[min(values) for values in runs] if band else None,
        high=[max(values) for values in runs] if band else None,
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


def _sections(comparison: Comparison, drawn: Mapping[str, object]) -> list[Section]:
    def there(*names: str) -> list[str]:
        return [name for name in names if name in drawn]

    judge = DEFINITIONS[comparison.plan.definition]
    sections = [
        Section(
            heading="Goodput",
            paragraphs=[
                f"Counted by the definition {judge.name}: {judge.text}.",
                f"Targets, fixed from an unloaded server before any loaded run: {comparison.slo}.",
            ],
            tables=[goodput_table(comparison)],
            plots=there("goodput", "slo_scale"),
            note="In brackets: least and greatest run."
            + ("" if judge.goal is None else f" A dash: fewer than {judge.goal:.0%} were served within the targets."),
        ),
        Section(
            heading="Disaggregated beside the others",
            tables=[ratio_table(comparison)],
            note=f"95 % confidence, by drawing blocks of consecutive arrivals anew {RESAMPLES:,} times, the same ones "
            "for both arms where the rate is the same. It covers chance among the requests, not a machine that was "
            "slower in one run than in another.",
        ),
    ]
    if "interference" in drawn:
        four = "Four answers are written throughout; long prompts arrive. Each dot is the gap before one token."
        sections.append(Section(heading="Interference", paragraphs=[four], plots=["interference"]))
    sections.append(Section(heading="Latency", tables=[latency_table(comparison)]))
    if "stages" in drawn:
        sections.append(
            Section(
                heading="Where the time to the first token goes",
                plots=["stages"],
                tables=[hand_off_table(comparison)],
                note="Means over all counted requests that finished. What is waited for of a hand-off comes behind the "
                "first token, so it is in the table and not in the bars.",
            )
        )
    cpu = "CPU: client, Triton, router and engines share the cores in every arm"
    return [
        *sections,
        Section(heading=cpu, tables=[cpu_table(comparison)], plots=there("cpu")),
        Section(heading="Tuning", tables=[tuning_table(comparison)], note=_tuning_note(comparison)),
        Section(heading="Setting", tables=[setting_table(comparison.environment, _setting(comparison))]),
    ]


def _tuning_note(comparison: Comparison) -> str:
    taken = sorted({choice.origin for choice in comparison.choices if choice.origin})
    where = f" Taken from {', '.join(taken)}, not measured here." if taken else ""
    return f"The share served within targets, mean over targets times 0.5 to 2.{where} {comparison.tuned_on}".strip()


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
        ("goodput counted by", comparison.plan.definition),
        ("targets sent with the requests", "yes, to our arms" if comparison.plan.targets_sent else "no"),
        ("a point lasts, unless that is too few requests", f"{comparison.plan.point_s:g} s"),
        ("a client gives up after", f"{comparison.patience_s:.1f} s"),
        ("a run is left out if the client was late (p99) by more than", f"{comparison.late_limit_s * 1e3:.1f} ms"),
    ]
