"""The hand-off of a TensorRT-LLM executor as bytes: bounded whoever sent them."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing import tensorrt

from trtpd.errors import EngineError, TransferError
from trtpd.kv_transfer.offer import OPAQUE_LIMIT_BYTES
from trtpd.runtime.engine.tensorrt_llm.compiled import ParamsCodec
from trtpd.runtime.engine.tensorrt_llm.hand_off import STATE_LIMIT_BYTES, HandOff, decode, encode

HAND_OFF = HandOff(version="1.2.1", first_gen_tokens=(7,), req_id=3, opaque_state=b"state")


@settings(max_examples=40)
@given(
    st.integers(0, (1 << 31) - 1),
    st.integers(0, (1 << 64) - 1),
    st.binary(min_size=1, max_size=40),
    st.none() | st.lists(st.integers(0, 1000), max_size=6).map(tuple),
    st.none() | st.integers(0, 65536),
    st.none() | st.text(max_size=12),
)
def test_a_hand_off_arrives_as_it_was(token, req_id, state, drafts, dp_rank, endpoint):
    hand_off = HandOff(
        version="1.2.1",
        first_gen_tokens=(token,),
        req_id=req_id,
        opaque_state=state,
        draft_tokens=drafts,
        ctx_dp_rank=dp_rank,
        disagg_info_endpoint=endpoint,
    )
    assert decode(encode(hand_off), version="1.2.1") == hand_off


def read_or_refused(data: bytes) -> bool:
    """Whether it is a whole hand-off, or is refused for good; anything else that is raised fails the test."""
    try:
        return bool(decode(data, version="1.2.1").opaque_state)
    except TransferError as error:
        return not error.retryable


@settings(max_examples=40)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_hand_off_or_refused(data):
    assert read_or_refused(data)


@settings(max_examples=40)
@given(st.data())
def test_a_hand_off_with_a_byte_changed_is_a_hand_off_or_refused(data):
    raw = bytearray(encode(HAND_OFF))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert read_or_refused(bytes(raw))


@pytest.mark.parametrize(
    "changes",
    [
        {"first_gen_tokens": ()},
        {"first_gen_tokens": (1, 2)},
        {"first_gen_tokens": (-1,)},
        {"req_id": -1},
        {"opaque_state": b""},
        {"opaque_state": bytes(STATE_LIMIT_BYTES + 1)},
        {"draft_tokens": (0,) * 257},
        {"disagg_info_endpoint": "x" * 513},
    ],
    ids=str,
)
def test_what_breaks_a_bound_is_refused_on_either_side(changes):
    wrong = msgspec.structs.replace(HAND_OFF, **changes)
    with pytest.raises(TransferError, match="this executor's"):
        encode(wrong)
    with pytest.raises(TransferError, match="the offer's"):
        decode(msgspec.msgpack.encode(wrong), version="1.2.1")


def test_the_largest_state_fits_into_an_offer():
    data = encode(msgspec.structs.replace(HAND_OFF, opaque_state=bytes(STATE_LIMIT_BYTES)))
    assert len(data) <= OPAQUE_LIMIT_BYTES


def test_another_version_is_refused_by_name():
    with pytest.raises(TransferError, match=r"'1\.2\.1' and this is 1\.2\.0"):
        decode(encode(HAND_OFF), version="1.2.0")


def test_a_hand_off_without_state_can_not_be_fetched():
    with pytest.raises(TransferError, match="first token"):
        decode(encode(msgspec.structs.replace(HAND_OFF, opaque_state=None)), version="1.2.1")


@pytest.mark.parametrize(("version", "arguments"), [("1.0.0", 4), ("1.2.1", 4), ("1.3.0", 6)])
def test_params_of_either_form_are_written_and_read_back(tmp_path: Path, version: str, arguments: int) -> None:
    with tensorrt.installed(tmp_path, version=version):
        codec = ParamsCodec(importlib.import_module("tensorrt_llm.bindings.executor"), version)
        assert codec.arguments == arguments
        hand_off = msgspec.structs.replace(HAND_OFF, version=version, draft_tokens=(4, 5))
        if arguments == 6:
            hand_off = msgspec.structs.replace(hand_off, ctx_dp_rank=1, disagg_info_endpoint="tcp://ctx:1")
        assert codec.read(codec.write(hand_off)) == hand_off


def test_params_of_an_unknown_form_are_refused():
    class Bindings:
        @staticmethod
        def ContextPhaseParams(one, two, three, four, five):
            """Of five arguments."""

    with pytest.raises(EngineError, match="neither four nor six"):
        ParamsCodec(Bindings, "9.9")
