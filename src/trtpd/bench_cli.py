"""`trtpd bench`: its arguments, and what it shows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpd import argument_types, console
from trtpd.errors import InputError
from trtpd.perf_cli import DEFINITIONS, URL, add_workload_arguments, command_line, need_plots, plain

if TYPE_CHECKING:
    from trtpd.perf.bench import Target
    from trtpd.perf.bench_result import Measured
    from trtpd.perf.goodput import Deployment
    from trtpd.perf.make_workload import Wanted
    from trtpd.perf.slo import FixedSlo

MS = 1e3
TIMEOUT_S = 120.0


def add_bench(sub: argparse.ArgumentParser) -> None:
    add_workload_arguments(sub, required=False)
    load = sub.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="requests a second, open loop")
    load.add_argument("--concurrency", type=int, metavar="N", help="users that each wait for their answer, closed loop")
    _add_server(sub)
    _add_targets(sub)


def _add_server(sub: argparse.ArgumentParser) -> None:
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


def _add_targets(sub: argparse.ArgumentParser) -> None:
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
        need_plots()
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
    need_plots()
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
    console.result(plain(measured.result), as_json=args.json, text="\n".join(text))


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
