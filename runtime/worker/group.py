"""A tensor-parallel group from both ends: the keeper that starts it, and a process that is one of its ranks.

A group has a folder of its own in /dev/shm for as long as it lives: its board, the pipe whose end tells rank 0 that
the keeper is gone (mpirun does not pass standard input on reliably), MPI's shared memory and mpirun's files. The
folder is named after the keeper's process, so that it can be swept once that is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

from trtpd.errors import ServeError
from trtpd.kv_transfer.pool_file import SHM_DIR, start_ticks
from trtpd.runtime.engine.mpi import MpiRanks, import_mpi
from trtpd.runtime.worker.board import STEP_LIMIT_S, Board, RankRow
from trtpd.runtime.worker.watchdog import SILENT_S, Watchdog

PREFIX = "trtpd-mpi."
GONE_S = 5.0

_BOARD, _PIPE = "board", "keeper"
_OWNER = re.compile(re.escape(PREFIX) + r"(?P<pid>\d{1,10})\.(?P<start>\d{1,20})\.")


class GroupFolder:
    """The keeper's end of one life of a group."""

    def __init__(self, path: Path, board: Board, pipe: int) -> None:
        """Use `make`."""
        self.path = path
        self._board = board
        self._pipe: int | None = pipe

    @classmethod
    def make(cls, instance: str, ranks: int) -> Self:
        """A new folder; what a former life of this instance under this keeper left is removed. Raises ServeError."""
        path = SHM_DIR / f"{PREFIX}{os.getpid()}.{start_ticks(os.getpid())}.{instance}"
        try:
            sweep_groups()
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700)
            os.mkfifo(path / _PIPE, 0o600)
            pipe = os.open(path / _PIPE, os.O_RDWR)  # open for reading too, since a writer alone would wait for one
            return cls(path, Board.make(path / _BOARD, ranks), pipe)
        except OSError as error:
            raise ServeError(
                f"{path}, where the ranks of {instance} meet, can't be made: {error.strerror}; "
                "free some of /dev/shm or allow this user to write there"
            ) from error

    def tell_to_end(self) -> None:
        """Rank 0 ends its group as a worker ends whose standard input is closed. Idempotent."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def kill(self) -> None:
        """SIGKILL to every rank on this host that is still there, and waits until none is."""
        until_s = time.monotonic() + GONE_S
        while pids := self.alive():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until_s:
                return
            time.sleep(0.01)

    def alive(self) -> list[int]:
        """Pids of the ranks on this host."""
        states = self._board.states()
        return [state.pid for state in states if state.pid and start_ticks(state.pid) == state.start_ticks]

    def remove(self) -> None:
        """Idempotent."""
        self.tell_to_end()
        shutil.rmtree(self.path, ignore_errors=True)


def sweep_groups(directory: Path = SHM_DIR) -> list[str]:
    """Removes the folders of groups whose keepers are gone. Returns their names."""
    removed = []
    for path in directory.glob(f"{PREFIX}*"):
        match = _OWNER.match(path.name)
        if match is not None and start_ticks(int(match["pid"])) != int(match["start"]):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


@dataclass(slots=True, kw_only=True)
class Member:
    """This process as one rank of its group. `row` is None on a host that the keeper's folder is not on: there is no
    watchdog, and only the leader's sees that a step hangs."""

    ranks: MpiRanks
    mpi: ModuleType
    row: RankRow | None

    def serve(self, serving: bool) -> None:
        """From now on the others miss this rank when it stops (or no longer do)."""
        if self.row is not None:
            self.row.serve(serving)

    def leave(self) -> None:
        """Ends MPI here, when all other ranks do."""
        self.mpi.Finalize()


def join_group(folder: Path | None, *, silent_s: float = SILENT_S, step_limit_s: float = STEP_LIMIT_S) -> Member:
    """Joins the group that mpirun started this process in. Raises EngineError without MPI."""
    mpi = import_mpi()
    rank = mpi.COMM_WORLD.Get_rank()
    board = Board(folder / _BOARD) if folder is not None and (folder / _BOARD).is_file() else None
    row = board.join(rank, step_limit_s=step_limit_s) if board is not None else None
    ranks = MpiRanks(mpi, mpi.COMM_WORLD, row)
    if board is not None and row is not None:
        Watchdog(board, row, rank, ranks.abort, silent_s=silent_s).start()
    return Member(ranks=ranks, mpi=mpi, row=row)


def open_keeper_pipe(folder: Path) -> int:
    """A file descriptor that ends when the keeper does, or tells the group to. Raises ServeError."""
    try:
        pipe = os.open(folder / _PIPE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ServeError(f"{folder}: the group's folder is gone ({error.strerror}): its keeper has ended") from error
    os.set_blocking(pipe, True)
    return pipe
