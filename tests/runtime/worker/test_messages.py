"""Frames that are ours come back as they went; frames that aren't raise WireError and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineRequest, RequestKind, Sampling
from trtpd.runtime.worker import messages
from trtpd.runtime.worker.messages import Envelope, WireError

LOAD = core.Load(kv_blocks_free=7, running=2, step_s=0.25)
EVENTS = (
    core.Offered(request_id=1, attempt=1, blocks=3, lease_s=2.0, offer=b"\x00offer"),
    core.ChunkReady(request_id=1, attempt=1, ready_tokens=64, chunk=b"c"),
    core.Sealed(request_id=1, attempt=1, first_index=0, token=5, log_prob=None, finish="stop", seal=b"s"),
    core.TransferBegun(request_id=2, attempt=1),
    core.TransferDone(request_id=2, attempt=1, bytes_moved=10, chunks=1, seconds=0.1, exposed_s=0.0, path="shm"),
    core.TransferFailed(request_id=3, attempt=2, code="lease_lost", reason="gone", retryable=False),
    core.Tokens(request_id=4, attempt=1, first_index=9, ids=(1, 2), log_probs=(-0.5, -1.5), finish="length"),
    core.Drained(request_id=5, attempt=1),
    core.Rejected(request_id=6, attempt=1, code="no_kv", reason="full"),
)
REQUEST = EngineRequest(
    request_id=9,
    attempt=2,
    kind=RequestKind.GENERATION_ONLY,
    prompt_ids=(1, 2, 3),
    max_tokens=5,
    sampling=Sampling(seed=7, end_ids=(2,)),
    first_index=1,
)


def envelope(kind: str = "StepMessage", body: bytes = b"\x90", seq: int = 3) -> Envelope:
    return Envelope(instance="decode_0", generation="g", epoch="e", seq=seq, ack=2, kind=kind, body=msgspec.Raw(body))


def test_a_step_brings_every_kind_of_event_through_unchanged():
    kind, body = messages.encode_body(messages.step_message(EVENTS, LOAD))
    received = messages.unpack(messages.pack(envelope(kind, body)))
    step = messages.decode_body(received.kind, received.body)
    assert isinstance(step, messages.StepMessage)
    assert (messages.step_events(step), step.load) == (EVENTS, LOAD)


@pytest.mark.parametrize(
    "message",
    [
        messages.SubmitWork(request=REQUEST, deadline_in_s=3.0),
        messages.PullWork(
            request_id=9,
            attempt=2,
            request=REQUEST,
            offer=b"o",
            chunks=(b"a", b"b"),
            seal=None,
            deadline_in_s=1.0,
        ),
        messages.DrainWork(),
        core.Lost(instance="decode_0", generation="g", reason="exit 137"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_commands_and_notices_come_back_equal(message):
    assert messages.decode_body(*messages.encode_body(message)) == message


@given(st.binary(max_size=200))
def test_junk_raises_a_wire_error_and_nothing_else(junk):
    with pytest.raises(WireError):
        messages.unpack(junk)


@given(st.sampled_from(sorted(messages.MESSAGE_TYPES)), st.binary(max_size=64))
def test_a_junk_body_is_decoded_or_refused_but_never_crashes(kind, junk):
    try:
        message = messages.decode_body(kind, junk)
    except WireError:
        return
    assert type(message).__name__ == kind


def test_a_truncated_frame_is_refused():
    frame = messages.pack(envelope(*messages.encode_body(messages.step_message(EVENTS, LOAD))))
    for length in range(len(frame)):
        with pytest.raises(WireError):
            messages.unpack(frame[:length])


def test_deeply_nested_junk_is_refused():
    with pytest.raises(WireError):
        messages.unpack(b"\x91" * 100_000)


def test_another_protocol_is_refused_with_the_mend():
    other = msgspec.structs.replace(envelope(), protocol=messages.PROTOCOL + 1)
    with pytest.raises(WireError, match="same trtpd version"):
        messages.unpack(messages.pack(other))


def test_a_message_beyond_the_limit_is_refused_before_it_is_sent():
    huge = messages.Refused(reason="x" * messages.LIMIT_BYTES)
    with pytest.raises(WireError, match="longer than"):
        messages.encode_body(huge)


def test_an_unknown_event_or_kind_is_refused():
    step = messages.StepMessage(events=(("Nonsense", msgspec.Raw(b"\x80")),), load=LOAD)
    with pytest.raises(WireError, match="Nonsense"):
        messages.step_events(step)
    with pytest.raises(WireError, match="Nonsense"):
        messages.decode_body("Nonsense", b"\x80")
