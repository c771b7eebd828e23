"""`trtpd perf-analyzer`: perf_analyzer and our client in turn, at the same loads with the same requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trtpd.build.files import ELSEWHERE, translated, write_whole
from trtpd.errors import InputError, ServeError, TrtpdError
from trtpd.perf.analyze_report import INTERRUPTED, AnalyzeResult, csv_of, page_of, remarks
from trtpd.perf.bench import BenchOptions, Target, drive, fitted
from trtpd.perf.client_health import refuse_if_bottleneck
from trtpd.perf.environment import this_environment
from trtpd.perf.instruments_agree import RunLatencies, agreement
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.perf_analyzer import (
    Analyzer,
    Load,
    at_load,
    check_extra,
    input_data,
    latencies,
    with_new_text,
)
from trtpd.perf.perf_analyzer_tool import find_tool
from trtpd.perf.report import rendered
from trtpd.perf.workload import Workload, is_saved
from trtpd.runtime.serve.client import status

Progress = Callable[[str, int, int], None]


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
    """Raises InputError naming the models there are if it is not one of them, ServeError if there is no server."""
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
        self._theirs: list[list[RunLatencies]] = [[] for _ in options.loads]
        self._ours: list[list[RunLatencies]] = [[] for _ in options.loads]
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
        loads = tuple(
            agreement(str(load), theirs, ours, np.random.default_rng([index, len(ours)]))
            for index, (load, theirs, ours) in enumerate(measured)
            if theirs or ours
        )
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
            remarks=tuple(remarks(loads, complete, stopped)),
            stopped=stopped,
        )
        summary = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
        page = rendered(page_of(result, options.command), {}).encode()
        with translated("writing the summary", InputError, ELSEWHERE):
            for name, content in (("summary.json", summary), ("loads.csv", csv_of(result)), ("report.html", page)):
                write_whole(options.folder / name, content)
        return result


def _ours(options: AnalyzeOptions, workload: Workload, load: Load) -> RunLatencies:
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
    records = [one for one in run.records if one.sent_s is not None]
    sent = [(one.sent_s or 0.0, one.at_s if one.state == "finished" else ()) for one in records]
    numbers = [one.number for one in records]
    return latencies(sent, opening=load.opening, unfinished=unfinished, numbers=numbers)


def _name(load: Load) -> str:
    return f"concurrency-{load.concurrency}" if load.concurrency is not None else f"rate-{load.rate:g}"
