"""The control plane between router and leaders. Here the router's end; the leader's is in leader_link.py.

Each end has a thread of its own, so heartbeats go out while its owner computes, and hands over what came in
through a queue the owner drains in its thread, after `wake`. A leader says Hello until it is welcomed; from
then on both speak in a session. Whoever finds the session broken ends it, and the leader registers again
under a new generation, having dropped the session's work.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from trtpd.runtime.core import events as core
from trtpd.runtime.worker.messages import (
    HEARTBEAT_S,
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
    pack,
    step_events,
    unpack,
)
from trtpd.runtime.worker.session import Session
from trtpd.runtime.worker.sockets import SocketThread, bind, connect, open_socket, send_now

log = logging.getLogger(__name__)

LISTEN_GAP_S = 2 * HEARTBEAT_S

Clock = Callable[[], float]


class Ear:
    """Notices when this process itself did not listen (stopped, starved), so that peers aren't blamed."""

    def __init__(self, now_s: float) -> None:
        self._last_s = now_s

    def unheard_s(self, now_s: float) -> float:
        gap_s, self._last_s = now_s - self._last_s, now_s
        return gap_s if gap_s > LISTEN_GAP_S else 0.0


def process_of(generation: str) -> str:
    """The part that all registrations of one process share."""
    return generation.partition(".")[0]


def loose(instance: str, generation: str, epoch: str, message: Message) -> bytes:
    """The frame of a message outside any session."""
    kind, body = encode_body(message)
    return pack(
        Envelope(
            instance=instance,
            generation=generation,
            epoch=epoch,
            seq=0,
            ack=0,
            kind=kind,
            body=msgspec.Raw(body),
        )
    )


