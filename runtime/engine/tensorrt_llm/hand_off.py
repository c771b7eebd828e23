"""HandOff: what one TensorRT-LLM executor tells another of a context request, as bounded bytes.

The bytes inside (`opaque_state`) are TensorRT-LLM's own serialisation of its transceiver's state. They are bound to one
exact version, so the version travels with them. Nothing here is ever unpickled, logged or kept beyond the request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from trtpd.errors import TransferError
from trtpd.kv_transfer.offer import OPAQUE_LIMIT_BYTES

STATE_LIMIT_BYTES = OPAQUE_LIMIT_BYTES - 4096
"""Leaves room for the other fields within an offer's limit."""

_Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_Text = Annotated[str, Meta(max_length=512)]


class HandOff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields named as in TensorRT-LLM's ContextPhaseParams; `req_id` has 64 bits, as msgpack's numbers have.
    `opaque_state` is None where there is nothing to fetch: the first token was all there was to compute. The last two
    come from release 1.3 on."""

    version: _Text
    first_gen_tokens: Annotated[tuple[_Token, ...], Meta(min_length=1, max_length=1)]
    req_id: Annotated[int, Meta(ge=0)]
    opaque_state: Annotated[bytes, Meta(min_length=1, max_length=STATE_LIMIT_BYTES)] | None = None
    draft_tokens: Annotated[tuple[_Token, ...], Meta(max_length=256)] | None = None
    ctx_dp_rank: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    disagg_info_endpoint: _Text | None = None

    @property
    def first_token(self) -> int:
        return self.first_gen_tokens[0]


class HandOffStateError(TransferError):
    """The engine's state in an offer can't be used here; pulling the offer again would not help."""

    retryable = False


def encode(hand_off: HandOff) -> bytes:
    """Raises HandOffStateError for one that breaks the bounds which its receiver sets."""
    data = msgspec.msgpack.encode(hand_off)
    _read(data, "this executor's")
    return data


def decode(data: bytes, *, version: str) -> HandOff:
    """Of a peer. Raises HandOffStateError for what breaks a bound, is of another version or has nothing to fetch."""
    hand_off = _read(data, "the offer's")
    if hand_off.version != version:
        raise HandOffStateError(
            f"the offer comes from TensorRT-LLM {hand_off.version!r} and this is {version}: a hand-off never crosses "
            "versions; run one image on both sides"
        )
    if hand_off.opaque_state is None:
        raise HandOffStateError("the offer has no KV behind it: its answer ended with the first token")
    return hand_off


def _read(data: bytes, whose: str) -> HandOff:
    if not 0 < len(data) <= OPAQUE_LIMIT_BYTES:
        raise HandOffStateError(f"{whose} hand-off state has {len(data)} bytes; it must have 1 to {OPAQUE_LIMIT_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=HandOff)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise HandOffStateError(f"{whose} hand-off state of {len(data)} bytes can't be read: {error}") from error
