import sys
import threading

import msgspec
import numpy as np
import pytest
from trtpd_testing.kv import LAYOUT, make_group

from trtpd.errors import PeerGoneError, TransferError
from trtpd.kv_transfer.asks import Check, Open, Renew, Status
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.nixl import NixlSource
from trtpd.kv_transfer.nixl_agent import NixlAgent
from trtpd.kv_transfer.nixl_link import NixlLink, never
from trtpd.kv_transfer.nixl_wire import (
    Join,
    NixlAddress,
    Note,
    Push,
    pack_answer,
    pack_note,
    unpack_answer,
    unpack_note,
)

pytest.importorskip("nixl_cu12")

KEY = (1, 1)
OF, TO = [3, 4, 9, 1], [5, 6, 7, 2]
TOKENS = 14
TOKEN = bytes(32)


@pytest.fixture
def nixl(pairs):
    return pairs("nixl")


def address_of(offer):
    return msgspec.msgpack.decode(offer.address, type=NixlAddress)


def counters(pair):
    return pair.source._doors[0].server.counters


def wait_for(condition, agent=None):
    """Drives `agent` meanwhile: what it sends goes only then."""
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        if agent is not None:
            agent.notes()
        pause.wait(0.01)
    raise AssertionError("it has not come to pass")


@pytest.fixture
def stranger():
    agent = NixlAgent("stranger", "127.0.0.1")
    yield agent
    agent.close()


def link_of(pair, offer, **changes):
    return NixlLink(
        msgspec.structs.replace(address_of(offer), **changes),
        name="prefill_0",
        own_address="127.0.0.1",
        opening=Open(offer.generation, offer.layout.fingerprint),
        pools=pair.sink_pools,
        buffer=None,
    )


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"junk" * 1000, pack_note(Note(TOKEN, 1, Renew(1, 1)))])
def test_a_stranger_who_sends_junk_is_dropped_and_counted_and_harms_nobody(nixl, stranger, junk):
    offer = nixl.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    nixl.sink.begin(offer, TO)
    source = stranger.add(address_of(offer).metadata, who="prefill_0")
    stranger.tell(source, junk)
    wait_for(lambda: counters(nixl)["strangers"] == 1, stranger)
    nixl.seal(offer)
    assert nixl.result().error is None


def test_who_knows_the_token_but_has_not_joined_gets_nothing(nixl, stranger):
    offer = nixl.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    source = stranger.add(address_of(offer).metadata, who="prefill_0")
    stranger.tell(source, pack_note(Note(address_of(offer).token, 1, Renew(*KEY))))
    wait_for(lambda: counters(nixl)["lost"] == 1, stranger)
    assert nixl.source._doors[0].renewed_s(KEY) is None


def test_nobody_joins_under_the_name_of_another(nixl, stranger):
    offer = nixl.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    other = NixlAgent("other", "127.0.0.1")
    source = stranger.add(address_of(offer).metadata, who="prefill_0")
    join = Join(other.metadata(memory=False), Open(offer.generation, offer.layout.fingerprint))
    stranger.tell(source, pack_note(Note(address_of(offer).token, 1, join)))
    wait_for(lambda: counters(nixl)["bad_asks"] == 1, stranger)
    other.close()


def push(pair, blocks=((3, 0, 2),), *, rank=0, end_array=4, heads=(0, 3), arrays=4):
    grid = pair.to.grid
    into = tuple(grid.ctypes.data + i * grid.strides[0] for i in range(arrays))
    return Push(1, 1, rank, 0, 0, end_array, heads[0], heads[1], blocks, into, grid.strides[1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": ((3, 0, 3),)},  # block 5 is not held
        {"blocks": ((100, 0, 1),)},
        {"blocks": ()},
        {"rank": 1},
        {"end_array": 5},
        {"heads": (1, 4)},
        {"heads": (2, 1)},
        {"arrays": 3},
    ],
)
def test_nobody_is_sent_what_is_not_in_his_hold(nixl, wrong):
    offer = nixl.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    link = link_of(nixl, offer)
    with pytest.raises(TransferError, match="refused"):
        link.push(push(nixl, **wrong), timeout_s=10, interrupted=never)
    assert counters(nixl)["bad_asks"] == 1
    assert not nixl.to.grid.any()
    link.close()


def test_a_hold_that_is_over_is_neither_renewed_nor_sent(nixl):
    offer = nixl.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    link = link_of(nixl, offer)
    assert link.ask(Renew(*KEY), 0, never) == b""
    assert len(link.ask(Check(*KEY), 32, never) or b"") == 32
    nixl.source.end(KEY)
    assert link.ask(Renew(*KEY), 0, never) is None
    assert link.ask(Check(*KEY), 32, never) is None
    assert not link.push(push(nixl), timeout_s=10, interrupted=never)
    link.close()


def test_a_closed_source_is_gone_for_its_sinks():
    sinks, sources = make_group("sink", LAYOUT, "g"), make_group("source", LAYOUT, "g")
    source = NixlSource(sources, TransferSettings(instance="prefill_0", generation="g"))
    offer = source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    link = NixlLink(
        address_of(offer),
        name="prefill_0",
        own_address="127.0.0.1",
        opening=Open("g", LAYOUT.fingerprint),
        pools=sinks,
        buffer=None,
    )
    link.connect()
    source.close()
    wait_for(link.gone)
    with pytest.raises(PeerGoneError, match="prefill_0"):
        link.connect()
    for pool in (*sinks, *sources):
        pool.close()


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(TransferError, match=r"pip install '\.\[nixl\]'"):
        NixlAgent("nobody", "127.0.0.1")


def test_an_address_carries_no_right_to_write_into_the_source(nixl, stranger):
    offer = nixl.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    source = stranger.add(address_of(offer).metadata, who="prefill_0")
    own = nixl.to.grid
    stranger.register([(own.ctypes.data, nixl.to.kv_bytes)])
    piece = [[own.ctypes.data, 64, 0]], [[nixl.of.grid.ctypes.data, 64, 0]]
    before = nixl.of.grid.copy()
    with pytest.raises(TransferError):
        stranger.write(source, np.array(piece[0], np.uint64), np.array(piece[1], np.uint64), b"")
    assert (nixl.of.grid == before).all()


def test_answers_and_notes_survive_the_wire_and_junk_does_not():
    note = Note(TOKEN, 7, Check(1, 2))
    assert unpack_note(pack_note(note)) == note
    assert unpack_answer(pack_answer(7, Status.OK, b"x")) == (7, Status.OK, b"x")
    for junk in (b"", bytes(16) + b"x", b"\xff" * 16):
        with pytest.raises(TransferError):
            unpack_answer(junk)
