"""The leader's end of the control plane: dials the router, registers, and stays registered."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from trtpd.runtime.core import events as core
from trtpd.runtime.worker.link import Clock, Ear, loose
from trtpd.runtime.worker.messages import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    Envelope,
    Message,
    Refused,
    Reregister,
    StepMessage,
    Welcome,
    WireError,
    Work,
    decode_body,
    encode_body,
    unpack,
)
from trtpd.runtime.worker.session import Session
from trtpd.runtime.worker.sockets import SocketThread, connect, is_local, open_socket, send_now

log = logging.getLogger(__name__)

ROUTER_GONE_AFTER_S = 2 * HEARTBEAT_S


@dataclass(frozen=True, slots=True)
class Registered:
    """A session with the router of `epoch` began. Work that follows in the inbox belongs to it, and answers
    are sent with its `generation`."""

    epoch: str
    generation: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session is over: all its work is to be dropped, nothing of it reported."""

    generation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The router refuses this leader for good; the process should end."""

    reason: str


InboxItem = Registered | SessionEnded | Dismissed | Work


class LeaderLink:
    """The leader's end. `send`, `drain`, `check` and `close` belong to the engine thread.

    `hello` says what this instance is; its `generation` is the first one used, later ones add a count to it
    (so they sort behind it). `wake` is called from the link's thread when the inbox has something.
    """

    def __init__(
        self,
        hello: core.Hello,
        address: str,
        *,
        wake: Callable[[], None],
        keys: Path | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises ServeError for an address or keys that can't be used."""
        self.malformed = 0
        self.busy_since_s: float | None = None
        self._hello = hello
        self._registrations = 0
        self._gone_after_s = ROUTER_GONE_AFTER_S if is_local(address) else LOST_AFTER_S
        self._wake = wake
        self._clock = clock
        self._inbox: collections.deque[InboxItem] = collections.deque()
        self._session: Session | None = None
        self._dismissed = False
        self._hello_s = 0.0
        self._down_s: float | None = None
        self._ear = Ear(clock())
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER)
        try:
            connect(self._socket, address, keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = SocketThread(
            self._socket,
            name=f"link-{hello.instance}",
            on_frames=self._on_frames,
            on_item=self._on_item,
            on_time=self._on_time,
            on_failure=wake,
            monitor=self._on_monitor,
        )

    @property
    def generation(self) -> str:
        """The generation of the present registration."""
        base = self._hello.generation
        return base if self._registrations == 0 else f"{base}.{self._registrations:06d}"

    @property
    def registered(self) -> bool:
        return self._session is not None

    def busy_s(self) -> float:
        """How long the engine's present step has run. From any thread."""
        since_s = self.busy_since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: StepMessage, generation: str) -> None:
        """Sends what happened in the session of `generation`; dropped if that is over.

        Raises WireError when it is too long."""
        kind, body = encode_body(message)
        self._thread.post((generation, kind, body))

    def drain(self) -> Iterator[InboxItem]:
        """What came in since the last call, in order. A caller may stop in the middle and go on later."""
        while self._inbox:
            yield self._inbox.popleft()

    def check(self) -> None:
        """Raises InternalError if the link's thread has stopped."""
        self._thread.check()

    def close(self, reason: str = "stopped") -> None:
        """Tells the router that this instance is gone, and hangs up. Idempotent."""
        self._thread.post(reason)
        self._thread.close()
        self._context.term()

    def _on_item(self, item: tuple[str, str, bytes] | str) -> None:
        session = self._session
        if isinstance(item, str):
            if session is not None:
                gone = core.Lost(instance=session.instance, generation=session.generation, reason=item)
                self._put(session.loose(gone))
            return
        generation, kind, body = item
        if session is not None and session.generation == generation:
            self._put(session.send(kind, body))

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            (frame,) = frames
            self._on_envelope(unpack(frame))
        except (WireError, ValueError) as error:
            self.malformed += 1
            log.warning("dropped a frame from the router: %s", error)

    def _on_envelope(self, envelope: Envelope) -> None:
        if envelope.instance != self._hello.instance or envelope.generation != self.generation or self._dismissed:
            return
        session = self._session
        if envelope.seq == 0 and envelope.kind in ("Welcome", "Reregister", "Refused"):
            self._on_registration(decode_body(envelope.kind, envelope.body))
        elif session is not None and session.epoch == envelope.epoch:
            try:
                messages, replies = session.receive(envelope, self._clock())
            except WireError as error:
                if envelope.seq:
                    self._end(f"a message of the router can't be understood: {error}")
                raise
            for reply in replies:
                self._put(reply)
            self._accept(messages)

    def _on_registration(self, message: Message) -> None:
        if isinstance(message, Welcome) and self._session is None:
            self._session = Session(
                instance=self._hello.instance,
                generation=self.generation,
                epoch=message.epoch,
                now_s=self._clock(),
            )
            self._receive(Registered(message.epoch, self.generation))
        elif isinstance(message, Reregister):
            self._end("the router does not know this session")
        elif isinstance(message, Refused):
            self._dismissed = True
            self._end(f"refused: {message.reason}")
            self._receive(Dismissed(message.reason))

    def _accept(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Work):
                self._receive(message)
            else:
                self.malformed += 1

    def _receive(self, item: InboxItem) -> None:
        self._inbox.append(item)
        self._wake()

    def _end(self, reason: str) -> None:
        """Ends the session, or the attempt at one; the next registration is of a new generation."""
        if self._session is not None:
            self._receive(SessionEnded(self._session.generation, reason))
        self._session = None
        self._registrations += 1
        self._hello_s = self._clock()

    def _on_time(self) -> float:
        now_s = self._clock()
        unheard_s = self._ear.unheard_s(now_s)
        if self._session is not None:
            self._session.excuse(unheard_s)
            reason = self._session.lost(now_s)
            if reason is None and self._down_s is not None and now_s - self._down_s > self._gone_after_s:
                reason = "disconnected"
            if reason is not None:
                self._end(f"the router is gone: {reason}")
        if self._session is None:
            return self._say_hello(now_s)
        self._session.busy_s = self.busy_s()
        for frame in self._session.due(now_s):
            self._put(frame)
        return self._session.due_in_s(now_s)

    def _say_hello(self, now_s: float) -> float:
        if now_s >= self._hello_s and not self._dismissed:
            self._hello_s = now_s + HEARTBEAT_S
            hello = dataclasses.replace(self._hello, generation=self.generation)
            self._put(loose(hello.instance, hello.generation, "", hello))
        return max(0.0, self._hello_s - now_s) if not self._dismissed else HEARTBEAT_S

    def _on_monitor(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._down_s = None
            self._hello_s = 0.0
        elif event == zmq.EVENT_DISCONNECTED:
            self._down_s = self._clock()
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            log.warning("the router does not accept this worker's key; is its public half in the router's workers/?")

    def _put(self, frame: bytes) -> None:
        send_now(self._socket, [frame])
