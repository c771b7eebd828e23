import msgspec
import pytest
from trtpd_testing.kv import LAYOUT, Clock

from trtpd.errors import InternalError, TransferError
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.offer import OPAQUE_LIMIT_BYTES, decode_offer, encode
from trtpd.kv_transfer.opaque import OpaqueSink, OpaqueSource

KEY = (1, 1)
STATE = b"\x00state of the engine\xff"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def source(clock):
    settings = TransferSettings(instance="prefill_0", generation="g", lease_s=10.0)
    return OpaqueSource(LAYOUT, settings, state_of={KEY: STATE}.__getitem__, clock=clock)


@pytest.fixture
def sink():
    return OpaqueSink(LAYOUT)


def test_the_engines_state_crosses_the_wire_as_it_is_and_nothing_is_copied(source, sink):
    offer = decode_offer(encode(source.offer(KEY, prompt_tokens=9, blocks=())))
    assert (offer.opaque, offer.blocks, offer.transport) == (STATE, (), "opaque")
    sink.begin(offer, ())
    assert sink.busy()
    assert sink.state(KEY) == STATE
    sink.ready(source.publish(KEY, ready_tokens=4))
    sink.sealed(source.seal(KEY, first_token=7, first_log_prob=None, seed=0))
    (result,) = sink.progress()
    assert (result.error, result.bytes_moved, result.path) == (None, 0, "opaque")
    assert not sink.busy()


def test_whoever_waits_is_woken_when_a_pull_has_ended(source):
    woken: list[bool] = []
    sink = OpaqueSink(LAYOUT, wake=lambda: woken.append(True))
    sink.begin(source.offer(KEY, prompt_tokens=9, blocks=()), ())
    sink.sealed(source.seal(KEY, first_token=7, first_log_prob=None, seed=0))
    assert woken == [True]


@pytest.mark.parametrize("state", [b"", bytes(OPAQUE_LIMIT_BYTES + 1)], ids=["empty", "too long"])
def test_a_state_that_is_too_long_or_empty_is_refused(state):
    settings = TransferSettings(instance="prefill_0", generation="g")
    source = OpaqueSource(LAYOUT, settings, state_of=lambda key: state)
    with pytest.raises(TransferError, match="bytes of hand-off state"):
        source.offer(KEY, prompt_tokens=9, blocks=())


def test_blocks_are_none_of_its_business(source, sink):
    with pytest.raises(InternalError, match="moves its KV itself"):
        source.offer(KEY, prompt_tokens=9, blocks=(1,))
    offer = source.offer(KEY, prompt_tokens=9, blocks=())
    with pytest.raises(InternalError, match="moves its KV itself"):
        sink.begin(offer, (1,))


def test_an_offer_of_another_transport_or_without_state_is_refused(source, sink):
    offer = source.offer(KEY, prompt_tokens=9, blocks=())
    for wrong in ({"transport": "shm"}, {"opaque": b""}):
        with pytest.raises(TransferError):
            sink.begin(msgspec.structs.replace(offer, **wrong), ())


def test_a_hold_lapses_only_after_its_seal_and_ends_once(source, clock):
    source.offer(KEY, prompt_tokens=9, blocks=())
    clock.now_s += 100
    assert source.lapsed(clock.now_s) == []
    source.seal(KEY, first_token=7, first_log_prob=None, seed=0)
    assert source.holds() == {KEY: LAYOUT.blocks_for(9)}
    assert source.lapsed(clock.now_s + 10) == [KEY]
    assert source.holds() == {}
    assert not source.end(KEY)


def test_misuse_is_a_bug_of_the_caller(source, sink):
    offer = source.offer(KEY, prompt_tokens=9, blocks=())
    with pytest.raises(InternalError, match="already"):
        source.offer(KEY, prompt_tokens=9, blocks=())
    sink.begin(offer, ())
    with pytest.raises(InternalError, match="already"):
        sink.begin(offer, ())
    source.seal(KEY, first_token=7, first_log_prob=None, seed=0)
    with pytest.raises(InternalError, match="sealed"):
        source.publish(KEY, ready_tokens=4)


def test_aborted_and_closed_pulls_are_reported(source, sink):
    offer = source.offer(KEY, prompt_tokens=9, blocks=())
    sink.begin(offer, ())
    sink.abort(KEY)
    sink.abort(KEY)
    assert [result.code for result in sink.progress()] == ["aborted"]
    sink.begin(offer, ())
    sink.close()
    assert [result.code for result in sink.progress()] == ["aborted"]
