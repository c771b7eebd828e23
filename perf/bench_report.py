"""A benchmark as lines for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trtpd.perf import plots
from trtpd.perf.bench_folder import again_command, replay_command
from trtpd.perf.bench_result import Measured, Result
from trtpd.perf.environment import Environment
from trtpd.perf.goodput import DEFINITIONS, Figures
from trtpd.perf.records import Record
from trtpd.perf.report import (
    NOTHING,
    Page,
    Section,
    Table,
    interval,
    latency_table,
    number,
    percent,
    requests_csv,
    write_report,
)
from trtpd.perf.stages import first_token, handed_off

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HAND_OFF = "transfer waited for"


def lines(result: Result) -> list[str]:
    """The figures that matter, for a terminal. Goodput and verdicts are by the definition that was asked for."""
    figures, health = result.figures, result.health
    ours = figures.goodput[figures.definition]
    by = "" if figures.definition == "trtpd" else f", by {figures.definition}'s definition"
    per_unit = ""
    if figures.deployment is None:
        per_unit = f", {NOTHING} per core (the server's are not known: --cores N or --gpus N)"
    elif ours.per_unit is not None:
        per_unit = f", {number(ours.per_unit)} per {figures.deployment.unit} ({figures.deployment.units} in all)"
    verdicts = ", ".join(f"{name} {count}" for name, count in figures.verdicts.items())
    return [
        f"goodput      {interval(ours.per_s, unit='requests/s')}{per_unit}{by}; targets: {result.targets}",
        f"attainment   {percent(ours.attainment)} of {figures.offered} counted, offered at "
        f"{number(figures.offered_per_s)} requests/s; completion {percent(figures.completion)}",
        f"requests     {counted_text(result.requests, figures, gone=result.server_gone)}",
        f"verdicts     {verdicts or NOTHING}",
        *_latency_lines(figures),
        f"tokens       {_tokens_text(figures)}",
        f"client       {health.cpu_share:.0%} of a core, late p99 {health.late_p99_s * 1e3:.1f} ms, "
        f"seen late p99 {health.lag_p99_s * 1e3:.1f} ms (at most {result.late_limit_s * 1e3:.1f} ms each)",
        f"CPU          {_cpu_line(result)}",
        *(f"note         {remark}" for remark in result.remarks),
    ]


def _tokens_text(figures: Figures) -> str:
    whole = f"{figures.output_tokens:,} out and {figures.prompt_tokens:,} in during the whole run"
    if figures.output_tokens_per_s is None:
        return f"{NOTHING}/s; {whole}"
    end_s = figures.warm_up_s + figures.window_s
    return (
        f"{number(figures.output_tokens_per_s)}/s out, {number(figures.prompt_tokens_per_s)}/s in of those that came "
        f"from {figures.warm_up_s:.3g} s to {end_s:.3g} s, while requests came due; {whole}"
    )


def counted_text(requests: int, figures: Figures, *, gone: bool = False) -> str:
    """How many of a workload's requests the figures are of, and why not of the others."""
    unsent = requests - figures.offered - figures.cut
    others = []
    if figures.cut:
        others.append(
            f"{figures.cut} due in the warm-up, the first {figures.warm_up_s:.3g} s (--warm-up-s 0 counts these too)"
        )
    if unsent:
        others.append(f"{unsent} not yet due when {'the server was gone' if gone else 'the run was interrupted'}")
    if not others:
        return f"{requests}, all counted"
    return f"{requests} in all, {figures.offered} counted; not counted: {', '.join(others)}"


def _latency_lines(figures: Figures) -> list[str]:
    named = (
        ("TTFT", figures.ttft),
        ("TPOT", figures.tpot),
        ("ITL", figures.itl),
        ("second token", figures.second_token),
    )
    return [
        f"{name:<13}" + "  ".join(f"{q} {interval(one, 1e3)}" for q, one in (("p50", d.p50), ("p99", d.p99))) + " ms"
        if d is not None
        else f"{name:<13}{NOTHING}"
        for name, d in named
    ]


def _cpu_line(result: Result) -> str:
    wall_s = result.health.wall_s
    return ", ".join(f"{name} {seconds / wall_s:.0%}" for name, seconds in result.cpu_s.items()) + " of a core"


def with_replay(measured: Measured, folder: Path) -> Measured:
    """With the command that makes such a run of the workload that is kept there."""
    replay = replay_command(measured.taken.about, folder, measured.result.figures.warm_up_s)
    return replace(measured, result=msgspec.structs.replace(measured.result, replay=replay))


def write(folder: Path, measured: Measured) -> Path:
    """Writes the report into `folder`, beside what is kept there of the run; returns the page. Raises InputError."""
    measured = with_replay(measured, folder)
    result, records = measured.result, measured.run.records
    drawn = figures_of(measured)
    page = Page(
        title=f"trtpd bench: {result.workload}",
        subtitle=f"{result.environment.made_at} · {result.environment.cpu}, {result.environment.cpus_usable} CPUs",
        summary=lines(result)[:3],
        remarks=result.remarks,
        sections=sections(result, records, drawn),
        command=_commands(result, folder),
    )
    table = requests_csv(records, result.slo, result.figures.definition)
    return write_report(folder, page, result, drawn, {"requests.csv": table})


