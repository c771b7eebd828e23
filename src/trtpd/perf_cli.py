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
    from trtpd.perf.goodput import Deployment
    from trtpd.perf.make_workload import Wanted
    from trtpd.perf.slo import FixedSlo

MS = 1e3
DEFINITIONS = ("trtpd", "distserve", "mooncake")


def add_workload_arguments(sub: argparse.ArgumentParser, *, name: str | None = None, requests: int = 200) -> None:
    """What is asked, how often, in which lengths. Without a default `name` it must be given."""
    group = sub.add_argument_group("workload")
    group.add_argument(
        "--workload",
        required=name is None,
        default=name,
        metavar="NAME",
        help="chat, rag, code, summarise, mixed, agent; trace:azure-code, trace:azure-conv, trace:mooncake, "
        "trace:FILE; or a saved workload (.jsonl, .jsonl.gz), replayed byte for byte",
    )
    group.add_argument("--requests", type=int, default=requests, metavar="N", help="how many")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed, the same requests")
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
    group.add_argument("--time-scale", type=float, default=1.0, metavar="F", help="of a trace: 0.5 is twice as fast")
    group.add_argument("--trace-offset", type=int, default=0, metavar="N", help="of a trace: the first row to take")
    group.add_argument(
        "--columns", metavar="MAP", help="of a trace:FILE: time=T,prompt=P,output=O[,hashes=H][,unit=ms][,block=512]"
    )


def wanted_of(args: argparse.Namespace, *, rate: float | None, concurrency: int | None = None) -> Wanted:
    """Raises InputError."""
    from trtpd.perf.arrivals import parse
    from trtpd.perf.lengths import LengthFit
    from trtpd.perf.make_workload import Wanted, check_wanted
    from trtpd.perf.traces import TraceOptions

    fit = LengthFit(
        scale=_scale(args.scale_lengths),
        max_prompt_tokens=args.max_prompt_tokens,
        max_total_tokens=args.max_total_tokens,
    )
    wanted = Wanted(
        name=args.workload,
        requests=args.requests,
        seed=args.seed,
        rate=rate,
        concurrency=concurrency,
        arrivals=parse(args.arrivals) if args.arrivals else None,
        fit=fit,
        trace=TraceOptions(columns=args.columns, offset=args.trace_offset, time_scale=args.time_scale),
    )
    check_wanted(wanted)
    return wanted


def _scale(text: str | None) -> float | None:
    if text is None or text == "auto":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"--scale-lengths is {text!r}; give a number or auto") from error


def command_line() -> str:
    """What the user typed, to be typed again."""
    return shlex.join(["trtpd", *sys.argv[1:]])


def add_bench(sub: argparse.ArgumentParser) -> None:
    add_workload_arguments(sub)
    load = sub.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="requests a second, open loop")
    load.add_argument("--concurrency", type=int, metavar="N", help="users that each wait for their answer, closed loop")
    server = sub.add_argument_group("server")
    server.add_argument(
        "--url", type=argument_types.server, default="127.0.0.1:8001", metavar="HOST:PORT", help="Triton's gRPC address"
    )
    server.add_argument("--openai", metavar="URL", help="an OpenAI server instead, http://HOST:PORT")
    server.add_argument("--model", metavar="NAME", help="default: pd; prefill_0 or decode_0 measure one stage")
    server.add_argument("--extra-body", metavar="JSON", help="merged into each OpenAI request; null takes a field out")
    server.add_argument("--channels", type=argument_types.count, default=1, metavar="N", help="gRPC connections")
    server.add_argument(
        "--timeout-s",
        type=argument_types.some_seconds,
        default=120.0,
        metavar="S",
        help="a request that takes longer failed",
    )
    size = server.add_mutually_exclusive_group()
    size.add_argument(
        "--cores",
        type=argument_types.count,
        metavar="N",
        help="of the whole deployment (default: this host's, if here)",
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
    targets.add_argument("--keep-targets", action="store_true", help="don't send the targets with the requests")
    targets.add_argument(
        "--warm-up-s",
        type=argument_types.seconds,
        metavar="S",
        help="cut from the beginning (default: a tenth, to 30 s)",
    )
    targets.add_argument("--save", type=Path, metavar="FILE", help="only write the workload there (.jsonl, .jsonl.gz)")
    targets.add_argument("-o", "--output", type=Path, metavar="REPORT", help="folder for HTML, JSON, CSV and plots")


def bench(args: argparse.Namespace) -> int:
    from trtpd.build.files import check_writable
    from trtpd.perf import bench_report
    from trtpd.perf.bench import BenchOptions
    from trtpd.perf.bench import bench as measure

    wanted = wanted_of(args, rate=args.rate, concurrency=args.concurrency)
    if args.save is not None:
        return _save(args, wanted)
    options = BenchOptions(
        target=_target(args),
        wanted=wanted,
        slo=fixed_slo(args),
        warm_up_s=args.warm_up_s,
        timeout_s=args.timeout_s,
        deployment=_deployment(args),
        send_targets=not args.keep_targets,
    )
    if args.output is not None:
        _need_plots()
        check_writable(args.output)
    with console.progress() as progress:
        measured = measure(options, progress=progress)
    text = bench_report.lines(measured.result)
    if args.output is not None:
        text.append(f"report       {bench_report.write(args.output, measured, command=command_line())}")
    console.result(_plain(measured.result), as_json=args.json, text="\n".join(text))
    return 130 if measured.result.interrupted else 0


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
    return Target(url=args.url, model=args.model or "pd", channels=args.channels)


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
        "--url", type=argument_types.server, default="127.0.0.1:8001", metavar="HOST:PORT", help="Triton's gRPC address"
    )
    server.add_argument("--model", default="pd", metavar="NAME", help="pd, prefill_N or decode_N")
    server.add_argument(
        "--concurrency", default="", metavar="N,...", help="closed loops (default: 1,4 without --rates)"
    )
    server.add_argument("--rates", default="", metavar="R,...", help="Poisson arrivals, requests a second")
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
        help="its inputs, exports and logs",
    )
    sub.add_argument("args", nargs="*", metavar="-- ARGS", help="further arguments for perf_analyzer")


