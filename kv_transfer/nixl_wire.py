"""What the two ends of a NIXL pair say to each other in notes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from trtpd.errors import TransferError
from trtpd.kv_transfer.asks import Check, Index, Number, Open, Renew, Status
from trtpd.kv_transfer.tcp_wire import REPLY

METADATA_LIMIT_BYTES = 1 << 16
NOTE_LIMIT_BYTES = 1 << 20
RUNS_LIMIT = 1 << 16
ARRAYS_LIMIT = 1 << 14
Address = Number


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of this transport: how the source's agent is reached, the token that lets in, and which machine it is."""

    machine: Annotated[str, Meta(max_length=256)]
    loopback: bool
    metadata: Annotated[bytes, Meta(max_length=METADATA_LIMIT_BYTES)]
    token: Annotated[bytes, Meta(min_length=16, max_length=64)]


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First ask: how the sink's agent is reached, and its memory."""

    metadata: Annotated[bytes, Meta(max_length=METADATA_LIMIT_BYTES)]
    opening: Open


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sink is done with this source."""


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks nothing: sending it shows whether the source lives."""


class Push(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Writes KV into the sink's memory, then answers OK; or answers NOT_HELD.

    Arrays and heads as the pool of that rank of the source counts them, both from first to before end. Runs are (first
    block of the source, first block of the sink, count). Block b of the n-th array goes to `into[n] + b * stride`.
    """

    request_id: Number
    attempt: Number
    tp_rank: Index
    pp_rank: Index
    first_array: Index
    end_array: Index
    first_head: Index
    end_head: Index
    runs: Annotated[tuple[tuple[Index, Index, Index], ...], Meta(max_length=RUNS_LIMIT)]
    into: Annotated[tuple[Address, ...], Meta(max_length=ARRAYS_LIMIT)]
    stride_bytes: Index


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One ask. `token` proves that the asker has read an offer; `number` pairs the answer with it."""

    token: Annotated[bytes, Meta(max_length=64)]
    number: Annotated[int, Meta(ge=0, lt=1 << 32)]
    ask: Join | Leave | Ping | Renew | Check | Push


_DECODER = msgspec.msgpack.Decoder(Note)


def pack_note(note: Note) -> bytes:
    """Raises TransferError for one that is too long."""
    data = msgspec.msgpack.encode(note)
    if len(data) > NOTE_LIMIT_BYTES:
        raise TransferError(f"a note of {len(data)} bytes is longer than {NOTE_LIMIT_BYTES}: use larger blocks")
    return data


def unpack_note(data: bytes) -> Note:
    """Raises TransferError for what is none."""
    if len(data) > NOTE_LIMIT_BYTES:
        raise TransferError(f"a note of {len(data)} bytes")
    try:
        note: Note = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"{len(data)} bytes are not a note: {error}") from error
    return note


def pack_answer(number: int, status: Status, data: bytes = b"") -> bytes:
    return REPLY.pack(number, status, len(data)) + data


def unpack_answer(note: bytes) -> tuple[int, Status, bytes]:
    """(number, status, data). Raises TransferError for what is none."""
    if len(note) < REPLY.size:
        raise TransferError(f"{len(note)} bytes are not an answer")
    number, status, size_bytes = REPLY.unpack_from(note)
    data = note[REPLY.size :]
    if status not in set(Status) or len(data) != size_bytes:
        raise TransferError(f"not an answer: {number}, {status}, {len(data)} bytes of {size_bytes}")
    return number, Status(status), data
