"""`trtpd perf-analyzer`: perf_analyzer and our client in turn, at the same loads with the same requests."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from trtpd.build.files import ELSEWHERE, translated, write_whole
from trtpd.errors import InputError, ServeError, TrtpdError
from trtpd.perf.bench import BenchOptions, Target, drive, fitted
from trtpd.perf.client_health import refuse_if_bottleneck
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.perf_analyzer import (
    Agreement,
    Analyzer,
    Latencies,
    Load,
    agreement,
    at_load,
    check_extra,
    input_data,
    latencies,
    with_new_text,
)
from trtpd.perf.perf_analyzer_tool import find_tool
from trtpd.perf.report import NOTHING, Page, Section, Table, rendered
from trtpd.perf.workload import Workload, is_saved
from trtpd.runtime.serve.client import status

Progress = Callable[[str, int, int], None]
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions:
    """`wanted` gives the requests, alone and without their instants: `loads` say when they are asked. Each load is run
    `repeats` times by each instrument, in turn. `budget_s`: no further run begins after it. `ours` false: theirs only.
    `command`: what the user typed, for the report.
    """

    url: str
    model: str
    wanted: Wanted
    loads: Sequence[Load]
    folder: Path
    repeats: int = 2
    budget_s: float = 1200.0
    ours: bool = True
    extra: Sequence[str] = ()
    command: str = ""


class AnalyzeResult(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json. `complete` is false where the budget ended before all runs were made, or `stopped` says what else
    ended them. `notes` say what the requests are, `remarks` what a reader must know before he believes the figures."""

    model: str
    tool: str
    workload: str
    requests: int
    repeats: int
    complete: bool
    loads: tuple[Agreement, ...]
    environment: Environment
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    stopped: str = ""


def analyze(options: AnalyzeOptions, *, progress: Progress) -> AnalyzeResult:
    """Until all is measured, the budget is spent or SIGINT. What there is lies in the folder after each load.

    Raises InputError, ServeError if a server or the tool fails, BottleneckError if our client was what was slow,
    BuildError if the tool can't be had.
    """
    if not options.loads or options.repeats < 1:
        raise InputError("nothing to measure: give --concurrency or --rates, and at least one repeat")
    target = Target(url=options.url, model=options.model)
    check_extra(options.extra)
    workload = _requests(options, None)
    for load in options.loads:
        load.check(len(workload.asks))
    asyncio.run(_check_served(target))  # before the tool is downloaded
    tool = find_tool(progress)
    workload = _requests(options, status(options.url) if options.model == "pd" else None)
    options.folder.mkdir(parents=True, exist_ok=True)
    analyzer = Analyzer(
        tool=tool,
        url=options.url,
        model=options.model,
        data=options.folder / f"{options.model}.inputs.json",
        folder=options.folder,
        timeout_s=options.budget_s,
        extra=tuple(options.extra),
    )
    return _Turns(options, workload, analyzer, progress).run()


async def _check_served(target: Target) -> None:
    """Raises ServeError naming the models there are if it is not one of them, or if there is no server."""
    transport = target.transport()
    try:
        await transport.open()
    finally:
        await transport.close()


def _requests(options: AnalyzeOptions, found: Mapping[str, Any] | None) -> Workload:
    """Without instants; lengths as the server can hold them by its status, if there is one."""
    wanted = fitted(options.wanted, found)
    if is_saved(wanted.name):
        return make(wanted)
    made = make(replace(wanted, rate=None, concurrency=1))
    return msgspec.structs.replace(made, notes=made.notes[:-1])  # the last one tells of the load


class _Turns:
    """The runs, and what they gave until now."""

    def __init__(self, options: AnalyzeOptions, workload: Workload, analyzer: Analyzer, progress: Progress) -> None:
        self._options = options
        self._workload = workload
        self._analyzer = analyzer
        self._progress = progress
        self._environment = this_environment()
        self._theirs: list[list[Latencies]] = [[] for _ in options.loads]
        self._ours: list[list[Latencies]] = [[] for _ in options.loads]
        self._texts = count()

    def run(self) -> AnalyzeResult:
        """See analyze."""
        options, done = self._options, 0
        end_s, total = time.monotonic() + options.budget_s, options.repeats * len(options.loads)
        try:
            self._keep(complete=False)
            for repeat in range(options.repeats):
                for index, load in enumerate(options.loads):
                    if time.monotonic() > end_s:
                        return self._keep(complete=False)
                    self._turn(index, load, repeat)
                    done += 1
                    self._progress("runs", done, total)
                    self._keep(complete=done == total)
        except KeyboardInterrupt:
            return self._keep(complete=False, stopped=INTERRUPTED)
        except TrtpdError as error:
            kept = self._keep(complete=False, stopped=str(error))
            if kept.loads:
                error.args = (f"{error}; what was measured until then is in {options.folder}", *error.args[1:])
            raise
        return self._keep(complete=True)

    def _turn(self, index: int, load: Load, repeat: int) -> None:
        runs = (self._run_theirs, self._run_ours)[:: 1 if repeat % 2 == 0 else -1]
        for run in runs if self._options.ours else (self._run_theirs,):
            run(index, load, repeat)

    def _run_theirs(self, index: int, load: Load, repeat: int) -> None:
        workload = self._next(load)
        self._analyzer.data.write_bytes(input_data(workload, self._options.model))
        self._theirs[index].append(self._analyzer.run(load, len(workload.asks), f"{_name(load)}.{repeat}"))

    def _run_ours(self, index: int, load: Load, repeat: int) -> None:
        self._ours[index].append(_ours(self._options, self._next(load), load))

    def _next(self, load: Load) -> Workload:
        return with_new_text(at_load(self._workload, load), next(self._texts))

    def _keep(self, *, complete: bool, stopped: str = "") -> AnalyzeResult:
        """Writes what there is. Raises InputError if it can't."""
        options = self._options
        measured = zip(options.loads, self._theirs, self._ours, strict=True)
        loads = tuple(agreement(load, theirs, ours) for load, theirs, ours in measured if theirs or ours)
        result = AnalyzeResult(
            model=options.model,
            tool=self._analyzer.tool.origin,
            workload=options.wanted.name,
            requests=len(self._workload.asks),
            repeats=options.repeats,
            complete=complete,
            loads=loads,
            environment=self._environment,
            notes=(*self._workload.notes, "each request by itself, at the instants of the load"),
            remarks=tuple(_remarks(loads, complete, stopped)),
            stopped=stopped,
        )
        summary = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
        page = rendered(_page(result, options.command), {}).encode()
        with translated("writing the summary", InputError, ELSEWHERE):
            for name, content in (("summary.json", summary), ("loads.csv", _csv(result)), ("report.html", page)):
                write_whole(options.folder / name, content)
        return result


