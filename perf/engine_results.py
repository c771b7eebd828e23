"""What the engine benchmark measured: samples by round, kept in a file, and the table that is made of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trtpd.build.files import write_whole
from trtpd.errors import InputError
from trtpd.perf.measured import Cell

OURS = "trtpd"


def target(cell: Cell) -> float:
    """The ratio to llama.cpp that is aimed at."""
    if cell.kind == "prefill":
        return 2.0
    return 1.5 if cell.batch > 1 else 1.0


class Samples(msgspec.Struct, kw_only=True):
    """Seconds of one side at one cell, of one round after the other."""

    width: str
    threads: int
    side: str
    cell: Cell
    seconds: list[float] = []

    def rate(self, rounds: int) -> float:
        """Tokens a second, by the median of so many rounds."""
        return self.cell.tokens_per_run / statistics.median(self.seconds[:rounds])


class Results:
    """All samples, kept in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        """Raises InputError for a file of something else."""
        self._path = path
        self.samples: list[Samples] = []
        if path is not None and path.exists():
            try:
                self.samples = msgspec.json.decode(path.read_bytes(), type=list[Samples])
            except (OSError, msgspec.MsgspecError) as error:
                raise InputError(f"{path}: not results of this benchmark ({error}); name another file") from error

    def add(self, width: str, threads: int, cell: Cell, seconds: Mapping[str, float]) -> None:
        """A round of a cell: the seconds of all its sides. It is in the file at once."""
        for side, value in seconds.items():
            self._of(width, threads, side, cell).seconds.append(value)
        if self._path is not None:
            write_whole(self._path, msgspec.json.encode(self.samples))

    def _of(self, width: str, threads: int, side: str, cell: Cell) -> Samples:
        for found in self.samples:
            if (found.width, found.threads, found.side, found.cell) == (width, threads, side, cell):
                return found
        made = Samples(width=width, threads=threads, side=side, cell=cell)
        self.samples.append(made)
        return made


def rows_of(results: Results) -> Iterator[dict[str, Any]]:
    """The table: one row for each cell that both were measured at, over the rounds that all its sides have. `ratio` is
    that of the medians, to the best of the others; `spread` its least and most over the rounds."""
    measured = [one for one in results.samples if one.seconds]
    ours = [one for one in measured if one.side == OURS]
    for mine in sorted(ours, key=lambda one: (one.width, one.threads, one.cell.kind, one.cell.tokens, one.cell.batch)):
        same = (mine.width, mine.threads, mine.cell)
        theirs = [one for one in measured if one.side != OURS and (one.width, one.threads, one.cell) == same]
        if not theirs:
            continue
        rounds = min(len(one.seconds) for one in (mine, *theirs))
        rates = {one.side: one.rate(rounds) for one in theirs}
        best = max(theirs, key=lambda one: rates[one.side])
        ratio = mine.rate(rounds) / rates[best.side]
        yield {
            "width": mine.width,
            "threads": mine.threads,
            "cell": mine.cell.name,
            "tokens_per_s": mine.rate(rounds),
            "llama_cpp_tokens_per_s": rates,
            "ratio": ratio,
            "spread": spread(mine.seconds[:rounds], best.seconds[:rounds]),
            "target": target(mine.cell),
            "met": ratio >= target(mine.cell),
            "samples": rounds,
        }


def spread(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Least and most of how many times faster than the other one side was, round by round; None for fewer than two
    rounds."""
    ratios = [other / own for own, other in zip(seconds, others, strict=True)]
    return (min(ratios), max(ratios)) if len(ratios) > 1 else None
