"""The stage model's end of local.py. One socket per call, so calls from several threads don't meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import msgspec
import zmq

from trtpd.errors import EngineError, RequestError, SaturatedError, ServeError, TrtpdError
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.worker.local import (
    Answer,
    Ask,
    Batch,
    CancelAsk,
    DecodeAsk,
    DrainAsk,
    Failed,
    PrefillAsk,
    Prefilled,
    Status,
    StatusAsk,
)
from trtpd.runtime.worker.sockets import Socket, connect, open_socket, send_now

T = TypeVar("T", Status, Prefilled, Batch)

LOOK_EVERY_S = 0.05
GRACE_S = 5.0
CONNECT_TIMEOUT_S = 5.0
BUSY_CODES = ("no_kv", "capacity", "draining", "saturated")


class LocalClient:
    """Talks to one worker. Every method raises ServeError when the worker does not answer in time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self, timeout_s: float = 2.0) -> Status:
        """Answered by a thread of its own, so also while a long step runs."""
        return self._one(StatusAsk(), Status, timeout_s)

    def drain(self, timeout_s: float = 30.0) -> Status:
        """The worker takes nothing new from now on; what it has goes on. Poll `status` until `jobs` is 0."""
        return self._one(DrainAsk(), Status, timeout_s)

    def prefill(
        self,
        prompt_ids: Sequence[int],
        *,
        timeout_s: float,
        sampling: Sampling | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Prefilled | None:
        """One prompt's first token; None if `cancelled` came true. Raises RequestError, SaturatedError or
        EngineError as the worker says."""
        ask = PrefillAsk(prompt_ids=tuple(prompt_ids), sampling=sampling or Sampling(), timeout_s=timeout_s)
        for answer in self._answers(ask, timeout_s + GRACE_S, cancelled):
            return _expect(answer, Prefilled)
        return None

    def decode(
        self,
        *,
        kv_tokens: int,
        max_tokens: int,
        timeout_s: float,
        sampling: Sampling | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Batch]:
        """Batches of tokens, one per engine step, up to one with `done`. Ends early when `cancelled` comes
        true (looked at every LOOK_EVERY_S) or the caller closes the iterator; the worker then stops too."""
        ask = DecodeAsk(
            kv_tokens=kv_tokens, max_tokens=max_tokens, sampling=sampling or Sampling(), timeout_s=timeout_s
        )
        for answer in self._answers(ask, timeout_s + GRACE_S, cancelled):
            batch = _expect(answer, Batch)
            yield batch
            if batch.done:
                return

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)

    def _one(self, ask: Ask, kind: type[T], timeout_s: float) -> T:
        for answer in self._answers(ask, timeout_s, lambda: False):
            return _expect(answer, kind)
        raise AssertionError("never cancelled, so it answers or raises")

    def _answers(self, ask: Ask, timeout_s: float, cancelled: Callable[[], bool]) -> Iterator[Answer]:
        done = False
        with open_socket(self._context, zmq.DEALER) as socket:
            connect(socket, self._address, None)
            self._tell(socket, ask, min(timeout_s, CONNECT_TIMEOUT_S))
            try:
                deadline_s = time.monotonic() + timeout_s
                while not cancelled():
                    if socket.poll(int(LOOK_EVERY_S * 1000)):
                        answer = msgspec.msgpack.decode(socket.recv(), type=Answer)
                        done = not isinstance(answer, Batch) or answer.done
                        yield answer
                    elif time.monotonic() > deadline_s:
                        raise ServeError(f"the worker at {self._address} gave no answer in {timeout_s:g} s")
            finally:
                if not done and isinstance(ask, PrefillAsk | DecodeAsk):
                    send_now(socket, [msgspec.msgpack.encode(CancelAsk())])

    def _tell(self, socket: Socket, ask: Ask, timeout_s: float) -> None:
        if not socket.poll(int(timeout_s * 1000), zmq.POLLOUT):
            raise ServeError(f"no worker listens at {self._address}; did it stop?")
        socket.send(msgspec.msgpack.encode(ask))


def _expect(answer: Answer, kind: type[T]) -> T:
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Failed):
        raise _error(answer)
    raise ServeError(f"the worker answered {type(answer).__name__} where {kind.__name__} was due")


def _error(failed: Failed) -> TrtpdError:
    if failed.permanent:
        return RequestError(failed.message)
    if failed.code in BUSY_CODES:
        return SaturatedError(failed.message, retry_after_s=1.0)
    return EngineError(f"{failed.code}: {failed.message}")
