"""Arguments and dispatch of the commands that measure a running server."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trtpd import argument_types, console
from trtpd.errors import InputError

if TYPE_CHECKING:
    from trtpd.perf.bench import Target
    from trtpd.perf.bench_result import Measured
    from trtpd.perf.goodput import Deployment
    from trtpd.perf.make_workload import Wanted
    from trtpd.perf.slo import FixedSlo

MS = 1e3
URL = "127.0.0.1:8001"
TIMEOUT_S = 120.0
DEFINITIONS = ("trtpd", "distserve", "mooncake")


def add_workload_arguments(
    sub: argparse.ArgumentParser,
    *,
    name: str | None = None,
    requests: int = 200,
    required: bool = True,
    own_load: bool = False,
) -> None:
    """What is asked, how often (`requests` where not given), in which lengths. Without a default `name` it must be
    given if `required`. `own_load`: the command decides how many there are and when, so that options for this are known
    only to be refused with the reason."""
    sub.set_defaults(usual_requests=requests)
    group = sub.add_argument_group("workload")
    group.add_argument(
        "--workload",
        required=required and name is None,
        default=name,
        metavar="NAME",
        help="chat, rag, code, summarise, mixed, agent; trace:azure-code, trace:azure-conv, trace:mooncake, "
        "trace:FILE" + ("" if own_load else "; or a saved workload (.jsonl, .jsonl.gz), replayed byte for byte"),
    )
    how_many, how_fast = f"how many (default: {requests})", "of a trace's own instants: 0.5 is twice as fast"
    if own_load:
        how_many = how_fast = argparse.SUPPRESS
    group.add_argument("--requests", type=int, metavar="N", help=how_many)
    group.add_argument("--seed", type=int, metavar="N", help="the same seed, the same requests (default: 0)")
    group.add_argument(
        "--arrivals",
        metavar="SHAPE",
        help="even, poisson, gamma:CV, bursts:ON,OFF (s), ramp:A,B (default: poisson; of a trace: its own)",
    )
    group.add_argument(
        "--scale-lengths", metavar="F", help="times all lengths; auto: so that 95 %% of them fit (default)"
    )
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="longer prompts are cut")
    group.add_argument("--max-total-tokens", type=int, metavar="N", help="prompt and answer (default: the server's)")
    group.add_argument("--time-scale", type=float, metavar="F", help=how_fast)
    group.add_argument("--trace-offset", type=int, metavar="N", help="of a trace: the first row to take (default: 0)")
    group.add_argument(
        "--columns", metavar="MAP", help="of a trace:FILE: time=T,prompt=P,output=O[,hashes=H][,unit=ms][,block=512]"
    )


def command_line() -> str:
    """What the user typed, to be typed again."""
    return shlex.join(["trtpd", *sys.argv[1:]])


def add_bench(sub: argparse.ArgumentParser) -> None:
    add_workload_arguments(sub, required=False)
    load = sub.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="requests a second, open loop")
    load.add_argument("--concurrency", type=int, metavar="N", help="users that each wait for their answer, closed loop")
    server = sub.add_argument_group("server")
    server.add_argument(
        "--url", type=argument_types.server, metavar="HOST:PORT", help=f"Triton's gRPC address (default: {URL})"
    )
    server.add_argument("--openai", metavar="URL", help="an OpenAI server instead, http://HOST:PORT")
    server.add_argument("--model", metavar="NAME", help="default: pd; prefill_0 or decode_0 measure one stage")
    server.add_argument("--extra-body", metavar="JSON", help="merged into each OpenAI request; null takes a field out")
    server.add_argument(
        "--channels", type=argument_types.count, metavar="N", help="gRPC connections, to 1000 (default: 1)"
    )
    server.add_argument(
        "--timeout-s",
        type=argument_types.some_seconds,
        metavar="S",
        help=f"a request that takes longer failed (default: {TIMEOUT_S:g})",
    )
    size = server.add_mutually_exclusive_group()
    size.add_argument(
        "--cores",
        type=argument_types.count,
        metavar="N",
        help="of the whole deployment (default: those that a server on this host may use)",
    )
    size.add_argument("--gpus", type=argument_types.count, metavar="N", help="of the whole deployment")
    targets = sub.add_argument_group("targets and report")
    targets.add_argument(
        "--ttft-ms",
        type=argument_types.some_milliseconds,
        metavar="A",
        help="time to first token (default: the server's)",
    )
    targets.add_argument(
        "--tpot-ms",
        type=argument_types.some_milliseconds,
        metavar="B",
        help="time per further token (default: the server's)",
    )
    targets.add_argument(
        "--definition",
        choices=DEFINITIONS,
        help="of goodput: which is shown first, and what verdicts go by (default: trtpd); the report has all three",
    )
    targets.add_argument("--keep-targets", action="store_true", help="don't send the targets with the requests")
    targets.add_argument(
        "--warm-up-s",
        type=argument_types.seconds,
        metavar="S",
        help="cut from the beginning (default: a tenth, to 30 s)",
    )
    targets.add_argument("--save", type=Path, metavar="FILE", help="only write the workload there (.jsonl, .jsonl.gz)")
    targets.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="REPORT",
        help="folder for the report (HTML, JSON, CSV, plots) and the records, which are kept also if it is refused "
        "(the client was late at p99 by more than 10 ms, or, where both are more, than 5 %% of the median TTFT or a "
        "quarter of the median token gap); an earlier run there is replaced",
    )
    targets.add_argument(
        "--again",
        type=Path,
        metavar="REPORT",
        help="measure nothing: make the report anew from such a folder, by these targets, warm-up, cores or GPUs",
    )


def bench(args: argparse.Namespace) -> int:
    from trtpd.perf.bench import BenchOptions
    from trtpd.perf.bench import bench as measure
    from trtpd.perf.bench_result import shortfall
    from trtpd.perf.workload_options import bench_wanted

    if args.again is not None:
        return _bench_again(args)
    if args.workload is None:
        raise InputError("what is to be asked? give --workload NAME, or --again REPORT for a run that was made before")
    wanted = bench_wanted(args)
    if args.save is not None:
        return _save(args, wanted)
    options = BenchOptions(
        target=_target(args),
        wanted=wanted,
        slo=fixed_slo(args),
        warm_up_s=args.warm_up_s,
        timeout_s=args.timeout_s or TIMEOUT_S,
        deployment=_deployment(args),
        definition=args.definition or DEFINITIONS[0],
        send_targets=not args.keep_targets,
        command=command_line(),
    )
    if args.output is not None:
        _need_plots()
        _check_folder(args.output)
    with console.progress() as progress:
        measured = measure(options, progress=progress, folder=args.output, say=console.say)
    _show(args, measured, args.output)
    if measured.result.interrupted:
        return 130
    if fault := shortfall(measured.result):
        console.say(f"trtpd bench: {fault}")
    return 1 if fault else 0


def _check_folder(folder: Path) -> None:
    """Before a long run. Raises InputError for a folder that a report can't be, or is not to be, written into."""
    from trtpd.build.files import check_writable
    from trtpd.perf.bench_folder import check_ours

    check_writable(folder)
    if replaced := check_ours(folder):
        console.say(replaced)


