"""One side of a session between router and leader: numbered, in order, once. No sockets, no clock.

The receiver drives repair: it sees a gap in the numbers, or learns from a heartbeat that more was sent than
came, and asks for what is missing until it has it. The sender keeps every message until it is acknowledged.
So over a link that drops, doubles and reorders, everything arrives once and in order, or the peer is lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from trtpd.runtime.worker.messages import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    Envelope,
    Heartbeat,
    Message,
    Resend,
    decode_body,
    encode_body,
    pack,
)

GAP_AFTER_S = 0.05
WINDOW = 4096
UNACKED_LIMIT = 65536


def fresh_id(now_ns: int, salt: str) -> str:
    """A generation or epoch: sorts by age, and differs between two made in the same instant by `salt`."""
    return f"{now_ns:016x}-{salt}"


@dataclass(frozen=True, slots=True)
class Numbered:
    """A message in the numbering. `body` is its msgpack."""

    seq: int
    kind: str
    body: bytes


class Channel:
    """The numbering of one side. `sent`: the highest number given; `received`: the highest received in
    order."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self._unacked: OrderedDict[int, Numbered] = OrderedDict()
        self._ahead: dict[int, Numbered] = {}
        self._peer_sent = 0

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def gap(self) -> tuple[int, int] | None:
        """First and last number that the other side has sent and that is missing here."""
        if self._peer_sent <= self.received:
            return None
        last = min(self._peer_sent, self.received + WINDOW)
        above = [seq for seq in self._ahead if seq > self.received]
        return self.received + 1, min(above) - 1 if above else last

    def give(self, kind: str, body: bytes) -> Numbered:
        """Numbers a message and keeps it until `acknowledge`."""
        self.sent += 1
        message = Numbered(self.sent, kind, body)
        self._unacked[message.seq] = message
        return message

    def acknowledge(self, ack: int) -> None:
        """The other side has everything up to `ack`."""
        while self._unacked and next(iter(self._unacked)) <= ack:
            self._unacked.popitem(last=False)

    def announce(self, peer_sent: int) -> None:
        """The other side has given numbers up to `peer_sent`."""
        self._peer_sent = max(self._peer_sent, peer_sent)

    def take(self, message: Numbered) -> list[Numbered]:
        """What can now be delivered, in order. A number beyond the window is left to be sent again."""
        self.announce(message.seq)
        if not self.received < message.seq <= self.received + WINDOW:
            return []
        self._ahead[message.seq] = message
        delivered = []
        while (following := self._ahead.pop(self.received + 1, None)) is not None:
            self.received += 1
            delivered.append(following)
        return delivered

    def again(self, first: int, last: int) -> Iterator[Numbered]:
        """What is kept of the numbers asked for."""
        for seq in range(max(first, 1), min(last, self.sent, first + WINDOW) + 1):
            if seq in self._unacked:
                yield self._unacked[seq]


class Session:
    """One side of one session, in frames. The caller moves frames and tells the time.

    `busy_s` goes out with heartbeats; `peer_busy_s` came with the last one. Not thread-safe.
    """

    def __init__(self, *, instance: str, generation: str, epoch: str, now_s: float) -> None:
        self.instance = instance
        self.generation = generation
        self.epoch = epoch
        self.busy_s = 0.0
        self.peer_busy_s = 0.0
        self.resent = 0
        self._channel = Channel()
        self._heard_s = now_s
        self._beat_s = now_s
        self._gap_s: float | None = None

    def send(self, kind: str, body: bytes) -> bytes:
        """The frame of a message that must arrive."""
        frame = self._frame(self._channel.sent + 1, kind, body)
        self._channel.give(kind, body)
        return frame

    def loose(self, message: Message) -> bytes:
        """The frame of a message outside the numbering."""
        return self._frame(0, *encode_body(message))

    def receive(self, envelope: Envelope, now_s: float) -> tuple[list[Message], list[bytes]]:
        """(messages to act on, in order and once; frames to send back). The envelope must be of this session.

        Raises WireError for a body that can't be understood. In a numbered message that is the session's end:
        what it said is lost.
        """
        self._heard_s = now_s
        self._channel.acknowledge(envelope.ack)
        if envelope.seq:
            ready = self._channel.take(Numbered(envelope.seq, envelope.kind, bytes(envelope.body)))
            self._watch_gap(now_s)
            return [decode_body(message.kind, message.body) for message in ready], []
        message = decode_body(envelope.kind, envelope.body)
        if isinstance(message, Heartbeat):
            self.peer_busy_s = message.busy_s
            self._channel.announce(message.sent)
            self._watch_gap(now_s)
            return [], []
        if isinstance(message, Resend):
            again = [self._frame(m.seq, m.kind, m.body) for m in self._channel.again(message.first, message.last)]
            self.resent += len(again)
            return [], again
        return [message], []

    def due(self, now_s: float) -> list[bytes]:
        """Heartbeats and requests for missing numbers whose time has come."""
        frames = []
        if now_s >= self._beat_s:
            self._beat_s = now_s + HEARTBEAT_S
            frames.append(self.loose(Heartbeat(sent=self._channel.sent, busy_s=self.busy_s)))
        gap = self._channel.gap
        if gap is not None and self._gap_s is not None and now_s >= self._gap_s:
            self._gap_s = now_s + GAP_AFTER_S
            frames.append(self.loose(Resend(first=gap[0], last=gap[1])))
        return frames

    def due_in_s(self, now_s: float) -> float:
        """How long `due` will have nothing to say."""
        at_s = self._beat_s if self._gap_s is None else min(self._beat_s, self._gap_s)
        return max(0.0, at_s - now_s)

    def excuse(self, unheard_s: float) -> None:
        """This process did not listen for `unheard_s`: that silence was not the peer's."""
        self._heard_s += unheard_s

    def lost(self, now_s: float) -> str | None:
        """Why the peer must be given up, or None."""
        if now_s - self._heard_s > LOST_AFTER_S:
            return f"silent for {now_s - self._heard_s:.1f} s"
        if self._channel.unacked > UNACKED_LIMIT:
            return f"{self._channel.unacked} messages unacknowledged"
        return None

    def _watch_gap(self, now_s: float) -> None:
        if self._channel.gap is None:
            self._gap_s = None
        elif self._gap_s is None:
            self._gap_s = now_s + GAP_AFTER_S

    def _frame(self, seq: int, kind: str, body: bytes) -> bytes:
        envelope = Envelope(
            instance=self.instance,
            generation=self.generation,
            epoch=self.epoch,
            seq=seq,
            ack=self._channel.received,
            kind=kind,
            body=msgspec.Raw(body),
        )
        return pack(envelope)