def perf_analyzer(args: argparse.Namespace) -> int:
    from trtpd.build.files import check_writable
    from trtpd.perf.analyze import AnalyzeOptions, analyze, table
    from trtpd.perf.perf_analyzer import Load

    check_writable(args.output)
    loads = [Load(concurrency=number) for number in numbers(args.concurrency, int, "--concurrency")]
    loads += [Load(rate=rate) for rate in numbers(args.rates, float, "--rates")]
    options = AnalyzeOptions(
        url=args.url,
        model=args.model,
        wanted=wanted_of(args, rate=None),
        loads=loads or [Load(concurrency=1), Load(concurrency=4)],
        folder=args.output,
        repeats=args.repeats,
        budget_s=args.budget_s,
        ours=not args.alone,
        extra=args.args,
    )
    with console.progress() as progress:
        result = analyze(options, progress=progress)
    if args.json:
        console.result(_plain(result), as_json=True)
        return 0
    shown = table(result)
    console.table(shown.headings, shown.rows, title=f"{result.tool}, model {result.model}, ms")
    if not result.complete:
        console.say(f"the budget of {args.budget_s:g} s ended before all runs were made")
    print(args.output / "summary.json")
    return 0


Number = TypeVar("Number", int, float)


def numbers(text: str, kind: type[Number], option: str) -> list[Number]:
    """A comma separated list, each above 0; rates within what arrivals can have. Raises InputError."""
    from trtpd.perf.arrivals import RATES

    least, most = RATES if kind is float else (1, 1e9)
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InputError(f"{option} is {text!r}; give numbers with commas between") from error
    wrong = next((number for number in found if not least <= number <= most), None)
    if wrong is not None:
        raise InputError(f"{option} is {text!r}; each must lie between {least:g} and {most:g}, {wrong:g} does not")
    return found


def add_compare(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("build", type=Path, metavar="BUILD", help="a build with prefill and decode pools and their cores")
    add_workload_arguments(sub)
    runs = sub.add_argument_group("runs")
    runs.add_argument(
        "--rates", default="", metavar="R,...", help="requests a second (default: each arm's best is sought)"
    )
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

    folder = args.output or Path("compare-" + "".join(c if c.isalnum() else "-" for c in args.workload))
    _need_plots()
    check_writable(folder)
    options = CompareOptions(
        build=args.build.resolve(),
        wanted=wanted_of(args, rate=None),
        folder=folder,
        rates=numbers(args.rates, float, "--rates"),
        repeats=args.repeats,
        point_s=args.point_s,
        budget_s=args.budget_s,
        chunks=numbers(args.chunks, int, "--chunks"),
        outside=args.outside,
        like=args.like,
        definition=args.definition,
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
