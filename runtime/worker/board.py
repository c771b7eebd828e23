"""Board: what the ranks of a group on one host let each other, and their keeper, know of themselves.

One shared file with a row per rank, each written by its own rank only. Reading it needs no rank's help, so it also
tells of ranks that are stopped or hang.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from trtpd.kv_transfer.pool_file import start_ticks

STEP_LIMIT_S = 60.0
TOKEN_LIMIT_S = 0.1
"""A step may take STEP_LIMIT_S (or what it was set to), and this for each of its tokens, before it counts as hung."""

_PID, _START, _BEATS, _MEETINGS, _BEGAN_NS, _LIMIT_NS, _SERVING, _WORDS = range(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One row. `beats` grows while the process runs at all, `meetings` with each point at which the ranks of a step
    wait for each other. `step_began_ns` names the step under way, None between steps."""

    rank: int
    pid: int
    start_ticks: int
    beats: int
    meetings: int
    step_began_ns: int | None
    step_limit_s: float
    serving: bool


class Board:
    """The file, mapped. Rows are words of 64 bits, so a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        """Maps a board that `make` made."""
        with path.open("r+b") as file:
            self._rows = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64).reshape(-1, _WORDS)

    @classmethod
    def make(cls, path: Path, ranks: int) -> Self:
        """A new one on which no rank has written yet."""
        path.write_bytes(bytes(8 * _WORDS * ranks))
        return cls(path)

    def states(self) -> list[RankState]:
        """All rows, by rank. A rank that hasn't joined has pid 0."""
        return [
            RankState(
                rank=rank,
                pid=row[_PID],
                start_ticks=row[_START],
                beats=row[_BEATS],
                meetings=row[_MEETINGS],
                step_began_ns=row[_BEGAN_NS] or None,
                step_limit_s=row[_LIMIT_NS] / 1e9,
                serving=bool(row[_SERVING]),
            )
            for rank, row in enumerate(self._rows.tolist())
        ]

    def join(self, rank: int, *, step_limit_s: float = STEP_LIMIT_S) -> RankRow:
        """This process's row, as that of `rank`."""
        row = self._rows[rank]
        row[_START] = start_ticks(os.getpid()) or 0
        row[_PID] = os.getpid()
        return RankRow(row, step_limit_s)


class RankRow:
    """Progress of this rank, on its row of a board."""

    def __init__(self, row: np.ndarray[tuple[int, ...], np.dtype[np.int64]], step_limit_s: float) -> None:
        self._row = row
        self._step_limit_s = step_limit_s

    def beat(self) -> None:
        """This process runs."""
        self._row[_BEATS] += 1

    def serve(self, serving: bool) -> None:
        """From now on this rank may (not) be missed."""
        self._row[_SERVING] = serving

    def began(self, tokens: int) -> None:
        """See Progress."""
        self._row[_LIMIT_NS] = int((self._step_limit_s + tokens * TOKEN_LIMIT_S) * 1e9)
        self._row[_BEGAN_NS] = time.monotonic_ns()

    def met(self) -> None:
        """See Progress."""
        self._row[_MEETINGS] += 1

    def ended(self) -> None:
        """See Progress."""
        self._row[_BEGAN_NS] = 0