@dataclass(slots=True)
class _Peer:
    """A registered leader as the router's thread knows it."""

    route: bytes
    session: Session


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A registered leader, for status and metrics."""

    instance: str
    generation: str
    busy_s: float
    resent: int


@dataclass(slots=True)
class _Told:
    """What the driver has been told, so that its commands go to the generation it decided for."""

    generations: dict[str, str] = field(default_factory=dict)

    def note(self, event: core.Event) -> None:
        if isinstance(event, core.Hello):
            self.generations[event.instance] = event.generation
        elif isinstance(event, core.Lost) and self.generations.get(event.instance) == event.generation:
            del self.generations[event.instance]


class RouterLink:
    """The router's end. `drain`, `send`, `check` and `close` belong to the driver's thread.

    `wake` is called from the link's thread when `drain` has something; an asyncio driver gives
    `lambda: loop.call_soon_threadsafe(on_link)`. It is called too when that thread has failed: `check` says why.
    `epoch` comes from `session.fresh_id`; `address` is where it listens, a port chosen by the system included.
    """

    def __init__(
        self,
        address: str,
        *,
        epoch: str,
        wake: Callable[[], None],
        keys: Path | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Binds. Raises ServeError when the address is taken, not allowed, or the keys can't be read."""
        self.epoch = epoch
        self.malformed = 0
        self._wake = wake
        self._clock = clock
        self._events: collections.deque[core.Event] = collections.deque()
        self._told = _Told()
        self._peers: dict[str, _Peer] = {}
        self._lost: dict[str, str] = {}
        self._ear = Ear(clock())
        self._context = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER)
        try:
            self._authenticator = bind(self._socket, address, keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = SocketThread(
            self._socket,
            name="link-router",
            on_frames=self._on_frames,
            on_item=self._on_item,
            on_time=self._on_time,
            on_failure=wake,
        )

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> Iterator[core.Event]:
        """Hello, Step and Lost since the last call, in order. Take one, let the core handle it, send its
        commands, then take the next: `send` addresses the generation last taken."""
        while self._events:
            event = self._events.popleft()
            self._told.note(event)
            yield event

    def send(self, instance: str, message: Work) -> bool:
        """Sends work to an instance. False if it is not there (its Lost has been drained). Raises WireError
        when the message is too long, and then nothing was sent."""
        generation = self._told.generations.get(instance)
        if generation is None:
            return False
        kind, body = encode_body(message)
        self._thread.post((instance, generation, kind, body))
        return True

    def peers(self) -> list[PeerStatus]:
        """Who is registered now."""
        return [
            PeerStatus(
                instance=name,
                generation=peer.session.generation,
                busy_s=peer.session.peer_busy_s,
                resent=peer.session.resent,
            )
            for name, peer in sorted(self._peers.copy().items())
        ]

    def check(self) -> None:
        """Raises InternalError if the link's thread has stopped."""
        self._thread.check()

    def close(self) -> None:
        """Hangs up; leaders drop this epoch's work by themselves. Idempotent."""
        self._thread.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()

    def _on_item(self, item: tuple[str, str, str, bytes]) -> None:
        instance, generation, kind, body = item
        peer = self._peers.get(instance)
        if peer is not None and peer.session.generation == generation:
            self._put(peer.route, peer.session.send(kind, body))

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            route, frame = frames
            self._on_envelope(route, unpack(frame))
        except (WireError, ValueError) as error:
            self.malformed += 1
            log.warning("dropped a frame: %s", error)

    def _on_envelope(self, route: bytes, envelope: Envelope) -> None:
        if envelope.seq == 0 and envelope.kind == "Hello":
            hello = decode_body("Hello", envelope.body)
            assert isinstance(hello, core.Hello)
            if (hello.instance, hello.generation) != (envelope.instance, envelope.generation):
                raise WireError(f"a Hello of {hello.instance!r} in an envelope of {envelope.instance!r}")
            self._on_hello(route, hello)
        elif envelope.seq == 0 and envelope.kind == "Lost":
            lost = decode_body("Lost", envelope.body)
            assert isinstance(lost, core.Lost)
            self._on_death(lost)
        else:
            self._on_session(route, envelope)

    def _on_hello(self, route: bytes, hello: core.Hello) -> None:
        """Welcomes it; a newer generation takes the place of an older one, never the other way round."""
        name, generation = hello.instance, hello.generation
        peer = self._peers.get(name)
        if self._lost.get(name) == generation:
            return self._answer(route, name, generation, Reregister())
        if peer is not None and peer.session.generation > generation:
            return self._refuse(route, name, generation, peer.session.generation)
        if peer is None or peer.session.generation != generation:
            if peer is not None:
                self._give_up(name, "registered again")
                self._refuse(peer.route, name, peer.session.generation, generation)
            session = Session(instance=name, generation=generation, epoch=self.epoch, now_s=self._clock())
            self._peers[name] = _Peer(route, session)
            self._receive(hello)
        self._peers[name].route = route
        self._answer(route, name, generation, Welcome(epoch=self.epoch))

    def _on_death(self, lost: core.Lost) -> None:
        """A leader or its stage model says that it is gone; all generations of that process are meant."""
        peer = self._peers.get(lost.instance)
        if peer is not None and process_of(peer.session.generation) == process_of(lost.generation):
            self._give_up(lost.instance, lost.reason)

    def _on_session(self, route: bytes, envelope: Envelope) -> None:
        name = envelope.instance
        peer = self._peers.get(name)
        ours = (peer.session.generation, self.epoch) if peer is not None else None
        if peer is None or ours != (envelope.generation, envelope.epoch):
            if peer is not None and peer.session.generation > envelope.generation:
                return self._refuse(route, name, envelope.generation, peer.session.generation)
            return self._answer(route, name, envelope.generation, Reregister())
        peer.route = route
        try:
            messages, replies = peer.session.receive(envelope, self._clock())
            steps = [self._step(peer.session, message) for message in messages]
        except WireError as error:
            if envelope.seq:
                self._give_up(name, f"its messages can't be understood: {error}")
            raise
        for reply in replies:
            self._put(route, reply)
        for step in steps:
            self._receive(step)

    def _step(self, session: Session, message: Message) -> core.Step:
        if not isinstance(message, StepMessage):
            raise WireError(f"a leader sent a {type(message).__name__}")
        return core.Step(
            instance=session.instance,
            generation=session.generation,
            events=step_events(message),
            load=message.load,
        )

    def _on_time(self) -> float:
        now_s = self._clock()
        unheard_s = self._ear.unheard_s(now_s)
        wait_s = HEARTBEAT_S
        for name, peer in list(self._peers.items()):
            peer.session.excuse(unheard_s)
            reason = peer.session.lost(now_s)
            if reason is not None:
                self._give_up(name, reason)
                continue
            for frame in peer.session.due(now_s):
                self._put(peer.route, frame)
            wait_s = min(wait_s, peer.session.due_in_s(now_s))
        return wait_s

    def _give_up(self, name: str, reason: str) -> None:
        generation = self._peers.pop(name).session.generation
        self._lost[name] = generation
        self._receive(core.Lost(instance=name, generation=generation, reason=reason))

    def _receive(self, event: core.Event) -> None:
        self._events.append(event)
        self._wake()

    def _refuse(self, route: bytes, name: str, generation: str, newer: str) -> None:
        if process_of(generation) != process_of(newer):
            reason = f"another process is registered as {name!r} (generation {newer}, this one {generation})"
            self._answer(route, name, generation, Refused(reason=reason))

    def _answer(self, route: bytes, name: str, generation: str, message: Message) -> None:
        self._put(route, loose(name, generation, self.epoch, message))

    def _put(self, route: bytes, frame: bytes) -> None:
        send_now(self._socket, [route, frame])


def report_death(
    address: str,
    *,
    instance: str,
    generation: str,
    reason: str,
    keys: Path | None = None,
    wait_s: float = 1.0,
) -> None:
    """Tells the router that a leader's process has ended, sooner than its silence would. For its stage model.

    Blocks up to `wait_s`; without an answering router nothing happens.
    """
    with zmq.Context() as context, open_socket(context, zmq.DEALER) as socket:
        connect(socket, address, keys)
        lost = core.Lost(instance=instance, generation=generation, reason=reason)
        if socket.poll(int(wait_s * 1000), zmq.POLLOUT):
            send_now(socket, [loose(instance, generation, "", lost)])
