"""Ranks over MPI: one process per rank, started by mpirun.

Steps are told point to point: a rank that waits looks for a message now and then, and sleeps longer the longer
nothing comes, for a blocking receive would burn its core. Within a step ranks wait for each other in
collectives, which spin.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from trtpd.errors import EngineError, InternalError
from trtpd.runtime.engine.ranks import I32, Array, NoProgress, Progress

log = logging.getLogger(__name__)

MEND = "install trtpd with its extra mpi (pip install '.[mpi]' in trtpd's source folder: mpi4py and Open MPI)"

SPIN_S = 0.0005
NAP_SHARE = 0.125
NAP_LEAST_S = 0.00005
NAP_MOST_S = 0.002
ABORT_S = 3.0

_STEP_TAG = 1


def import_mpi() -> ModuleType:
    """mpi4py.MPI, which joins the group this process was started in. Raises EngineError if it is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EngineError(
            f"an engine of several ranks needs MPI, which can't be used here ({error}); {MEND}"
        ) from error
    module: ModuleType = MPI
    return module


def nap_s(idle_s: float) -> float:
    """How long to sleep before looking again after `idle_s` without a message; 0: look again at once. It adds
    an eighth to any wait, and 2 ms to a long one."""
    if idle_s < SPIN_S:
        return 0.0
    return min(NAP_MOST_S, max(NAP_LEAST_S, idle_s * NAP_SHARE))


class MpiRanks:
    """Ranks over a communicator of its own, made from `communicator` (all of its ranks call this)."""

    def __init__(self, mpi: ModuleType, communicator: Any, progress: Progress | None = None) -> None:
        self._mpi = mpi
        self._comm = communicator.Dup()
        self._progress = progress or NoProgress()
        self._sends: list[Any] = []
        self._dismissed = False
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def exchange(self, message: bytes) -> list[bytes]:
        """See Ranks."""
        lengths = np.zeros(self.size, np.int64)
        self._comm.Allgather(np.array([len(message)], np.int64), lengths)
        everything = bytearray(int(lengths.sum()))
        self._comm.Allgatherv(message, [everything, lengths.tolist(), self._mpi.BYTE])
        ends = np.cumsum(lengths).tolist()
        return [bytes(everything[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def tell(self, step: I32, *, tokens: int) -> None:
        """See Ranks."""
        self._send(step)
        self._progress.began(tokens)

    def told(self, step: I32) -> int | None:
        """See Ranks."""
        status = self._mpi.Status()
        since_s = time.monotonic()
        while not self._comm.Iprobe(source=0, tag=_STEP_TAG, status=status):
            pause_s = nap_s(time.monotonic() - since_s)
            if pause_s:
                time.sleep(pause_s)
            else:
                os.sched_yield()
        length: int = status.Get_count(self._mpi.INT32_T)
        self._comm.Recv([step, length, self._mpi.INT32_T], source=0, tag=_STEP_TAG)
        if not length:
            return None
        self._progress.began(length)
        return length

    def sum(self, part: Array, into: Array) -> None:
        """See Ranks."""
        self._progress.met()
        self._comm.Allreduce(part, into)

    def gather(self, part: Array, widths: Sequence[int]) -> list[Array] | None:
        """See Ranks."""
        self._progress.met()
        rows = len(part)
        parts: list[Array] | None = None
        if self.rank == 0:
            flat = np.empty(rows * sum(widths), part.dtype)
            ends = np.cumsum([rows * width for width in widths])
            parts = [piece.reshape(rows, -1) for piece in np.split(flat, ends[:-1])]
            self._comm.Gatherv(part, [flat, [piece.size for piece in parts]])
            self._finish_sends()
        else:
            self._comm.Gatherv(part, None)
        self._progress.ended()
        return parts

    def dismiss(self) -> None:
        """See Ranks."""
        if not self._dismissed:
            self._dismissed = True
            self._send(np.zeros(0, np.int32))
            self._finish_sends()

    def abort(self, reason: str) -> NoReturn:
        """See Ranks. Should MPI not manage, this process exits, which ends the group as well: by faulthandler, whose
        timer does without the interpreter's lock, which MPI_Abort may hold."""
        log.error("rank %d ends its group: %s", self.rank, reason)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        faulthandler.dump_traceback_later(ABORT_S, exit=True)
        self._mpi.COMM_WORLD.Abort(1)
        raise InternalError("MPI_Abort returned")

    def _send(self, step: I32) -> None:
        self._sends = [self._comm.Isend(step, dest=rank, tag=_STEP_TAG) for rank in range(1, self.size)]

    def _finish_sends(self) -> None:
        self._mpi.Request.Waitall(self._sends)
        self._sends = []