def _commands(result: Result, folder: Path) -> str:
    """What was typed, and what may be."""
    said = [
        ("the run", result.command),
        ("these figures of it", result.again),
        ("the same requests, byte for byte, by the same targets", result.replay),
        ("by other targets or another warm-up, without a server", f"{again_command(folder)} --ttft-ms A"),
    ]
    return "\n\n".join(f"# {what}:\n{command}" for what, command in said if command)


def figures_of(measured: Measured) -> dict[str, Figure]:
    """All plots, by name."""
    result = measured.result
    kept = [r for r in measured.run.records if r.scheduled_s >= result.figures.warm_up_s]
    finished = [record for record in kept if record.state == "finished"]
    drawn = {
        "latency": plots.distributions(_curves(finished, result)),
        "over_time": plots.run_over_time(_requests(measured), warm_up_s=result.figures.warm_up_s),
    }
    bars = stage_bars(finished)
    if bars:
        drawn["stages"] = plots.stacked(
            "Time to the first token, and what of the hand-off was waited for behind it", bars, unit="ms"
        )
    scales = [(scale, share) for scale, share in result.attainment_over_scale if share is not None]
    if scales:
        x, y = zip(*scales, strict=True)
        drawn["slo_scale"] = plots.lines(
            "Attainment when all targets are scaled",
            [plots.Line(name=result.workload, x=x, y=y)],
            x_label="targets times",
            y_label="share of offered requests served well",
            share=True,
            mark_x=1.0,
        )
    return drawn


def _curves(finished: Sequence[Record], result: Result) -> list[plots.Curve]:
    tpot_s, slo = result.slo.tpot_s, result.slo
    ttft_s = slo.ttft_for(0) if slo.ttft_for(0) == slo.ttft_for(1 << 20) else None
    gaps = [gap * 1e3 for record in finished for gap in record.gaps_s()]
    return [
        plots.Curve(title="TTFT", values=_ms(finished, lambda r: r.ttft_s), target=_scaled(ttft_s)),
        plots.Curve(title="TPOT of a request", values=_ms(finished, lambda r: r.tpot_s), target=_scaled(tpot_s)),
        plots.Curve(title="ITL: gap before each token", values=gaps),
        plots.Curve(title="Gap behind the first token (hand-off)", values=_ms(finished, lambda r: r.second_token_s)),
    ]


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _ms(records: Sequence[Record], read: Callable[[Record], float | None]) -> list[float]:
    return [value * 1e3 for record in records if (value := read(record)) is not None]


def _requests(measured: Measured) -> plots.Requests:
    judge, slo = DEFINITIONS[measured.result.figures.definition], measured.result.slo
    records = measured.run.records
    return plots.Requests(
        due_s=[record.scheduled_s for record in records],
        ended_s=[record.ended_s if record.ended_s is not None else record.scheduled_s for record in records],
        ttft_s=[record.ttft_s for record in records],
        verdict=[judge.verdict(record, slo).partition(":")[0] for record in records],
    )


