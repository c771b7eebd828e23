"""`trtpd perf-analyzer`: perf_analyzer and our client in turn, at the same loads with the same requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec

from trtpd.errors import InputError, ServeError
from trtpd.perf.bench import BenchOptions, Target, drive, fitted
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.perf_analyzer import (
    Agreement,
    Analyzer,
    Latencies,
    Load,
    agreement,
    dealt,
    input_data,
    latencies,
    with_new_text,
)
from trtpd.perf.perf_analyzer_tool import find_tool
from trtpd.perf.report import NOTHING, Table
from trtpd.runtime.serve.address import server_address
from trtpd.runtime.serve.client import status

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions:
    """`wanted` gives the requests; its rate and concurrency are replaced by those of `loads`. Each load is run
    `repeats` times by each instrument, in turn. `budget_s`: no further run begins after it. `ours` false: theirs only.
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


class AnalyzeResult(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json. `complete` is false where the budget ended before all runs were made."""

    model: str
    tool: str
    workload: str
    requests: int
    repeats: int
    complete: bool
    loads: tuple[Agreement, ...]
    environment: Environment


def analyze(options: AnalyzeOptions, *, progress: Progress) -> AnalyzeResult:
    """Raises InputError, ServeError if a server or the tool fails, BuildError if the tool can't be had."""
    if not options.loads or options.repeats < 1:
        raise InputError("nothing to measure: give --concurrency or --rates, and at least one repeat")
    server_address(options.url)
    tool = find_tool(progress)
    found = status(options.url) if options.model == "pd" else None
    wanted = fitted(options.wanted, found)
    options.folder.mkdir(parents=True, exist_ok=True)
    data = options.folder / f"{options.model}.inputs.json"
    analyzer = Analyzer(
        tool=tool,
        url=options.url,
        model=options.model,
        data=data,
        folder=options.folder,
        timeout_s=options.budget_s,
        extra=tuple(options.extra),
    )
    environment = this_environment()
    theirs, ours, complete = _take_turns(options, wanted, analyzer, progress)
    result = AnalyzeResult(
        model=options.model,
        tool=tool.origin,
        workload=wanted.name,
        requests=wanted.requests,
        repeats=options.repeats,
        complete=complete,
        loads=tuple(
            agreement(load, theirs[index], ours[index]) for index, load in enumerate(options.loads) if theirs[index]
        ),
        environment=environment,
    )
    (options.folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result


def _take_turns(
    options: AnalyzeOptions, wanted: Wanted, analyzer: Analyzer, progress: Progress
) -> tuple[list[list[Latencies]], list[list[Latencies]], bool]:
    theirs: list[list[Latencies]] = [[] for _ in options.loads]
    ours: list[list[Latencies]] = [[] for _ in options.loads]
    end_s, done, total = time.monotonic() + options.budget_s, 0, options.repeats * len(options.loads)
    texts = count()

    def run_theirs(index: int, load: Load, repeat: int) -> None:
        workload = with_new_text(make(_at(wanted, load)), next(texts))
        analyzer.data.write_bytes(input_data(workload, options.model))
        theirs[index].append(analyzer.run(load, wanted.requests, f"{_name(load)}.{repeat}"))

    def run_ours(index: int, load: Load, repeat: int) -> None:
        ours[index].append(_ours(options, wanted, load, next(texts)))

    for repeat in range(options.repeats):
        for index, load in enumerate(options.loads):
            if time.monotonic() > end_s:
                return theirs, ours, False
            turns = (run_theirs, run_ours)[:: 1 if repeat % 2 == 0 else -1] if options.ours else (run_theirs,)
            for run in turns:
                run(index, load, repeat)
            done += 1
            progress("runs", done, total)
    return theirs, ours, True


def _ours(options: AnalyzeOptions, wanted: Wanted, load: Load, text: int) -> Latencies:
    """From the instant of sending, as perf_analyzer does it, and whatever else our client accounts for left out."""
    target = Target(url=options.url, model=options.model)
    workload = dealt(with_new_text(make(_at(wanted, load)), text))
    run, _ = drive(BenchOptions(target=target, wanted=wanted), workload, lambda stage, done, total: None)
    sent = [(r.sent_s, r.at_s) for r in run.records if r.sent_s is not None and r.state == "finished"]
    if not sent and run.records:
        first = run.records[0]
        raise ServeError(
            f"none of our requests to {options.model} finished: {first.state} {first.reason} {first.message}"
        )
    return latencies(sent, opening=load.opening)


def _at(wanted: Wanted, load: Load) -> Wanted:
    return replace(wanted, rate=load.rate, concurrency=load.concurrency)


def _name(load: Load) -> str:
    return f"concurrency-{load.concurrency}" if load.concurrency is not None else f"rate-{load.rate:g}"


def table(result: AnalyzeResult) -> Table:
    """Both instruments side by side, ms."""
    headings = (
        "load", "TTFT p50 theirs", "ours", "ratio", "p99 theirs", "ours",
        "ITL p50 theirs", "ours", "ratio", "p99 theirs", "ours", "agree",
    )  # fmt: skip
    rows = [
        (
            one.load,
            _ms(one.theirs.ttft_p50_s), _ms(one.ours.ttft_p50_s), _ratio(one.ttft_ratio),
            _ms(one.theirs.ttft_p99_s), _ms(one.ours.ttft_p99_s),
            _ms(one.theirs.itl_p50_s), _ms(one.ours.itl_p50_s), _ratio(one.itl_ratio),
            _ms(one.theirs.itl_p99_s), _ms(one.ours.itl_p99_s),
            NOTHING if one.ttft_ratio is None else ("yes" if one.agrees else "no"),
        )
        for one in result.loads
    ]  # fmt: skip
    return Table(headings=headings, rows=rows)


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:.2f}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"
