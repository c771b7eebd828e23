"""What the workload options of a command ask for. An option that would do nothing beside another one is an error that
names both, never passed over: the command's line stands in the report and must say what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from trtpd.errors import InputError
from trtpd.perf.arrivals import parse
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import Wanted, check_wanted
from trtpd.perf.traces import TraceOptions
from trtpd.perf.workload import is_saved

WORKLOAD = {
    "requests": "--requests",
    "seed": "--seed",
    "arrivals": "--arrivals",
    "scale_lengths": "--scale-lengths",
    "max_prompt_tokens": "--max-prompt-tokens",
    "max_total_tokens": "--max-total-tokens",
    "time_scale": "--time-scale",
    "trace_offset": "--trace-offset",
    "columns": "--columns",
}
LOAD = {"rate": "--rate", "concurrency": "--concurrency"}
SERVER = {
    "url": "--url",
    "openai": "--openai",
    "model": "--model",
    "extra_body": "--extra-body",
    "channels": "--channels",
    "timeout_s": "--timeout-s",
    "cores": "--cores",
    "gpus": "--gpus",
    "ttft_ms": "--ttft-ms",
    "tpot_ms": "--tpot-ms",
    "keep_targets": "--keep-targets",
    "warm_up_s": "--warm-up-s",
    "output": "--output",
}
"""Of `trtpd bench`: what none of is needed to write a workload."""


def refuse_beside(args: argparse.Namespace, options: Mapping[str, str], other: str, why: str) -> None:
    """Raises InputError if one of `options` (name of the argument: what the user types) is given. An option is given
    if it isn't None or False."""
    for name, option in options.items():
        value = getattr(args, name)
        if value is not None and value is not False:
            raise InputError(f"{option} and {other}: {why}, so {option} would do nothing; leave one of them out")


def refuse_beside_again(args: argparse.Namespace) -> None:
    """Of `trtpd bench --again`. Raises InputError for options of a run, since none is made."""
    accounting = ("cores", "gpus", "ttft_ms", "tpot_ms", "warm_up_s", "output")
    of_run = {name: option for name, option in SERVER.items() if name not in accounting}
    options = {"workload": "--workload", "save": "--save"} | WORKLOAD | LOAD | of_run
    refuse_beside(args, options, f"--again {args.again}", "nothing is measured")


def bench_wanted(args: argparse.Namespace) -> Wanted:
    """Of `trtpd bench`. Raises InputError."""
    if is_saved(args.workload):
        refuse_beside(
            args, WORKLOAD | LOAD, f"--workload {args.workload}", "a saved workload is replayed as it was saved"
        )
    if args.save is not None:
        refuse_beside(args, SERVER, f"--save {args.save}", "it only writes the workload and asks no server")
    if args.openai is not None:
        here = {name: SERVER[name] for name in ("url", "channels")}
        refuse_beside(args, here, f"--openai {args.openai}", "that server is asked in place of Triton's gRPC front")
        here = {"keep_targets": SERVER["keep_targets"]}
        refuse_beside(args, here, f"--openai {args.openai}", "OpenAI's API takes no targets")
    else:
        here = {"extra_body": SERVER["extra_body"]}
        refuse_beside(args, here, "no --openai", "it goes into OpenAI requests")
        if args.model not in (None, "pd"):
            here = {"keep_targets": SERVER["keep_targets"]}
            refuse_beside(args, here, f"--model {args.model}", "a stage is sent no targets")
    return _wanted(args, rate=args.rate, concurrency=args.concurrency)


def analyzer_wanted(args: argparse.Namespace) -> Wanted:
    """Of `trtpd perf-analyzer`: the requests; when they are sent is the loads' business. Raises InputError."""
    instants = {name: WORKLOAD[name] for name in ("arrivals", "time_scale")}
    refuse_beside(args, instants, "perf-analyzer", "its loads are closed loops and Poisson arrivals")
    if is_saved(args.workload):
        refuse_beside(args, WORKLOAD, f"--workload {args.workload}", "the requests are taken as they were saved")
    return _wanted(args)


def compare_wanted(args: argparse.Namespace) -> Wanted:
    """Of `trtpd compare`, which has rates and seeds of its own. Raises InputError."""
    here = {"requests": WORKLOAD["requests"]}
    refuse_beside(args, here, "compare", "how many there are follows from the rate and --point-s")
    here = {"time_scale": WORKLOAD["time_scale"]}
    refuse_beside(args, here, "compare", "its rates stretch a trace's instants whatever the scale")
    return _wanted(args)


def _wanted(args: argparse.Namespace, *, rate: float | None = None, concurrency: int | None = None) -> Wanted:
    wanted = Wanted(
        name=args.workload,
        requests=args.usual_requests if args.requests is None else args.requests,
        seed=args.seed or 0,
        rate=rate,
        concurrency=concurrency,
        arrivals=None if args.arrivals is None else parse(args.arrivals),
        fit=LengthFit(
            scale=_scale(args.scale_lengths),
            max_prompt_tokens=args.max_prompt_tokens,
            max_total_tokens=args.max_total_tokens,
        ),
        trace=TraceOptions(
            columns=args.columns,
            offset=args.trace_offset or 0,
            time_scale=1.0 if args.time_scale is None else args.time_scale,
        ),
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
