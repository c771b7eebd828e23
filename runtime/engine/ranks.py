"""Ranks: the tensor-parallel group that an engine is computed by, as its executor sees it.

Rank 0 leads: it schedules, and tells the others each step. All ranks then compute the step on their part of
the weights and of the KV, summing up among themselves as they go, and rank 0 gathers the results. A rank that
can't go on ends the group: nobody computes with a part of the ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt

from trtpd.errors import InternalError

I32 = npt.NDArray[np.int32]
Array = npt.NDArray[Any]


class Progress(Protocol):
    """Is told how far this rank is, by its engine thread; a watchdog reads it."""

    def began(self, tokens: int) -> None:
        """A step of so many tokens begins here."""

    def met(self) -> None:
        """This rank has reached the next point at which the ranks of a step wait for each other."""

    def ended(self) -> None:
        """The step is over for this rank."""


class NoProgress:
    """Progress that nobody reads."""

    def began(self, tokens: int) -> None:
        """Ignored."""

    def met(self) -> None:
        """Ignored."""

    def ended(self) -> None:
        """Ignored."""


class Ranks(Protocol):
    """One rank's end of its group. All but `abort` from one thread, and each call by all ranks in the same
    order; where not said otherwise a call waits for the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, message: bytes) -> list[bytes]:
        """Everyone's message, by rank."""

    def tell(self, step: I32, *, tokens: int) -> None:
        """Rank 0: hands the others their next step; doesn't wait for them. `step` may be written again when
        the step's `gather` has returned."""

    def told(self, step: I32) -> int | None:
        """The others: the length of the next step, which is put into `step`; None when there will be none.
        Costs next to nothing while it waits."""

    def sum(self, part: Array, into: Array) -> None:
        """The sum of everyone's `part`, the same to the last bit on every rank."""

    def gather(self, part: Array, widths: Sequence[int]) -> list[Array] | None:
        """Ends a step. Rank 0: the `[rows, widths[rank]]` of every rank; None elsewhere."""

    def dismiss(self) -> None:
        """Rank 0: there will be no further step. Idempotent."""

    def abort(self, reason: str) -> NoReturn:
        """Ends all processes of the group at once. From any thread."""


class _Shared:
    """What the threads of a LocalRanks group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.steps: list[queue.SimpleQueue[I32]] = [queue.SimpleQueue() for _ in range(size)]


class LocalRanks:
    """Ranks as threads of one process, without MPI: for tests, and to look at what parts compute. An abort breaks the
    waits of all ranks with BrokenBarrierError."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        """Use `make`."""
        self.rank = rank
        self.size = len(shared.slots)
        self._shared = shared

    @classmethod
    def make(cls, size: int) -> list[Self]:
        """All ranks of a new group."""
        shared = _Shared(size)
        return [cls(rank, shared) for rank in range(size)]

    def exchange(self, message: bytes) -> list[bytes]:
        """See Ranks."""
        return self._share(message)

    def tell(self, step: I32, *, tokens: int) -> None:
        """See Ranks."""
        for steps in self._shared.steps[1:]:
            steps.put(step.copy())

    def told(self, step: I32) -> int | None:
        """See Ranks."""
        told = self._shared.steps[self.rank].get()
        step[: len(told)] = told
        return len(told) or None

    def sum(self, part: Array, into: Array) -> None:
        """See Ranks."""
        parts = self._share(part.copy())
        into[...] = parts[0]
        for other in parts[1:]:
            into += other

    def gather(self, part: Array, widths: Sequence[int]) -> list[Array] | None:
        """See Ranks."""
        parts: list[Array] = self._share(part.copy())
        return parts if self.rank == 0 else None

    def dismiss(self) -> None:
        """See Ranks."""
        self.tell(np.zeros(0, np.int32), tokens=0)

    def abort(self, reason: str) -> NoReturn:
        """See Ranks."""
        self._shared.barrier.abort()
        raise InternalError(f"rank {self.rank} ends its group: {reason}")

    def _share(self, mine: Any) -> list[Any]:
        self._shared.slots[self.rank] = mine
        self._shared.barrier.wait()
        everyone = list(self._shared.slots)
        self._shared.barrier.wait()
        return everyone