def _ours(options: AnalyzeOptions, workload: Workload, load: Load) -> Latencies:
    """From the instant of sending, as perf_analyzer does it. Raises KeyboardInterrupt if the run was: it is no whole
    one then."""
    target = Target(url=options.url, model=options.model)
    run, _ = drive(BenchOptions(target=target, wanted=options.wanted), workload, lambda stage, done, total: None)
    if run.info.interrupted:
        raise KeyboardInterrupt
    finished = [record for record in run.records if record.state == "finished"]
    if not finished:
        first = run.records[0]
        raise ServeError(
            f"none of our requests to {options.model} finished: {first.state} {first.reason} {first.message}"
        )
    refuse_if_bottleneck(run.health, run.records)
    unfinished = Counter(f"{one.state}:{one.reason}" for one in run.records if one.state != "finished")
    sent = [(r.sent_s, r.at_s if r.state == "finished" else ()) for r in run.records if r.sent_s is not None]
    return latencies(sent, opening=load.opening, unfinished=unfinished)


def _remarks(loads: Sequence[Agreement], complete: bool, stopped: str) -> list[str]:
    found = []
    if stopped == INTERRUPTED:
        found.append("Interrupted: not all runs were made, and the one under way then is left out.")
    elif stopped:
        found.append(f"Ended by an error, not all runs were made: {stopped}")
    elif not complete:
        found.append("The budget ended before all runs were made.")
    for one in loads:
        for whose, figures in (("perf_analyzer's", one.theirs), ("our", one.ours)):
            if figures.unfinished:
                why = ", ".join(f"{name} {number}" for name, number in sorted(figures.unfinished.items()))
                found.append(
                    f"{one.load}: {sum(figures.unfinished.values())} of {whose} requests did not finish ({why}); the "
                    "figures are of the others, so the two are not compared."
                )
    return found


CSV_FIGURES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")


def _csv(result: AnalyzeResult) -> bytes:
    """One line per load and instrument; an empty cell is something that is not known."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["load", "instrument", "requests", "unfinished", *CSV_FIGURES])
    for one in result.loads:
        for instrument, figures in (("perf_analyzer", one.theirs), ("trtpd", one.ours)):
            values = [getattr(figures, name) for name in CSV_FIGURES]
            cells = ["" if value is None else f"{value:.6f}" for value in values]
            writer.writerow([one.load, instrument, figures.requests, sum(figures.unfinished.values()), *cells])
    return buffer.getvalue().encode()


def _page(result: AnalyzeResult, command: str) -> Page:
    return Page(
        title=f"perf_analyzer and trtpd's client, model {result.model}",
        subtitle=f"{result.tool}; {result.workload}, {result.requests} requests a run, {result.repeats} runs of each",
        summary=result.notes,
        remarks=result.remarks,
        sections=[Section(heading="Both instruments, ms", tables=[table(result)])],
        command=command,
    )


def _name(load: Load) -> str:
    return f"concurrency-{load.concurrency}" if load.concurrency is not None else f"rate-{load.rate:g}"


def table(result: AnalyzeResult) -> Table:
    """Both instruments side by side, ms."""
    headings = (
        "load", "TTFT p50 theirs", "ours", "ratio", "p99 theirs", "ours",
        "ITL p50 theirs", "ours", "ratio", "p99 theirs", "ours", "agree",
        "unfinished theirs", "ours",
    )  # fmt: skip
    rows = [
        (
            one.load,
            _ms(one.theirs.ttft_p50_s), _ms(one.ours.ttft_p50_s), _ratio(one.ttft_ratio),
            _ms(one.theirs.ttft_p99_s), _ms(one.ours.ttft_p99_s),
            _ms(one.theirs.itl_p50_s), _ms(one.ours.itl_p50_s), _ratio(one.itl_ratio),
            _ms(one.theirs.itl_p99_s), _ms(one.ours.itl_p99_s),
            NOTHING if one.ttft_ratio is None else ("yes" if one.agrees else "no"),
            _unfinished(one.theirs), _unfinished(one.ours),
        )
        for one in result.loads
    ]  # fmt: skip
    return Table(headings=headings, rows=rows)


def _unfinished(figures: Latencies) -> str:
    return str(sum(figures.unfinished.values()))


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:.2f}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"