def _bench_again(args: argparse.Namespace) -> int:
    """Raises InputError for options of a run, which is not made."""
    import msgspec

    from trtpd.build.files import check_writable
    from trtpd.perf.bench import bench_again
    from trtpd.perf.bench_folder import keep
    from trtpd.perf.bench_result import About
    from trtpd.perf.workload_options import refuse_beside_again

    refuse_beside_again(args)
    folder = args.output or args.again
    _need_plots()
    if folder.resolve() != args.again.resolve():
        _check_folder(folder)
    else:
        check_writable(folder)
    given, deployment = fixed_slo(args), _deployment(args)

    def change(about: About) -> About:
        slo = msgspec.structs.replace(
            about.slo,
            **{name: value for name in ("ttft_s", "tpot_s") if (value := getattr(given, name)) is not None},
        )
        return msgspec.structs.replace(
            about,
            slo=slo,
            targets_remark=about.targets_remark if slo == about.slo else "",
            warm_up_s=about.warm_up_s if args.warm_up_s is None else args.warm_up_s,
            deployment=deployment or about.deployment,
            definition=args.definition or about.definition,
        )

    measured = bench_again(args.again, change, command=command_line())
    if folder.resolve() != args.again.resolve():
        keep(folder, measured.taken)
    _show(args, measured, folder)
    return 0


