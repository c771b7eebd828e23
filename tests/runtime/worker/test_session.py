"""A session delivers everything once and in order over a link that drops, doubles and reorders."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpd.runtime.worker.messages import HEARTBEAT_S, LOST_AFTER_S, Message, Refused, WireError, encode_body, unpack
from trtpd.runtime.worker.session import GAP_AFTER_S, UNACKED_LIMIT, WINDOW, Session, fresh_id


def texts(messages: list[Message]) -> list[str]:
    return [message.reason for message in messages if isinstance(message, Refused)]


@dataclass
class Side:
    """One end, the frames on their way to it, and what it was given and delivered."""

    session: Session
    inbound: list[bytes] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)


class Wire:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.sides = [Side(session()), Side(session())]

    def send(self, side: int) -> None:
        own, peer = self.sides[side], self.sides[1 - side]
        text = f"{side}:{len(own.given)}"
        own.given.append(text)
        peer.inbound.append(own.session.send(*encode_body(Refused(reason=text))))

    def deliver(self, side: int, index: int, *, keep: bool) -> None:
        own, peer = self.sides[side], self.sides[1 - side]
        if own.inbound:
            index %= len(own.inbound)
            frame = own.inbound[index] if keep else own.inbound.pop(index)
            messages, replies = own.session.receive(unpack(frame), self.now_s)
            own.delivered += texts(messages)
            peer.inbound += replies

    def drop(self, side: int, index: int) -> None:
        if self.sides[side].inbound:
            self.sides[side].inbound.pop(index % len(self.sides[side].inbound))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for own, peer in (self.sides, self.sides[::-1]):
            peer.inbound += own.session.due(self.now_s)

    def settle(self) -> None:
        """A while without faults."""
        for _ in range(12):
            self.pass_time(HEARTBEAT_S)
            while any(side.inbound for side in self.sides):
                self.deliver(0, 0, keep=False)
                self.deliver(1, 0, keep=False)


def session(now_s: float = 0.0) -> Session:
    return Session(instance="i", generation="g", epoch="e", now_s=now_s)


def frames(sender: Session, count: int) -> list[bytes]:
    return [sender.send(*encode_body(Refused(reason=str(n)))) for n in range(count)]


SIDES = st.integers(0, 1)
INDEXES = st.integers(0, 1000)
ACTIONS = st.one_of(
    st.tuples(st.just("send"), SIDES),
    st.tuples(st.just("deliver"), SIDES, INDEXES, st.booleans()),
    st.tuples(st.just("drop"), SIDES, INDEXES),
    st.tuples(st.just("time"), st.sampled_from([0.01, GAP_AFTER_S, HEARTBEAT_S])),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=120))
def test_everything_arrives_once_and_in_order_whatever_the_link_does(actions):
    wire = Wire()
    for action in actions:
        match action:
            case ("send", side):
                wire.send(side)
            case ("deliver", side, index, keep):
                wire.deliver(side, index, keep=keep)
            case ("drop", side, index):
                wire.drop(side, index)
            case ("time", seconds):
                wire.pass_time(seconds)
        for side, peer in (wire.sides, wire.sides[::-1]):
            assert side.delivered == peer.given[: len(side.delivered)]
    wire.settle()
    assert wire.sides[0].delivered == wire.sides[1].given
    assert wire.sides[1].delivered == wire.sides[0].given


def test_a_lost_last_message_is_noticed_by_the_next_heartbeat():
    wire = Wire()
    wire.send(0)
    wire.drop(1, 0)
    wire.settle()
    assert wire.sides[1].delivered == ["0:0"]
    assert wire.sides[0].session.resent == 1


def test_nothing_is_sent_again_while_nothing_is_missing():
    wire = Wire()
    for _ in range(20):
        wire.send(0)
        wire.settle()
    assert wire.sides[0].session.resent == 0


def test_a_peer_silent_for_too_long_is_lost_and_one_that_beats_is_not():
    quiet, beating = session(), session()
    heartbeat = session().due(0.0)[0]
    beating.receive(unpack(heartbeat), LOST_AFTER_S)
    assert "silent" in (quiet.lost(LOST_AFTER_S + 0.1) or "")
    assert beating.lost(LOST_AFTER_S + 0.1) is None


def test_silence_while_this_process_did_not_listen_is_excused():
    paused = session()
    paused.excuse(10.0)
    assert paused.lost(10.0 + LOST_AFTER_S - 0.1) is None
    assert paused.lost(10.0 + LOST_AFTER_S + 0.1) is not None


def test_a_peer_that_never_acknowledges_is_lost_before_memory_is():
    sender = session()
    frames(sender, UNACKED_LIMIT)
    assert sender.lost(0.0) is None
    frames(sender, 1)
    assert "unacknowledged" in (sender.lost(0.0) or "")


def test_numbers_far_ahead_are_not_stored():
    receiver, sender = session(), session()
    sent = frames(sender, WINDOW + 1)
    assert receiver.receive(unpack(sent[WINDOW]), 0.0) == ([], [])
    delivered = [m for frame in sent[:WINDOW] for m in receiver.receive(unpack(frame), 0.0)[0]]
    assert texts(delivered) == [str(n) for n in range(WINDOW)]


def test_a_numbered_message_that_makes_no_sense_raises():
    with pytest.raises(WireError):
        session().receive(unpack(session().send("Nonsense", b"\x90")), 0.0)


def test_ids_made_later_sort_behind_earlier_ones():
    assert fresh_id(1_000, "ff") < fresh_id(2_000, "00") < fresh_id(1_800_000_000_000_000_000, "00")
