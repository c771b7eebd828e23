"""The embedded engine beside llama.cpp: same weights at the nearest width, same CPUs, in turn in one run.

    python -m trtpd.perf.engine_bench --model DIR [--width int8] [--threads 1] [--cells prefill-512x1 decode-500x4]
                                      [-o RESULTS.json] [--seconds 200] [--rounds 3] [--json]
    python -m trtpd.perf.engine_bench --model DIR --roles ...

Ours is what `trtpd build --tune` makes: a prefill engine that widens its weights and a decode engine that does not,
each measured at its own work through the engine seam, with everything a step does. llama.cpp's server runs in a process
of its own, one for each of its types of that width; the best of them counts. With -o every measurement is added to a
file, so that a long table is made in several runs, and medians are over all of them.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec

from trtpd.build.builder import build
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.files import digest_of
from trtpd.build.manifest import Precision
from trtpd.build.spec import parse_spec
from trtpd.errors import InputError, TrtpdError
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
OURS = "trtpd"
ROLE_GAIN = 1.2
KV_TOKENS = 16_384
MAX_SEQ_TOKENS = 4_096


def target(cell: Cell) -> float:
    """The ratio to llama.cpp that is aimed at."""
    if cell.kind == "prefill":
        return 2.0
    return 1.5 if cell.batch > 1 else 1.0


class Samples(msgspec.Struct, kw_only=True):
    """Seconds of one side at one cell."""

    width: str
    threads: int
    side: str
    cell: Cell
    seconds: list[float] = []

    @property
    def rate(self) -> float:
        """Tokens a second, by the median."""
        return self.cell.tokens_per_run / statistics.median(self.seconds)


class Results:
    """All samples, kept in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.samples: list[Samples] = []
        if path is not None and path.exists():
            try:
                self.samples = msgspec.json.decode(path.read_bytes(), type=list[Samples])
            except (OSError, msgspec.MsgspecError) as error:
                raise InputError(f"{path}: not results of this benchmark ({error}); name another file") from error

    def of(self, width: str, threads: int, side: str, cell: Cell) -> Samples:
        for found in self.samples:
            if (found.width, found.threads, found.side, found.cell) == (width, threads, side, cell):
                return found
        made = Samples(width=width, threads=threads, side=side, cell=cell)
        self.samples.append(made)
        return made

    def keep(self) -> None:
        if self._path is not None:
            part = self._path.with_suffix(".part")
            part.write_bytes(msgspec.json.encode([one for one in self.samples if one.seconds]))
            part.replace(self._path)


def rows_of(results: Results) -> Iterator[dict[str, Any]]:
    """The table: one row for each cell that both were measured at."""
    ours = [one for one in results.samples if one.side == OURS and one.seconds]
    for mine in sorted(ours, key=lambda one: (one.width, one.threads, one.cell.kind, one.cell.tokens, one.cell.batch)):
        same = [one for one in results.samples if one.seconds and one.cell == mine.cell and one.threads == mine.threads]
        theirs = {one.side: one.rate for one in same if one.width == mine.width and one.side != OURS}
        if not theirs:
            continue
        ratio = mine.rate / max(theirs.values())
        yield {
            "width": mine.width,
            "threads": mine.threads,
            "cell": mine.cell.name,
            "tokens_per_s": mine.rate,
            "llama_cpp_tokens_per_s": theirs,
            "ratio": ratio,
            "target": target(mine.cell),
            "met": ratio >= target(mine.cell),
            "samples": len(mine.seconds),
        }


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
        for _ in range(args.rounds):
            for cell in args.cells:
                for side, process in ((OURS, ours[cell.kind]), *theirs.items()):
                    if time.monotonic() >= deadline_s:
                        return
                    samples = results.of(width, args.threads, side, cell)
                    if not samples.seconds:
                        process.measure(cell)
                    samples.seconds.append(process.measure(cell))
                    results.keep()


def swap_roles(args: argparse.Namespace, cache: Path) -> list[dict[str, Any]]:
    """Each role's build at its own work and at the other's: how many times better it is at its own."""
    cores = tuple(range(args.threads))
    made = args.build or built(args.model, cast(Precision, args.width), cores, cache)
    seconds: dict[tuple[Kind, Kind, Cell], list[float]] = {}
    with ExitStack() as stack:
        kinds: tuple[Kind, Kind] = ("prefill", "decode")
        sides = {kind: stack.enter_context(_our_side(made / kind, ())) for kind in kinds}
        deadline_s = time.monotonic() + args.seconds
        for count in range(args.rounds):
            for cell in args.cells:
                for kind in kinds:
                    if count and time.monotonic() >= deadline_s:
                        break
                    if not count:
                        sides[kind].measure(cell)
                    seconds.setdefault((kind, cell.kind, cell), []).append(sides[kind].measure(cell))
    rows = []
    for cell in args.cells:
        rates = {kind: cell.tokens_per_run / statistics.median(seconds[kind, cell.kind, cell]) for kind in kinds}
        other = "decode" if cell.kind == "prefill" else "prefill"
        gain = rates[cell.kind] / rates[cast(Kind, other)]
        rows.append({"cell": cell.name, "rates": rates, "gain": gain, "target": ROLE_GAIN, "met": gain >= ROLE_GAIN})
    return rows


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
            print(_words(row))
    return 0


def _words(row: dict[str, Any]) -> str:
    verdict = "met" if row["met"] else "missed"
    if "gain" in row:
        rates = ", ".join(f"{role} build {rate:.1f}" for role, rate in row["rates"].items())
        return f"{row['cell']:17} {rates} tokens/s: gain {row['gain']:.2f} (target {row['target']}, {verdict})"
    theirs = ", ".join(f"{kind} {rate:.1f}" for kind, rate in row["llama_cpp_tokens_per_s"].items())
    return (
        f"{row['width']:5} {row['threads']} threads {row['cell']:17} trtpd {row['tokens_per_s']:.1f}, "
        f"llama.cpp {theirs} tokens/s: {row['ratio']:.2f} (target {row['target']}, {verdict}, {row['samples']} samples)"
    )


if __name__ == "__main__":
    raise SystemExit(main())
