"""What the commands that measure a running server share: the options of a workload, and small things."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any, TypeVar

from trtpd.errors import InputError

URL = "127.0.0.1:8001"
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


def need_plots() -> None:
    """Before a long run, not behind it. Raises InputError."""
    from trtpd.perf.plots import canvas

    with canvas(1, 1):
        pass


def plain(result: object) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(result)
    return found


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
