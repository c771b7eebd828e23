"""Router and leaders find each other, know each other's generation, and notice when the other is gone."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from trtpd.errors import ServeError
from trtpd.runtime.core import events as core
from trtpd.runtime.worker import sockets
from trtpd.runtime.worker.leader_link import Dismissed, LeaderLink, Registered, SessionEnded
from trtpd.runtime.worker.link import RouterLink, loose, report_death
from trtpd.runtime.worker.messages import CancelWork, Envelope, Heartbeat, pack, step_message

LOAD = core.Load(kv_blocks_free=8)


def hello(generation: str = "0001-a", instance: str = "decode_0") -> core.Hello:
    return core.Hello(
        instance=instance,
        generation=generation,
        role="decode",
        model="m",
        fingerprint="f",
        pairing_key="p",
        host="h",
        kv_blocks=8,
        tokens_per_block=4,
        max_seq_tokens=32,
        max_batch=4,
        bytes_per_token=16,
        prefill_tokens_per_s=100.0,
        transports=("shm",),
    )


class Links:
    """Opens links for one test and keeps what each has heard."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tl-"))
        self.address = f"ipc://{self.folder}/router"
        self.opened: list[RouterLink | LeaderLink] = []
        self.heard: dict[int, list[object]] = {}

    def router(self, epoch: str = "e1", **options):
        return self._open(RouterLink(self.address, epoch=epoch, wake=lambda: None, **options))

    def leader(self, generation: str = "0001-a", **options):
        return self._open(LeaderLink(hello(generation), self.address, wake=lambda: None, **options))

    def _open(self, link):
        self.opened.append(link)
        self.heard[id(link)] = []
        link.start()
        return link

    def until(self, link, kind, count=1, timeout_s=10.0):
        """What `link` has heard of `kind`, once that is at least `count`."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            link.check()
            self.heard[id(link)] += link.drain()
            found = [item for item in self.heard[id(link)] if isinstance(item, kind)]
            if len(found) >= count:
                return found
            time.sleep(0.005)
        raise AssertionError(f"no {count} x {kind.__name__} among {self.heard[id(link)]}")

    def close(self) -> None:
        for link in self.opened:
            link.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def links():
    opened = Links()
    yield opened
    opened.close()


def test_a_leader_registers_and_messages_pass_both_ways_in_order(links):
    leader, router = links.leader(), links.router()
    assert links.until(router, core.Hello) == [hello()]
    (registered,) = links.until(leader, Registered)
    assert registered == Registered("e1", "0001-a")
    for index in range(50):
        event = core.Drained(request_id=index, attempt=1)
        leader.send(step_message([event], LOAD), registered.generation)
        assert router.send("decode_0", CancelWork(request_id=index, attempt=1))
    steps = links.until(router, core.Step, 50)
    assert [step.events[0].request_id for step in steps] == list(range(50))
    assert [c.request_id for c in links.until(leader, CancelWork, 50)] == list(range(50))
    assert [peer.instance for peer in router.peers()] == ["decode_0"]


def test_a_new_router_makes_leaders_drop_the_old_epoch_and_register_anew(links):
    router, leader = links.router("e1"), links.leader()
    links.until(router, core.Hello)
    links.until(leader, Registered)
    router.close()
    successor = links.router("e2")
    (greeting,) = links.until(successor, core.Hello)
    assert greeting.generation > "0001-a"
    assert links.until(leader, Registered, 2)[1] == Registered("e2", greeting.generation)
    (ended,) = links.until(leader, SessionEnded)
    assert ended.generation == "0001-a"
    kinds = [type(item) for item in links.heard[id(leader)]]
    assert kinds == [Registered, SessionEnded, Registered]


def test_a_message_of_an_ended_session_reaches_nobody(links):
    router, leader = links.router("e1"), links.leader()
    links.until(leader, Registered)
    router.close()
    successor = links.router("e2")
    new = links.until(leader, Registered, 2)[1]
    leader.send(step_message([core.Drained(request_id=1, attempt=1)], LOAD), "0001-a")
    leader.send(step_message([core.Drained(request_id=2, attempt=1)], LOAD), new.generation)
    (step,) = links.until(successor, core.Step)
    assert step.events == (core.Drained(request_id=2, attempt=1),)


def test_a_leader_that_hangs_up_is_lost_once_and_at_once(links):
    router, leader = links.router(), links.leader()
    links.until(leader, Registered)
    leader.close("stopping")
    (lost,) = links.until(router, core.Lost)
    assert lost == core.Lost(instance="decode_0", generation="0001-a", reason="stopping")
    assert not router.send("decode_0", CancelWork(request_id=1, attempt=1))


def test_a_silent_leader_is_lost(links):
    router = links.router()
    stranger = zmq.Context()
    with stranger.socket(zmq.DEALER) as socket:
        socket.connect(links.address)
        socket.send(loose("decode_0", "0001-a", "", hello()))
        (lost,) = links.until(router, core.Lost)
    stranger.term()
    assert "silent" in lost.reason


def test_a_stage_model_reports_its_leader_dead_sooner_than_silence_would(links):
    router, leader = links.router(), links.leader()
    links.until(leader, Registered)
    report_death(links.address, instance="decode_0", generation="0001-a", reason="exit 137")
    (lost,) = links.until(router, core.Lost)
    assert lost.reason == "exit 137"
    again = links.until(router, core.Hello, 2)[1]
    assert again.generation > lost.generation


def test_a_report_about_a_former_process_changes_nothing(links):
    router, leader = links.router(), links.leader("0002-b")
    links.until(leader, Registered)
    report_death(links.address, instance="decode_0", generation="0001-a", reason="exit 137")
    leader.send(step_message([], LOAD), "0002-b")
    links.until(router, core.Step)
    assert not [item for item in links.heard[id(router)] if isinstance(item, core.Lost)]


def test_a_newer_process_takes_the_name_over_and_the_older_is_dismissed(links):
    router, old = links.router(), links.leader("0001-a")
    links.until(old, Registered)
    new = links.leader("0002-b")
    links.until(new, Registered)
    links.until(router, core.Hello, 2)
    order = [(type(item), item.generation) for item in links.heard[id(router)]]
    assert order == [(core.Hello, "0001-a"), (core.Lost, "0001-a"), (core.Hello, "0002-b")]
    (dismissed,) = links.until(old, Dismissed)
    assert "decode_0" in dismissed.reason


def test_an_older_process_can_not_take_the_name_of_a_living_newer_one(links):
    router, new = links.router(), links.leader("0002-b")
    links.until(new, Registered)
    old = links.leader("0001-a")
    links.until(old, Dismissed)
    assert [peer.generation for peer in router.peers()] == ["0002-b"]
    assert not [item for item in links.heard[id(new)] if isinstance(item, SessionEnded)]


def test_work_decided_for_a_generation_does_not_reach_its_successor(links):
    router, old = links.router(), links.leader("0001-a")
    links.until(router, core.Hello)
    links.until(old, Registered)
    new = links.leader("0002-b")
    links.until(new, Registered)
    assert router.send("decode_0", CancelWork(request_id=1, attempt=1))
    links.until(router, core.Hello, 2)
    assert router.send("decode_0", CancelWork(request_id=2, attempt=1))
    assert links.until(new, CancelWork) == [CancelWork(request_id=2, attempt=1)]


def test_junk_is_counted_and_harms_nobody(links):
    router, leader = links.router(), links.leader()
    links.until(leader, Registered)
    nonsense = Envelope(instance="decode_0", generation="9", epoch="x", seq=0, ack=0, kind="??", body=msgspec.Raw(b""))
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(links.address)
        for junk in (b"", b"\xc1", os.urandom(1000), pack(nonsense)[:-3]):
            socket.send(junk)
        socket.send_multipart([b"a", b"b", b"c"])
        socket.send(loose("decode_0", "other", "", hello()))
        socket.send(loose("decode_0", "0001-a", "e1", Heartbeat(sent=0)))
        while router.malformed < 6:
            time.sleep(0.005)
    context.term()
    leader.send(step_message([], LOAD), "0001-a")
    links.until(router, core.Step)


def test_a_leader_sending_an_event_that_makes_no_sense_is_given_up(links):
    router, leader = links.router(), links.leader()
    links.until(leader, Registered)
    bad = step_message([core.Drained(request_id=1, attempt=1)], LOAD)
    bad = msgspec.structs.replace(bad, events=(("Nonsense", bad.events[0][1]),))
    leader.send(bad, "0001-a")
    (lost,) = links.until(router, core.Lost)
    assert "understood" in lost.reason


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://0.0.0.0:5000", "not loopback"),
        ("tcp://*:5000", "not loopback"),
        ("tcp://10.1.2.3:5000", "not loopback"),
        ("tcp://127.0.0.1.example.org:5000", "not loopback"),
        ("tcp://localhost.example.org:5000", "not loopback"),
        ("tcp://127.0.0.1", "neither"),
        ("http://127.0.0.1:80", "neither"),
        ("ipc://", "path"),
        ("ipc:///" + "x" * 200, "shorter run directory"),
    ],
)
def test_an_address_that_is_open_or_impossible_is_refused(address, reason):
    with pytest.raises(ServeError, match=reason):
        RouterLink(address, epoch="e", wake=lambda: None)
    with pytest.raises(ServeError, match=reason):
        LeaderLink(hello(), address, wake=lambda: None)


def test_a_taken_address_is_named(links):
    links.address = "tcp://127.0.0.1:*"
    links.address = links.router().address
    with pytest.raises(ServeError, match=links.address):
        links.router()


def test_with_keys_only_holders_of_an_authorised_key_get_through(links):
    keys, strange_keys = links.folder / "keys", links.folder / "strange"
    sockets.make_keys(keys)
    sockets.make_keys(strange_keys)
    shutil.copy(keys / "router.key", strange_keys / "router.key")
    links.address = "tcp://127.0.0.1:*"
    router = links.router(keys=keys)
    links.address = router.address
    bare, strange = links.leader("0001-a"), links.leader("0002-b", keys=strange_keys)
    known = links.leader("0003-c", keys=keys)
    links.until(known, Registered)
    leaders = [leader.registered for leader in (bare, strange, known)]
    assert (leaders, links.until(router, core.Hello)) == ([False, False, True], [hello("0003-c")])
    assert (keys / "router.key_secret").stat().st_mode & 0o077 == 0


def test_keys_are_never_overwritten_and_missing_ones_are_named(links):
    keys = links.folder / "keys"
    sockets.make_keys(keys)
    with pytest.raises(ServeError, match="holds keys already"):
        sockets.make_keys(keys)
    (keys / "worker.key_secret").unlink()
    with pytest.raises(ServeError, match=r"worker\.key_secret"):
        links.leader(keys=keys)
