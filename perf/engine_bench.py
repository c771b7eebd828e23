"""The embedded engine beside llama.cpp: same weights at the nearest width, same CPUs, in turn in one run.

    python -m trtpd.perf.engine_bench --model DIR [--width int8] [--threads 1] [--cells prefill-512x1 decode-500x4]
                                      [-o RESULTS.json] [--seconds 200] [--rounds 3] [--json]
    python -m trtpd.perf.engine_bench --model DIR --roles ...

Ours is what `trtpd build --tune` makes: a prefill engine that widens its weights and a decode engine that does not,
each measured at its own work through the engine seam, with everything a step does. llama.cpp's server runs in a process
of its own, one for each of its types of that width; the best of them counts. With -o every round of a cell is added to
a file, so that a long table is made in several runs, and medians are over all of them. A round that was not measured
on all sides counts on none.

With --roles the two engines of one build change places instead: each does both roles' work, and the gain is how much
better a role's own build is at it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from trtpd.build.builder import build
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.files import digest_of
from trtpd.build.manifest import Precision
from trtpd.build.spec import parse_spec
from trtpd.errors import TrtpdError
from trtpd.perf.engine_results import OURS, Results, rows_of, spread
from trtpd.perf.llama_cpp import LlamaSetup
from trtpd.perf.llama_gguf import write_gguf
from trtpd.perf.measured import Cell, Kind, Side
from trtpd.perf.profile import EngineSetup

CONTEXT_TOKENS = 500
CELLS = tuple(Cell(kind="prefill", tokens=tokens, batch=batch) for tokens in (512, 2048) for batch in (1, 4)) + tuple(
    Cell(kind="decode", tokens=CONTEXT_TOKENS, batch=batch) for batch in (1, 4, 16)
)
LLAMA_TYPES: dict[Precision, tuple[str, ...]] = {
    "f32": ("F32",),
    "bf16": ("BF16", "F16"),
    "f16": ("BF16", "F16"),
    "int8": ("Q8_0",),
}
SecondsOf = Callable[[Cell], float]
"""Measures a side at a cell."""

ROLE_GAIN = 1.2
KV_TOKENS = 16_384
MAX_SEQ_TOKENS = 4_096


def built(model: Path, width: Precision, cores: Sequence[int], cache: Path) -> Path:
    """A build of the model with a prefill and a decode engine, each on all of `cores`."""
    spec = {
        "model": str(model.resolve()),
        "precision": width,
        "pools": {
            role: {"cores": list(cores), "kv_tokens": KV_TOKENS, "widen_weights": role == "prefill"}
            for role in ("prefill", "decode")
        },
        "kv": {"max_seq_tokens": MAX_SEQ_TOKENS},
    }
    out = cache / f"build-{width}-{'-'.join(map(str, cores))}"
    build(parse_spec(spec), out)
    return out


def gguf_of(model: Path, kind: str, cache: Path) -> Path:
    """The model as a GGUF file, made once."""
    checkpoint = open_checkpoint(model)
    path = cache / f"{digest_of(checkpoint.digest(), kind)}.gguf"
    if not path.exists():
        write_gguf(checkpoint, path, kind)
    return path


def compare(args: argparse.Namespace, results: Results, cache: Path) -> None:
    """Measures round by round, each cell on all sides in turn, until the time is up."""
    cores, width = tuple(range(args.threads)), cast(Precision, args.width)
    made, checkpoint = built(args.model, width, cores, cache), open_checkpoint(args.model)
    ggufs = {kind: gguf_of(args.model, kind, cache) for kind in LLAMA_TYPES[width]}
    kinds: set[Kind] = {cell.kind for cell in args.cells}
    deadline_s = time.monotonic() + args.seconds
    with ExitStack() as stack:
        ours = {kind: stack.enter_context(_our_side(made / kind, cores)) for kind in kinds}
        slots = max(cell.batch for cell in args.cells)
        context = max(cell.tokens for cell in args.cells) + 64
        theirs = {
            kind: stack.enter_context(
                Side(
                    "trtpd.perf.llama_cpp",
                    LlamaSetup(
                        gguf=str(path),
                        vocab_size=checkpoint.architecture.vocab_size,
                        threads=args.threads,
                        slots=slots,
                        context_tokens=context,
                        cores=cores,
                    ),
                )
            )
            for kind, path in ggufs.items()
        }
        others: dict[str, SecondsOf] = {kind: side.measure for kind, side in theirs.items()}
        made_rounds = rounds_of(
            args.cells,
            lambda cell: {OURS: ours[cell.kind].measure} | others,
            rounds=args.rounds,
            late=lambda: time.monotonic() >= deadline_s,
        )
        for cell, seconds in made_rounds:
            results.add(width, args.threads, cell, seconds)


def rounds_of(
    cells: Sequence[Cell],
    sides_of: Callable[[Cell], Mapping[str, SecondsOf]],
    *,
    rounds: int,
    late: Callable[[], bool],
    least: int = 0,
) -> Iterator[tuple[Cell, dict[str, float]]]:
    """Seconds of each side at each cell, round by round, the sides of a cell in turn; each has run it once before, to
    be warm. Ends once it is `late`, but not before `least` rounds: a cell's round that was not measured on all sides by
    then is dropped."""
    for number in range(rounds):
        for cell in cells:
            seconds = {}
            for side, measure in sides_of(cell).items():
                if number >= least and late():
                    return
                if number == 0:
                    measure(cell)
                seconds[side] = measure(cell)
            yield cell, seconds


def swap_roles(args: argparse.Namespace, cache: Path) -> list[dict[str, Any]]:
    """Each role's build at its own work and at the other's: how many times better it is at its own."""
    cores = tuple(range(args.threads))
    made = args.build or built(args.model, cast(Precision, args.width), cores, cache)
    found: dict[Cell, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        sides: dict[str, SecondsOf] = {
            kind: stack.enter_context(_our_side(made / kind, ())).measure for kind in ("prefill", "decode")
        }
        deadline_s = time.monotonic() + args.seconds
        made_rounds = rounds_of(
            args.cells, lambda _: sides, rounds=args.rounds, late=lambda: time.monotonic() >= deadline_s, least=1
        )
        for cell, seconds in made_rounds:
            found.setdefault(cell, []).append(seconds)
    return [_role_row(cell, rounds) for cell, rounds in found.items()]


def _role_row(cell: Cell, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    own, other = cell.kind, "decode" if cell.kind == "prefill" else "prefill"
    seconds = {kind: [one[kind] for one in rounds] for kind in (own, other)}
    rates = {kind: cell.tokens_per_run / statistics.median(values) for kind, values in seconds.items()}
    gain = rates[own] / rates[other]
    return {
        "cell": cell.name,
        "rates": rates,
        "gain": gain,
        "spread": spread(seconds[own], seconds[other]),
        "target": ROLE_GAIN,
        "met": gain >= ROLE_GAIN,
    }


def _our_side(directory: Path, cores: tuple[int, ...]) -> Side:
    return Side("trtpd.perf.profile", EngineSetup(directory=str(directory), cores=cores))


def _cell(text: str) -> Cell:
    kind, _, size = text.partition("-")
    tokens, _, batch = size.partition("x")
    if kind not in ("prefill", "decode") or not (tokens.isdecimal() and batch.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no cell; give prefill-512x1, decode-500x4, ...")
    return Cell(kind=cast(Kind, kind), tokens=int(tokens), batch=int(batch))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trtpd.perf.engine_bench", description="The embedded engine beside llama.cpp."
    )
    parser.add_argument("--model", type=Path, help="Hugging Face folder or .gguf of a Llama")
    parser.add_argument("--build", type=Path, help="with --roles: a build directory in place of --model")
    parser.add_argument("--width", choices=sorted(LLAMA_TYPES), default="f32", help="precision of the weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cells", type=_cell, nargs="+", default=list(CELLS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200.0, help="no measurement begins after that")
    parser.add_argument("--roles", action="store_true", help="swap the roles' builds instead")
    parser.add_argument("-o", "--output", type=Path, help="results to add to")
    parser.add_argument("--cache", type=Path, default=Path(os.environ.get("TRTPD_CACHE", "~/.cache/trtpd")))
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    args = parser.parse_args(argv)
    if args.model is None and not (args.roles and args.build):
        parser.error("give --model, or with --roles --build")
    if not 1 <= args.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads {args.threads}: this process may use {len(os.sched_getaffinity(0))} CPUs")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    cache = args.cache.expanduser() / "engine_bench"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if args.roles:
            rows = swap_roles(args, cache)
        else:
            results = Results(args.output)
            compare(args, results, cache)
            rows = list(rows_of(results))
    except (TrtpdError, OSError) as error:
        print(f"engine_bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        for row in rows:
            print(words(row))
    return 0


def words(row: dict[str, Any]) -> str:
    """One line for people."""
    verdict = "met" if row["met"] else "missed"
    by_round = f" ({row['spread'][0]:.2f}..{row['spread'][1]:.2f} by round)" if row["spread"] is not None else ""
    if "gain" in row:
        rates = ", ".join(f"{role} build {rate:.1f}" for role, rate in row["rates"].items())
        return f"{row['cell']:17} {rates} tokens/s: gain {row['gain']:.2f}{by_round}, target {row['target']} {verdict}"
    theirs = ", ".join(f"{kind} {rate:.1f}" for kind, rate in row["llama_cpp_tokens_per_s"].items())
    return (
        f"{row['width']:5} {row['threads']} threads {row['cell']:17} trtpd {row['tokens_per_s']:.1f}, "
        f"llama.cpp {theirs} tokens/s: {row['ratio']:.2f}{by_round}, target {row['target']} {verdict}, "
        f"{row['samples']} samples"
    )


if __name__ == "__main__":
    raise SystemExit(main())
