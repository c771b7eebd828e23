"""`trtpd perf-analyzer`: its arguments, and what it shows."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtpd import argument_types, console
from trtpd.perf_cli import URL, add_workload_arguments, command_line, numbers, plain


def add_perf_analyzer(sub: argparse.ArgumentParser) -> None:
    add_workload_arguments(sub, name="chat", requests=60)
    server = sub.add_argument_group("runs")
    server.add_argument(
        "--url", type=argument_types.server, default=URL, metavar="HOST:PORT", help="Triton's gRPC address"
    )
    server.add_argument("--model", default="pd", metavar="NAME", help="pd, prefill_N or decode_N")
    server.add_argument("--concurrency", metavar="N,...", help="closed loops (default: 1,4 without --rates)")
    server.add_argument("--rates", metavar="R,...", help="Poisson arrivals, requests a second")
    server.add_argument(
        "--repeats", type=argument_types.count, default=2, metavar="N", help="of each load, by each instrument in turn"
    )
    server.add_argument("--alone", action="store_true", help="perf_analyzer only, without our client beside it")
    server.add_argument(
        "--budget-s",
        type=argument_types.some_seconds,
        default=1200.0,
        metavar="S",
        help="no further run begins after this",
    )
    server.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("perf-analyzer"),
        metavar="FOLDER",
        help="summary.json, loads.csv and report.html; its inputs, exports and logs",
    )
    sub.add_argument("args", nargs="*", metavar="-- ARGS", help="further arguments for perf_analyzer")


def perf_analyzer(args: argparse.Namespace) -> int:
    from trtpd.build.files import check_writable
    from trtpd.perf.analyze import AnalyzeOptions, analyze
    from trtpd.perf.analyze_report import table
    from trtpd.perf.perf_analyzer import Load
    from trtpd.perf.workload_options import analyzer_wanted

    check_writable(args.output)
    loads = [Load(concurrency=number) for number in numbers(args.concurrency, int, "--concurrency")]
    loads += [Load(rate=rate) for rate in numbers(args.rates, float, "--rates")]
    options = AnalyzeOptions(
        url=args.url,
        model=args.model,
        wanted=analyzer_wanted(args),
        loads=loads or [Load(concurrency=1), Load(concurrency=4)],
        folder=args.output,
        repeats=args.repeats,
        budget_s=args.budget_s,
        ours=not args.alone,
        extra=args.args,
        command=command_line(),
    )
    with console.progress() as progress:
        result = analyze(options, progress=progress)
    status = 130 if result.stopped else 0
    if args.json:
        console.result(plain(result), as_json=True)
        return status
    shown = table(result)
    console.table(shown.headings, shown.rows, title=f"{result.tool}, model {result.model}, ms")
    for remark in result.remarks:
        console.say(remark)
    print(args.output / "report.html")
    return status
