import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.kv import LAYOUT

from trtpd.errors import LayoutError, TransferError
from trtpd.kv_transfer.offer import (
    OPAQUE_LIMIT_BYTES,
    Chunk,
    Offer,
    Seal,
    decode_chunk,
    decode_message,
    decode_offer,
    decode_seal,
    encode,
)
from trtpd.kv_transfer.shm import ShmAddress

OFFER = Offer(
    request_id=1,
    attempt=2,
    generation="g",
    instance="prefill_0",
    transport="shm",
    layout=LAYOUT,
    prompt_tokens=6,
    blocks=(3, 1),
    epochs=(0, 7),
    address=b"",
    lease_s=10.0,
)
CHUNK = Chunk(request_id=1, attempt=2, ready_tokens=4, digests={0: (1, 2, (1 << 64) - 1)})
SEAL = Seal(request_id=1, attempt=2, prompt_tokens=6, first_token=9, first_log_prob=-1.5, seed=4, digests={1: (5,)})
DECODERS = (decode_offer, decode_chunk, decode_seal, lambda data: decode_message(data, ShmAddress))
LEAVES = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), v))


def accepts_or_refuses(data):
    for decode in DECODERS:
        with contextlib.suppress(TransferError):
            check_bounds(decode(data))


def check_bounds(message):
    """What a decoder let through keeps to the limits that its users rely on."""
    if isinstance(message, Offer):
        expected = 0 if message.transport == "opaque" else message.layout.blocks_for(message.prompt_tokens)
        assert len(message.blocks) == len(message.epochs) == expected
        assert all(block >= 0 for block in message.blocks)
        assert message.prompt_tokens >= 1
        assert 0 < message.lease_s < 1e9
        assert len(message.opaque) <= OPAQUE_LIMIT_BYTES
    elif isinstance(message, Chunk | Seal):
        assert min(message.request_id, message.attempt) >= 0
        assert all(0 <= word < 1 << 64 for words in message.digests.values() for word in words)


def changed(message, **fields):
    """The message's bytes with fields that its own type would not allow."""
    plain = msgspec.msgpack.decode(encode(message))
    return msgspec.msgpack.encode({**plain, **fields})


def test_messages_come_back_as_they_went():
    assert decode_offer(encode(OFFER)) == OFFER
    assert decode_chunk(encode(CHUNK)) == CHUNK
    assert decode_seal(encode(SEAL)) == SEAL


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_junk_is_refused_and_never_crashes(data):
    accepts_or_refuses(data)


@given(VALUES)
def test_well_formed_junk_is_refused_and_never_crashes(value):
    accepts_or_refuses(msgspec.msgpack.encode(value))


@settings(max_examples=300)
@given(
    st.sampled_from((encode(OFFER), encode(CHUNK), encode(SEAL))),
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=4),
    st.integers(0, 600),
)
def test_damaged_messages_are_refused_or_within_bounds(data, changes, cut):
    damaged = bytearray(data)
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    accepts_or_refuses(bytes(damaged[:cut]))


@given(st.sampled_from(Offer.__struct_fields__), LEAVES)
def test_an_offer_with_any_field_replaced_is_refused_or_within_bounds(field, value):
    accepts_or_refuses(changed(OFFER, **{field: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": -1},
        {"prompt_tokens": 0},
        {"prompt_tokens": 1 << 40},
        {"prompt_tokens": 100},
        {"blocks": [3]},
        {"blocks": [3, -1]},
        {"epochs": [0]},
        {"lease_s": 0.0},
        {"lease_s": float("inf")},
        {"lease_s": float("nan")},
        {"lease_s": 1e9},
        {"opaque": bytes(OPAQUE_LIMIT_BYTES + 1)},
        {"address": bytes(1 << 17)},
        {"generation": "g" * 300},
    ],
)
def test_an_offer_out_of_bounds_is_refused(fields):
    with pytest.raises(TransferError):
        decode_offer(changed(OFFER, **fields))


@pytest.mark.parametrize("sizes", [{"num_layers": 0}, {"head_dim": 1 << 40}, {"tp": 1 << 20}, {"dtype": "f8"}])
def test_an_impossible_layout_is_refused(sizes):
    layout = {**msgspec.to_builtins(LAYOUT), **sizes}
    with pytest.raises(TransferError):
        decode_offer(changed(OFFER, layout=layout))
    with pytest.raises(LayoutError):
        decode_offer(changed(OFFER, layout={**layout, "dtype": "f32", "num_layers": 1 << 20, "tp": 1}))


@pytest.mark.parametrize("digests", [{0: [-1]}, {-1: [1]}, {1 << 30: [1]}, {0: list(range(5000))}, {0: "text"}])
def test_digests_out_of_bounds_are_refused(digests):
    with pytest.raises(TransferError):
        decode_chunk(changed(CHUNK, digests=digests))
    with pytest.raises(TransferError):
        decode_seal(changed(SEAL, digests=digests))


def test_a_message_too_long_is_refused_unread():
    with pytest.raises(TransferError, match="at most"):
        decode_chunk(bytes((32 << 20) + 1))


def test_deep_nesting_is_refused():
    with pytest.raises(TransferError):
        decode_offer(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00")


def test_an_opaque_offer_has_no_blocks():
    opaque = msgspec.structs.replace(OFFER, transport="opaque", blocks=(), epochs=(), opaque=b"state")
    assert decode_offer(encode(opaque)) == opaque
