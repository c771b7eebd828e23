"""What the two ends of a TCP data connection say to each other.

Greeting: the source sends MAGIC and a nonce; the sink answers MAGIC, a nonce of its own and a MAC over both, keyed
with the deployment's secret and the offer's token; the source answers with its MAC. Whoever can't make the MAC is
dropped. Then requests (a length, msgpack) and replies (a header, raw bytes) alternate, and numbers pair them.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from trtpd.errors import TransferError
from trtpd.kv_transfer.asks import Check, Index, Number, Open, Renew

MAGIC = b"trtpdKV1"
NONCE_BYTES = 32
MAC_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = GREETING_BYTES + MAC_BYTES
REQUEST_LIMIT_BYTES = 1 << 20
RUNS_LIMIT = 1 << 16

LENGTH = struct.Struct("<I")
REPLY = struct.Struct("<IIQ")


class TcpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of this transport: where the source listens, the token that lets in, and which machine it is."""

    machine: Annotated[str, Meta(max_length=256)]
    host: Annotated[str, Meta(max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: Annotated[bytes, Meta(min_length=16, max_length=64)]


class Read(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """OK with bytes, or NOT_HELD. In the order array, run, block, head: arrays and heads as the pool of that rank
    counts them, both from first to before end; runs are (first block, count)."""

    request_id: Number
    attempt: Number
    tp_rank: Index
    pp_rank: Index
    first_array: Index
    end_array: Index
    first_head: Index
    end_head: Index
    runs: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=RUNS_LIMIT)]


Request = Open | Renew | Check | Read
_DECODER = msgspec.msgpack.Decoder(Request)


def pack_request(request: Request) -> bytes:
    body = msgspec.msgpack.encode(request)
    if len(body) > REQUEST_LIMIT_BYTES:
        raise TransferError(f"a request of {len(body)} bytes is longer than {REQUEST_LIMIT_BYTES}: use larger blocks")
    return LENGTH.pack(len(body)) + body


def unpack_request(body: bytes) -> Request:
    """Raises TransferError for what is not a request."""
    try:
        request: Request = _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TransferError(f"{len(body)} bytes are not a request: {error}") from error
    return request


def mac_of(key: bytes, side: bytes, source_nonce: bytes, sink_nonce: bytes) -> bytes:
    """The proof of `side` ("sink" or "source") that it knows the key."""
    return hmac.new(key, side + source_nonce + sink_nonce, hashlib.sha256).digest()


def same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)
