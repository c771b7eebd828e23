"""Puller: the thread of a sink. It renews leases, copies what may be copied, verifies, and reports.

What a transport adds is a Carrier per pull: how its bytes come, and how its source is spoken to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from trtpd.errors import IntegrityError, InternalError, LeaseError, PeerGoneError, TransferError
from trtpd.kv_transfer.base import Key, PullResult
from trtpd.kv_transfer.leases import SinkLease
from trtpd.kv_transfer.offer import Chunk, Seal
from trtpd.kv_transfer.pull import Pull

log = logging.getLogger("trtpd.kv_transfer")

WATCH_S = 0.25
IDLE_S = 2.0


class Interrupted(Exception):
    """A carrier saw that its pull was aborted, and stopped waiting."""


class Carrier(Protocol):
    """One pull's way to its source. Used in the puller's thread only. What waits there is bounded, and raises
    Interrupted when the pull is aborted."""

    def renew(self, sent_s: float) -> float | None:
        """Sends a renewal. When the newest one known to be received, by a source that held, was sent; None if it
        doesn't hold. Raises PeerGoneError if the source is known to be gone, TransferError if it can't be
        asked."""

    def check(self) -> None:
        """Raises LeaseError unless the source holds, unchanged, the blocks of the offer; as `renew`."""

    def gone(self) -> bool:
        """True if the source's process is known to have ended."""

    def copy(self, pull: Pull, piece: range) -> int:
        """Copies a piece into the sink's blocks and verifies its digests; the bytes moved. Nothing touches
        the blocks after it has returned or raised. Raises IntegrityError, TransferError."""

    def close(self) -> None:
        """The pull has ended."""


class _Task:
    def __init__(self, pull: Pull, carrier: Carrier) -> None:
        self.pull, self.carrier = pull, carrier
        self.lease = SinkLease(pull.offer.lease_s)