def stage_bars(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Mean stage durations (ms) of all requests and of the slowest tenth by TTFT; empty where the server told none.
    Bars up to the first token are as long as the mean TTFT. What was waited for of a hand-off comes behind it, so it is
    a bar of its own."""
    told = [record for record in records if record.server is not None and record.ttft_s is not None]
    slowest = sorted(told, key=lambda record: -(record.ttft_s or 0.0))[: max(1, len(told) // 10)]
    bars: dict[str, dict[str, float]] = {}
    for name, chosen in (("mean of all", told), ("mean of the slowest 10 %", slowest)):
        if (first := first_token(chosen)) is not None:
            bars[name] = first.parts_ms
        if (hand_off := handed_off(chosen)).moved:
            bars[f"then, {name}"] = {HAND_OFF: hand_off.mean_ms}
    return bars


def sections(result: Result, records: Sequence[Record], drawn: Mapping[str, object]) -> list[Section]:
    figures = result.figures
    found = [
        Section(
            heading="Goodput",
            tables=[_goodput_table(figures)],
            paragraphs=[f"Tokens: {_tokens_text(figures)}."],
            note="Requests due after the warm-up and until the last was due. Refused, failed, cancelled and unmeasured "
            "ones were offered and count against goodput. In brackets: 95 % confidence, by resampling runs of "
            'neighbouring requests and by bounds that hold for any distribution; "at least" where so few requests '
            "can't bound it from above.",
        ),
        Section(
            heading=f"What became of the requests, by {figures.definition}",
            tables=[_verdict_table(figures)],
            plots=["over_time"],
        ),
        Section(
            heading="Latency of those that finished",
            paragraphs=[
                "From the instant at which a request was due, not from when the client got round to sending it.",
                f"p99 over p50 of the requests' TPOT: {number(figures.tpot_spread)}.",
            ],
            tables=[
                latency_table(
                    {
                        "TTFT": figures.ttft,
                        "second token": figures.second_token,
                        "TPOT per request": figures.tpot,
                        "ITL per token": figures.itl,
                        "gap between responses": figures.response_gap,
                        "whole answer": figures.total,
                    }
                )
            ],
            plots=["latency"],
        ),
    ]
    if "stages" in drawn:
        found.append(
            Section(
                heading="Stages",
                plots=["stages"],
                paragraphs=[_transfer_text(records)],
                note="Means over all answers of which the server told its times.",
            )
        )
    if "slo_scale" in drawn:
        found.append(Section(heading="Other targets", plots=["slo_scale"]))
    found.append(_client_section(result))
    found.append(Section(heading="Setting", tables=[setting_table(result.environment, _setting(result))]))
    return found


def _goodput_table(figures: Figures) -> Table:
    unit = figures.deployment.unit if figures.deployment is not None else "unit"
    rows = [
        (
            f"{name}: {DEFINITIONS[name].text}",
            interval(one.per_s),
            number(one.per_unit),
            percent(one.attainment),
        )
        for name in sorted(figures.goodput, key=lambda name: name != figures.definition)
        if (one := figures.goodput[name])
    ]
    return Table(headings=("by the definition of", "requests/s", f"per {unit}", "of the offered"), rows=rows)


def _verdict_table(figures: Figures) -> Table:
    kinds = list(figures.kinds)
    rows = [
        (verdict, str(count), *(str(figures.kinds[kind].get(verdict, 0)) for kind in kinds))
        for verdict, count in figures.verdicts.items()
    ]
    rows.append(("counted", str(figures.offered), *(str(sum(figures.kinds[kind].values())) for kind in kinds)))
    return Table(headings=("", "all", *kinds), rows=rows)


def _transfer_text(records: Sequence[Record]) -> str:
    moved = [r.server for r in records if r.server is not None and r.server.transfer_bytes]
    if not moved:
        return "No KV was moved: the requests were served in one place."
    total_s = sum(times.transfer_s or 0.0 for times in moved)
    exposed_s = sum(times.exposed_s or 0.0 for times in moved)
    prefill_s = sum(times.prefill_s or 0.0 for times in moved)
    megabytes = sum(times.transfer_bytes for times in moved) / 1e6
    return (
        f"{len(moved)} hand-offs moved {number(megabytes, unit='MB')} in {number(total_s * 1e3, unit='ms')}; "
        f"{number(exposed_s * 1e3, unit='ms')} were waited for them after their prefills, which took "
        f"{number(prefill_s * 1e3, unit='ms')} ({exposed_s / prefill_s:.2%})."
        if prefill_s > 0
        else f"{len(moved)} hand-offs moved {number(megabytes, unit='MB')}."
    )


def _client_section(result: Result) -> Section:
    health = result.health
    rows = [
        ("sent late, p50 / p99 / largest", _three(health.late_p50_s, health.late_p99_s, health.late_largest_s)),
        ("arrivals seen late, p99 / largest", _three(health.lag_p99_s, health.lag_largest_s)),
        ("at most allowed of either p99", _three(result.late_limit_s)),
        ("CPU, its event loop's", f"{health.cpu_share:.0%}, {health.loop_cpu_share:.0%} of a core"),
        ("responses", f"{health.responses:,} in {health.wall_s:.1f} s"),
    ]
    cpu = [(name, number(seconds), f"{seconds / health.wall_s:.1%}") for name, seconds in result.cpu_s.items()]
    return Section(
        heading="The instrument, and CPU",
        tables=[
            Table(headings=("client", ""), rows=rows),
            Table(headings=("process", "CPU s", "of a core"), rows=cpu),
        ],
    )


def _three(*seconds: float) -> str:
    return " / ".join(f"{one * 1e3:.2f}" for one in seconds) + " ms"


def _setting(result: Result) -> list[tuple[str, str]]:
    rows = [
        ("workload", f"{result.workload}, seed {result.seed}; {'; '.join(result.notes)}"),
        ("targets", result.targets),
        ("prompt tokens served per asked", number(result.prompt_tokens_served_per_asked)),
    ]
    if result.server is not None:
        rows += sorted(result.server.about.items())
        rows.append(("instances", ", ".join(f"{n} ({i['role']})" for n, i in result.server.instances.items())))
        rows.append(
            ("counters of the run", ", ".join(f"{n} {v}" for n, v in result.server.counters.items()) or NOTHING)
        )
        rows += [("fault", fault) for fault in result.server.faults]
        rows += [("event", event) for event in result.server.events]
    return rows


def setting_table(environment: Environment, rows: Sequence[tuple[str, str]]) -> Table:
    """`rows`, then where it was measured."""
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    return Table(
        headings=("", ""),
        rows=[
            *rows,
            ("CPU", f"{environment.cpu}; {environment.cpus_usable} of {environment.cpus} usable"),
            ("memory", f"{environment.memory_gib:g} GiB"),
            ("system", environment.system),
            ("Python, packages", f"{environment.python}; {packages}"),
            ("load average at the start", f"{environment.load_average:g}"),
        ],
    )
