"""The one thread that talks to clients: response senders must not be used from two threads.

The driver pushes what is to go out and never waits. What is pending of a stream goes in one response, so a
stream that falls behind gets fewer and larger responses. Whoever opened a stream may count on its last
response being sent: an answer, an error, or (for a client that left) an empty end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from trtpd.runtime.core.events import TopLogProbs

log = logging.getLogger(__name__)

POLL_S = 0.02
"""How often a stream is asked whether its client has left; rarer with many streams, as asking costs."""
POLL_COST_S = 0.0005
SHUTTING_DOWN = "shutting_down"
"""Reason code of a request that the server's own end refuses or cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error for the client. `status` is a name of Triton's status codes."""

    status: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last response of a stream: why it ended, or the failure. `cancelled`: nobody waits for it."""

    finish_reason: str = ""
    timeline: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cum_log_prob: float = 0.0
    cancelled: bool = False
    failure: Failure | None = None


@dataclass(slots=True)
class Piece:
    """What goes out in one response. `log_probs` and `top_log_probs` are each empty or as long as `ids`."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)

    def add(self, more: Piece) -> None:
        """Puts another piece behind this one."""
        self.text += more.text
        self.ids += more.ids
        self.log_probs += more.log_probs
        self.top_log_probs += more.top_log_probs

    def __bool__(self) -> bool:
        return bool(self.text or self.ids)


_UNSENT = Failure(status="INTERNAL", message="code=internal the end of this answer could not be sent")


class Sink(Protocol):
    """One client's response sender. Called from the emitter's thread only."""

    def send(self, piece: Piece, end: End | None) -> None:
        """One response; the last one if `end` is given."""

    def left(self) -> bool:
        """Whether the client has gone away."""


@dataclass(slots=True)
class _Stream:
    sink: Sink
    stream: bool
    pending: Piece = field(default_factory=Piece)
    begun: bool = False
    end: End | None = None
    gone: bool = False


class Emitter:
    """See the module. `on_gone(request_id)` is called once from the emitter's thread when a client has left;
    its stream stays open until `close`. A response of a stream waits for `interval_tokens`, except for its first
    and its last one."""

    def __init__(
        self,
        on_gone: Callable[[int], None],
        *,
        interval_tokens: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_gone = on_gone
        self._interval_tokens = interval_tokens
        self._clock = clock
        self._lock = threading.Condition()
        self._streams: dict[int, _Stream] = {}
        self._due: dict[int, None] = {}
        self._busy = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open(self, request_id: int, sink: Sink, *, stream: bool) -> None:
        """From here on the client of `sink` gets a last response. `stream` false: that one only."""
        with self._lock:
            self._streams[request_id] = _Stream(sink, stream)
            self._lock.notify_all()

    def has_left(self, request_id: int) -> bool:
        """Whether the client was found gone."""
        with self._lock:
            stream = self._streams.get(request_id)
            return stream is not None and stream.gone

    def push(self, request_id: int, piece: Piece) -> None:
        """More of the answer. Returns at once; ignored once the stream is closed."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is None or stream.end is not None:
                return
            stream.pending.add(piece)
            if stream.stream and not stream.gone and self._suffices(stream):
                stream.begun = True
                self._mark_due(request_id)

    def close(self, request_id: int, end: End) -> None:
        """The last response, with what is still pending. Idempotent."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is not None and stream.end is None:
                stream.end = end
                self._mark_due(request_id)

    def close_all(self, failure: Failure, *, timeout_s: float = 5.0) -> None:
        """Ends every open stream with `failure`; returns when all of them have it, or after `timeout_s`."""
        with self._lock:
            open_ids = [i for i, stream in self._streams.items() if stream.end is None]
        for request_id in open_ids:
            self.close(request_id, End(failure=failure))
        with self._lock:
            self._lock.wait_for(lambda: not self._streams and not self._busy, timeout_s)

    def stop(self, failure: Failure, *, timeout_s: float = 5.0) -> None:
        """Ends every open stream with `failure`, then the thread. Idempotent."""
        if self._thread.is_alive():
            self.close_all(failure, timeout_s=timeout_s)
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def open_streams(self) -> int:
        with self._lock:
            return len(self._streams)

    def _suffices(self, stream: _Stream) -> bool:
        """Whether what is pending may go out by itself."""
        return bool(stream.pending) and (not stream.begun or len(stream.pending.ids) >= self._interval_tokens)

    def _mark_due(self, request_id: int) -> None:
        """Under the lock. The thread sleeps only while nothing is due, so only the first has to wake it."""
        if not self._due:
            self._lock.notify_all()
        self._due[request_id] = None

    def _run(self) -> None:
        polled_s = self._clock()
        while True:
            with self._lock:
                if not self._due and not self._stopping:
                    self._lock.wait(self._poll_s() if self._streams else None)
                if self._stopping and not self._due:
                    return
                due = [(i, *self._take(i)) for i in self._due]
                self._due.clear()
                self._busy = True
            for request_id, stream, piece, end in due:
                self._send(request_id, stream, piece, end)
            with self._lock:
                self._busy = False
                self._lock.notify_all()
            if self._clock() - polled_s >= self._poll_s():
                self._poll()
                polled_s = self._clock()

    def _poll_s(self) -> float:
        return max(POLL_S, POLL_COST_S * len(self._streams))

    def _take(self, request_id: int) -> tuple[_Stream, Piece, End | None]:
        stream = self._streams[request_id]
        piece, stream.pending = stream.pending, Piece()
        if stream.end is not None:
            del self._streams[request_id]
        return stream, piece, stream.end

    def _send(self, request_id: int, stream: _Stream, piece: Piece, end: End | None) -> None:
        if end is None and (stream.gone or not piece):
            return
        if not stream.stream and end is not None and end.failure is not None:
            piece = Piece()  # its client takes one response: the error
        if self._sent(request_id, stream, piece, end):
            return
        if end is None:
            self._leave(request_id, stream)
        elif not end.cancelled:
            self._sent(request_id, stream, Piece(), End(failure=_UNSENT))

    def _sent(self, request_id: int, stream: _Stream, piece: Piece, end: End | None) -> bool:
        try:
            stream.sink.send(piece, end)
        except Exception:  # one client's failure must not end the thread all others wait for
            log.exception("request %d: a response could not be sent", request_id)
            return False
        return True

    def _poll(self) -> None:
        with self._lock:
            asked = [(i, stream) for i, stream in self._streams.items() if not stream.gone]
        for request_id, stream in asked:
            if stream.sink.left():
                self._leave(request_id, stream)

    def _leave(self, request_id: int, stream: _Stream) -> None:
        if not stream.gone:
            stream.gone = True
            self._on_gone(request_id)