def _show(args: argparse.Namespace, measured: Measured, folder: Path | None) -> None:
    """Writes the report into `folder`, if there is one, and prints what matters of it."""
    from trtpd.perf import bench_report

    text = bench_report.lines(measured.result)
    if folder is not None:
        measured = bench_report.with_replay(measured, folder)
        text.append(f"report       {bench_report.write(folder, measured)}")
    console.result(_plain(measured.result), as_json=args.json, text="\n".join(text))


def fixed_slo(args: argparse.Namespace) -> FixedSlo:
    """--ttft-ms and --tpot-ms."""
    from trtpd.perf.slo import FixedSlo

    return FixedSlo(
        ttft_s=None if args.ttft_ms is None else args.ttft_ms / MS,
        tpot_s=None if args.tpot_ms is None else args.tpot_ms / MS,
    )


def _save(args: argparse.Namespace, wanted: Wanted) -> int:
    from trtpd.perf.make_workload import make
    from trtpd.perf.workload import save

    workload = make(wanted)
    save(workload, args.save)
    document = {"workload": str(args.save), "requests": len(workload.asks), "notes": list(workload.notes)}
    notes = "; ".join(workload.notes)
    console.result(document, as_json=args.json, text=f"{args.save}: {len(workload.asks)} requests; {notes}")
    return 0


def _target(args: argparse.Namespace) -> Target:
    from trtpd.perf.bench import Target

    extra: Any = {}
    if args.extra_body is not None:
        try:
            extra = json.loads(args.extra_body)
        except ValueError as error:
            raise InputError(f"--extra-body is no JSON ({error})") from error
        if not isinstance(extra, dict):
            raise InputError("--extra-body must be a JSON object")
    if args.openai:
        return Target(url=args.openai, openai=True, model=args.model or "", extra=extra)
    model = "pd" if args.model is None else args.model
    return Target(url=args.url or URL, model=model, channels=args.channels or 1)


def _deployment(args: argparse.Namespace) -> Deployment | None:
    from trtpd.perf.goodput import Deployment

    if args.gpus is not None:
        return Deployment(units=args.gpus, unit="GPU")
    return None if args.cores is None else Deployment(units=args.cores)


def _need_plots() -> None:
    """Before a long run, not behind it. Raises InputError."""
    from trtpd.perf.plots import canvas

    with canvas(1, 1):
        pass


def _plain(result: object) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(result)
    return found


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
        console.result(_plain(result), as_json=True)
        return status
    shown = table(result)
    console.table(shown.headings, shown.rows, title=f"{result.tool}, model {result.model}, ms")
    for remark in result.remarks:
        console.say(remark)
    print(args.output / "report.html")
    return status


Number = TypeVar("Number", int, float)


def numbers(text: str | None, kind: type[Number], option: str) -> list[Number]:
    """A comma separated list, each above 0; rates within what arrivals can have. None of an option that wasn't given.
    Raises InputError."""
    from trtpd.perf.arrivals import RATES
    from trtpd.perf.option_lists import parts

    least, most = RATES if kind is float else (1, 1e9)
    listed = parts(text, option)
    try:
        found = [kind(part) for part in listed]
    except ValueError as error:
        raise InputError(f"{option} is {text!r}; give numbers with commas between") from error
    wrong = next((number for number in found if not least <= number <= most), None)
    if wrong is not None:
        raise InputError(f"{option} is {text!r}; each must lie between {least:g} and {most:g}, {wrong:g} does not")
    return found


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
    _need_plots()
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