class Puller:
    """Runs pulls, those whose prompt is sealed first, each in pieces of at most `piece_blocks` blocks.

    `wake` is called from the thread when a pull has ended. `idle` is called from it when there is nothing to
    copy, and again as long as it returns True. The thread starts with the first pull.
    """

    def __init__(
        self,
        *,
        piece_blocks: int,
        wake: Callable[[], None],
        clock: Callable[[], float],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._piece_blocks, self._wake, self._clock, self._idle = piece_blocks, wake, clock, idle
        self._changed = threading.Condition()
        self._tasks: dict[Key, _Task] = {}
        self._results: list[PullResult] = []
        self._closing = False
        self._broken: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if it doesn't run yet. Raises InternalError after `close` or a bug of ours."""
        with self._changed:
            if self._closing or self._broken:
                raise InternalError("this sink is closed") from self._broken
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-pull", daemon=True)
                self._thread.start()
            self._changed.notify()

    def begin(self, pull: Pull, carrier: Carrier, *, confirmed_s: float | None = None) -> None:
        """Takes over both; `confirmed_s` if the carrier has renewed already. Raises InternalError if the key is
        being pulled; then `carrier` is still the caller's."""
        task = _Task(pull, carrier)
        if confirmed_s is not None:
            task.lease.sent(confirmed_s)
            task.lease.confirmed(sent_s=confirmed_s)
        with self._changed:
            self.start()
            if pull.key in self._tasks:
                raise InternalError(f"request {pull.key[0]} attempt {pull.key[1]} is being pulled already")
            self._tasks[pull.key] = task
            self._changed.notify()

    def ready(self, chunk: Chunk) -> None:
        with self._changed:
            if task := self._tasks.get(chunk.key):
                task.pull.ready(chunk)
                self._changed.notify()

    def sealed(self, seal: Seal) -> None:
        with self._changed:
            if task := self._tasks.get(seal.key):
                task.pull.seal(seal, self._clock())
                self._changed.notify()

    def abort(self, key: Key) -> None:
        with self._changed:
            if task := self._tasks.get(key):
                task.pull.aborted = True
                self._changed.notify()

    def progress(self) -> list[PullResult]:
        """As KVSink.progress. Raises InternalError once the thread has ended by a bug of ours and all it had is told:
        who goes on would pull nothing any more."""
        with self._changed:
            results, self._results = self._results, []
            if self._broken and not results and not self._closing:
                raise InternalError(f"the thread that pulls KV has ended: {self._broken!r}") from self._broken
        return results

    def busy(self) -> bool:
        return bool(self._tasks)

    def close(self) -> None:
        """Aborts every pull, waits for copies under way, ends the thread. Results can still be had."""
        with self._changed:
            self._closing = True
            for task in self._tasks.values():
                task.pull.aborted = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                self._advance(task)
        except Exception as error:  # noqa: BLE001 - the thread's end: whoever waits must be told, whatever it was
            with self._changed:
                self._broken = error
                tasks = list(self._tasks.values())
            for task in tasks:
                self._finish(task, _internal(error))
            self._wake()

    def _next(self) -> _Task | None:
        """Waits for a pull with something to do; None when closing and all have ended."""
        while True:
            with self._changed:
                tasks = list(self._tasks.values())
            for task in tasks:
                self._renew_and_watch(task)
            with self._changed:
                # Only tasks seen to above: one that has come since has no lease yet.
                actionable = [task for task in tasks if self._has_work(task)]
                if actionable:
                    return min(actionable, key=_urgency)
                if self._closing and not self._tasks:
                    return None
            if self._idle():
                continue
            with self._changed:
                if not self._closing and not any(map(self._has_work, self._tasks.values())):
                    self._changed.wait(self._nap_s())

    def _has_work(self, task: _Task) -> bool:
        pull = task.pull
        return pull.aborted or pull.fault is not None or bool(pull.piece(1)) or pull.complete

    def _nap_s(self) -> float:
        if not self._tasks:
            return IDLE_S
        due_s = min(task.lease.due_s() for task in self._tasks.values())
        return min(max(due_s - self._clock(), 0.0), WATCH_S)

    def _renew_and_watch(self, task: _Task) -> None:
        """Renews what is due, and sees to a pull whose source will never send what it waits for."""
        pull = task.pull
        if pull.fault is not None or pull.aborted:
            return
        try:
            if self._clock() >= task.lease.due_s():
                self._renew(task)
            if not task.lease.holds(self._clock()):
                pull.fault = self._lapsed(task)
            elif not pull.sealed and task.carrier.gone():
                pull.fault = PeerGoneError(
                    f"{pull.offer.instance} has died before the KV of request {pull.key[0]} was complete:"
                    " prefill it elsewhere"
                )
        except Interrupted:
            return
        except TransferError as error:
            if isinstance(error, PeerGoneError) or not task.lease.holds(self._clock()):
                pull.fault = error

    def _renew(self, task: _Task) -> None:
        """Whoever can't be asked now may be asked again before the lease ends."""
        now_s = self._clock()
        task.lease.sent(now_s)
        confirmed_s = task.carrier.renew(now_s)
        if confirmed_s is not None:
            task.lease.confirmed(sent_s=confirmed_s)

    def _advance(self, task: _Task) -> None:
        """One piece, or the end. Only this thread ends a task, so then its blocks are at rest."""
        error: TransferError | None = None
        try:
            ended = self._step(task)
        except Interrupted:
            ended = True
        except TransferError as failure:
            ended, error = True, failure
        except Exception as failure:  # noqa: BLE001 - one pull's failure must not end the others
            ended, error = True, _internal(failure)
        if ended:
            self._finish(task, error)

    def _step(self, task: _Task) -> bool:
        """True if the pull has ended: it is aborted, or all of it is there and may be used."""
        pull = task.pull
        if pull.aborted:
            return True
        if pull.fault is not None:
            raise pull.fault
        self._check(task)
        if piece := pull.piece(self._piece_blocks):
            self._copy(task, piece)
        if pull.complete:
            self._check(task)
        return pull.complete

    def _copy(self, task: _Task, piece: range) -> None:
        began_s = time.monotonic()
        try:
            bytes_moved = task.carrier.copy(task.pull, piece)
        except IntegrityError:
            self._check(task)  # bytes of a block that was freed meanwhile are a lost lease, not a bad copy
            raise
        task.pull.copied(piece, bytes_moved=bytes_moved, seconds=time.monotonic() - began_s)

    def _check(self, task: _Task) -> None:
        """Never skipped before copied KV is used. Raises LeaseError."""
        if not task.lease.holds(self._clock()):
            raise self._lapsed(task)
        task.carrier.check()

    def _lapsed(self, task: _Task) -> LeaseError:
        return LeaseError(
            f"{task.pull.offer.instance} no longer holds the KV of request {task.pull.key[0]} (its lease ended):"
            " prefill it again"
        )

    def _finish(self, task: _Task, error: TransferError | None) -> None:
        task.carrier.close()
        with self._changed:
            del self._tasks[task.pull.key]
            code = "aborted" if task.pull.aborted and error is None else ""
            self._results.append(task.pull.result(self._clock(), error, code=code))
        self._wake()


def _urgency(task: _Task) -> int:
    pull = task.pull
    return 0 if pull.aborted or pull.fault is not None else 1 if pull.sealed else 2


def _internal(error: Exception) -> TransferError:
    """A bug of ours as the end of a pull."""
    log.error("a pull failed by a bug of ours", exc_info=error)
    failure = TransferError(f"a bug in the sink: {type(error).__name__}: {error}")
    failure.retryable = False
    failure.code = InternalError.code
    return failure
