"""A stage model's channel to its own worker: status, drain, and requests for one stage (for perf_analyzer).

The worker binds an ipc socket in its run directory; a thread of its own answers `StatusAsk` at once, whatever
the engine does. The rest is done inside the leader's loop, where the desk plays the router for ids from
LOCAL_IDS up: such work passes through the same engine, holds and leases, and counts as load.
"""

from __future__ import annotations

import collections
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineRequest, RequestKind, Sampling
from trtpd.runtime.worker.messages import CancelWork, DrainWork, SubmitWork, WithdrawWork
from trtpd.runtime.worker.sockets import SocketThread, bind, open_socket, send_now

log = logging.getLogger(__name__)

LOCAL_IDS = 1 << 62
SYNTHETIC_SCALE = 0.05


class StatusAsk(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Answered by Status."""


class DrainAsk(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Take nothing new. Answered by Status once that is so."""


class PrefillAsk(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Prefill a prompt and withdraw its offer. Answered by Prefilled or Failed."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    timeout_s: float = 60.0


class DecodeAsk(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Decode `max_tokens` tokens behind `kv_tokens` tokens of synthetic KV. Answered by Batch*, the last with
    `done`, or Failed."""

    kv_tokens: int
    max_tokens: int
    sampling: Sampling = Sampling()
    timeout_s: float = 60.0


class CancelAsk(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop what this connection asked for. Not answered."""


Ask = StatusAsk | DrainAsk | PrefillAsk | DecodeAsk | CancelAsk


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """`busy_s`: how long the present engine step has run."""

    instance: str
    generation: str
    registered: bool
    draining: bool
    jobs: int
    busy_s: float
    load: core.Load | None


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag="prefilled"):
    """`queue_s`: until the first chunk was about to run; `prefill_s`: from then to the first token."""

    first_token: int
    log_prob: float | None
    queue_s: float
    prefill_s: float


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """Tokens of one step. `first_index` counts from 0."""

    first_index: int
    ids: tuple[int, ...]
    done: bool


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """`permanent`: the request itself is at fault."""

    code: str
    message: str
    permanent: bool


Answer = Status | Prefilled | Batch | Failed


class SyntheticWork(msgspec.Struct, frozen=True, kw_only=True):
    """Decode behind KV that nobody computed. `request.kind` is generation_only, with its first token."""

    request: EngineRequest
    deadline_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The leader's state after its last turn, `jobs` once this one's commands were taken."""

    load: core.Load
    jobs: int
    draining: bool
    registered: bool


@dataclass(slots=True)
class _Call:
    """One local request under way. `answered`: the client has its last answer; what remains is to be
    drained."""

    client: bytes
    ask: PrefillAsk | DecodeAsk
    asked_s: float
    began_s: float
    answered: bool = False


LocalCommand = SubmitWork | SyntheticWork | WithdrawWork | CancelWork | DrainWork


class LocalDesk:
    """The worker's end. `commands`, `on_event` and `close` belong to the engine thread; `snapshot` is set
    there."""

    def __init__(
        self,
        address: str,
        *,
        instance: str,
        generation: str,
        max_seq_tokens: int,
        wake: Callable[[], None],
        busy_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds. Raises ServeError if it can't. `busy_s` is called from the desk's thread."""
        self.snapshot: Snapshot | None = None
        self._instance = instance
        self._generation = generation
        self._max_seq_tokens = max_seq_tokens
        self._wake = wake
        self._busy_s = busy_s
        self._clock = clock
        self._asks: collections.deque[tuple[bytes, Ask]] = collections.deque()
        self._follow_up: list[LocalCommand] = []
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(LOCAL_IDS)
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER)
        try:
            bind(self._socket, address, None)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = SocketThread(
            self._socket,
            name=f"local-{instance}",
            on_frames=self._on_frames,
            on_item=self._send,
            on_time=lambda: 1.0,
            on_failure=wake,
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def pending(self) -> bool:
        """`commands` has something."""
        return bool(self._asks or self._follow_up)

    def commands(self) -> Iterator[LocalCommand]:
        """What the leader is to do now. Raises InternalError if the desk's thread has stopped."""
        self._thread.check()
        follow_up, self._follow_up = self._follow_up, []
        yield from follow_up
        while self._asks:
            client, ask = self._asks.popleft()
            if isinstance(ask, DrainAsk):
                yield DrainWork()
                self._answer(client, self._status(draining=True))
            elif isinstance(ask, CancelAsk):
                yield from self._cancel(client)
            elif isinstance(ask, DecodeAsk) and not 0 < ask.kv_tokens < self._max_seq_tokens:
                self._answer(client, _bad_kv_tokens(ask, self._max_seq_tokens))
            elif isinstance(ask, PrefillAsk | DecodeAsk):
                yield self._open(client, ask)

    def on_event(self, event: core.InstanceEvent) -> None:
        """What became of a local request."""
        call = self._calls.get(event.request_id)
        if call is None:
            return
        if isinstance(event, core.Offered):
            call.began_s = self._clock()
        elif isinstance(event, core.Sealed):
            self._on_sealed(call, event)
        elif isinstance(event, core.Tokens):
            self._on_tokens(call, event)
        elif isinstance(event, core.Rejected):
            self._finish(event.request_id, Failed(code=event.code, message=event.reason, permanent=event.permanent))
        elif isinstance(event, core.Drained):
            timed_out = Failed(code="deadline", message="not done within its timeout", permanent=False)
            self._finish(event.request_id, timed_out)

    def close(self) -> None:
        """Sends what was answered and unbinds. Idempotent."""
        self._thread.close()
        self._context.term()

    def _open(self, client: bytes, ask: PrefillAsk | DecodeAsk) -> LocalCommand:
        request_id, now_s = next(self._ids), self._clock()
        self._calls[request_id] = _Call(client, ask, now_s, now_s)
        if isinstance(ask, PrefillAsk):
            request = EngineRequest(
                request_id=request_id,
                attempt=1,
                kind=RequestKind.CONTEXT_ONLY,
                prompt_ids=ask.prompt_ids,
                max_tokens=1,
                sampling=ask.sampling,
                reuse=False,
            )
            return SubmitWork(request=request, deadline_in_s=ask.timeout_s)
        request = EngineRequest(
            request_id=request_id,
            attempt=1,
            kind=RequestKind.GENERATION_ONLY,
            prompt_ids=(0,) * ask.kv_tokens,
            max_tokens=ask.max_tokens + 1,
            sampling=ask.sampling,
            first_token=0,
            reuse=False,
        )
        return SyntheticWork(request=request, deadline_in_s=ask.timeout_s)

    def _cancel(self, client: bytes) -> Iterator[LocalCommand]:
        for request_id, call in self._calls.items():
            if call.client == client and not call.answered:
                call.answered = True
                yield CancelWork(request_id=request_id, attempt=1)

    def _on_sealed(self, call: _Call, event: core.Sealed) -> None:
        self._follow_up.append(WithdrawWork(request_id=event.request_id, attempt=event.attempt))
        if not call.answered:
            call.answered = True
            answer = Prefilled(
                first_token=event.token,
                log_prob=event.log_prob,
                queue_s=call.began_s - call.asked_s,
                prefill_s=self._clock() - call.began_s,
            )
            self._answer(call.client, answer)

    def _on_tokens(self, call: _Call, event: core.Tokens) -> None:
        done = event.finish is not None
        batch = Batch(first_index=event.first_index - 1, ids=event.ids, done=done)
        if done:
            self._finish(event.request_id, batch)
        elif not call.answered:
            self._answer(call.client, batch)

    def _finish(self, request_id: int, answer: Answer) -> None:
        call = self._calls.pop(request_id)
        if not call.answered:
            self._answer(call.client, answer)

    def _answer(self, client: bytes, answer: Answer) -> None:
        self._thread.post((client, answer))

    def _send(self, item: tuple[bytes, Answer]) -> None:
        client, answer = item
        send_now(self._socket, [client, msgspec.msgpack.encode(answer)])

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            client, body = frames
            ask = msgspec.msgpack.decode(body, type=Ask)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("dropped a malformed local request: %s", error)
            return
        if isinstance(ask, StatusAsk):
            self._send((client, self._status(draining=False)))
        else:
            self._asks.append((client, ask))
            self._wake()

    def _status(self, *, draining: bool) -> Status:
        seen = self.snapshot
        return Status(
            instance=self._instance,
            generation=self._generation,
            registered=seen is not None and seen.registered,
            draining=draining or (seen is not None and seen.draining),
            jobs=seen.jobs if seen is not None else 0,
            busy_s=self._busy_s(),
            load=seen.load if seen is not None else None,
        )


def _bad_kv_tokens(ask: DecodeAsk, max_seq_tokens: int) -> Failed:
    message = f"kv_tokens is {ask.kv_tokens}; it must lie between 1 and {max_seq_tokens - 1}"
    return Failed(code="invalid_argument", message=message, permanent=True)


def fill_synthetic(pool: SharedPool, blocks: tuple[int, ...]) -> None:
    """Writes small, finite, repeatable numbers into the blocks: KV that decodes at full cost."""
    shape = pool.keys[0].shape[1:]
    numbers = np.random.default_rng(0).standard_normal(shape, dtype=np.float32) * np.float32(SYNTHETIC_SCALE)
    for arrays in (pool.keys, pool.values):
        for array in arrays:
            block = _as_stored(numbers, array.dtype)
            for index in blocks:
                array[index] = block


def _as_stored(numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]], dtype: np.dtype[np.generic]) -> object:
    """bf16 is held as uint16: the upper half of an f32."""
    if dtype == np.uint16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(dtype)
