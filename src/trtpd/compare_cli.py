"""`trtpd compare`: its arguments, and what it shows."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from trtpd import argument_types, console
from trtpd.perf_cli import DEFINITIONS, add_workload_arguments, command_line, need_plots, numbers


def add_compare(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("build", type=Path, metavar="BUILD", help="a build with prefill and decode pools and their cores")
    add_workload_arguments(sub, own_load=True)
    runs = sub.add_argument_group("runs")
    runs.add_argument("--rates", metavar="R,...", help="requests a second (default: each arm's best is sought)")
    runs.add_argument(
        "--repeats", type=argument_types.count, default=2, metavar="N", help="of each arm at each rate, arms in turn"
    )
    runs.add_argument(
        "--point-s",
        type=argument_types.some_seconds,
        default=60.0,
        metavar="S",
        help="how long one rate is held, half as long in tuning; longer where that would be fewer than 20 requests",
    )
    runs.add_argument("--chunks", default="32,64,128,256,512", metavar="N,...", help="chunk sizes the tuning may try")
    runs.add_argument(
        "--definition",
        choices=DEFINITIONS,
        default=DEFINITIONS[0],
        help="of goodput: our own, DistServe's (a rate counts if 90 %% meet both targets) or Mooncake's",
    )
    runs.add_argument(
        "--send-targets",
        action="store_true",
        help="with each request, to our arms: their routers then plan and refuse by them",
    )
    runs.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="take targets and tuned variants of another comparison of this build on this machine",
    )
    runs.add_argument(
        "--budget-s",
        type=argument_types.some_seconds,
        default=3600.0,
        metavar="S",
        help="no run begins that might end later; the same command goes on where this one ended",
    )
    runs.add_argument(
        "--outside", default="", metavar="CMD", help="another OpenAI server as an arm; {port} in it is filled"
    )
    runs.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="report and runs; the same folder goes on (default: by name)",
    )


def compare(args: argparse.Namespace) -> int:
    from trtpd.build.files import check_writable
    from trtpd.perf import compare_report
    from trtpd.perf.compare import CompareOptions, Comparer
    from trtpd.perf.compare_ending import ending
    from trtpd.perf.verdict import found_nothing, verdict
    from trtpd.perf.workload_options import compare_wanted

    folder = args.output or Path("compare-" + "".join(c if c.isalnum() else "-" for c in args.workload))
    need_plots()
    check_writable(folder)
    options = CompareOptions(
        build=args.build.resolve(),
        wanted=compare_wanted(args),
        folder=folder,
        rates=numbers(args.rates, float, "--rates"),
        repeats=args.repeats,
        point_s=args.point_s,
        budget_s=args.budget_s,
        chunks=numbers(args.chunks, int, "--chunks"),
        outside=args.outside,
        like=args.like,
        definition=args.definition,
        send_targets=args.send_targets,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: its servers go with it
    with console.progress() as progress:
        comparison = Comparer(options, progress, say=console.say).run()
    page = compare_report.write(folder, comparison, command=command_line())
    for line in ending(comparison):
        console.say(f"trtpd compare: {line}")
    lines = [*verdict(comparison), f"report       {page}"]
    console.result(compare_report.document(comparison), as_json=args.json, text="\n".join(lines))
    if comparison.end.how == "interrupted":
        return 130
    return 0 if comparison.complete and not found_nothing(comparison) else 1
