"""What the two sides of a hand-off tell each other: offer, chunk, seal.

An attempt is fenced by (request_id, attempt, generation): an answer that carries another triple changes
nothing. All of it travels as msgpack; nothing here is ever unpickled. `decode_*` accept nothing that breaks
the bounds below, whoever sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from trtpd.errors import LayoutError, TransferError
from trtpd.kv_transfer.layout import KVLayout

OPAQUE_LIMIT_BYTES = 1 << 20
MESSAGE_LIMIT_BYTES = 32 << 20
ADDRESS_LIMIT_BYTES = 1 << 16
BLOCKS_LIMIT = 1 << 20
TOKENS_LIMIT = 1 << 24
HEADS_LIMIT = 1 << 12
LAYOUT_LIMIT = 1 << 16
LEASE_LIMIT_S = 3600.0

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=1, le=TOKENS_LIMIT)]
Name = Annotated[str, Meta(max_length=256)]
Digests = Annotated[
    dict[Count, Annotated[tuple[int, ...], Meta(max_length=HEADS_LIMIT)]], Meta(max_length=BLOCKS_LIMIT)
]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to the KV of an offer: `address` is the transport's own description of the pools (for shm:
    `ShmAddress` as msgpack)."""

    transport: Name
    address: Annotated[bytes, Meta(max_length=ADDRESS_LIMIT_BYTES)]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Made by prefill before its first chunk: where the KV of one request will be, and until when.

    `blocks[i]` holds the tokens `i * tokens_per_block ...` of the prompt in the pools of all ranks of the source,
    `epochs[i]` is that block's epoch at the offer: a sink compares it after its copy. `transport` and `address`
    are the way the source likes best, `others` the other ways it has, best first. `opaque` is the engine's own hand-off
    state where the engine moves its KV itself (transport "opaque", no blocks), at most OPAQUE_LIMIT_BYTES.
    """

    request_id: Count
    attempt: Count
    generation: Name
    instance: Name
    transport: Name
    layout: KVLayout
    prompt_tokens: Tokens
    blocks: Annotated[tuple[Count, ...], Meta(max_length=BLOCKS_LIMIT)]
    epochs: Annotated[tuple[Count, ...], Meta(max_length=BLOCKS_LIMIT)]
    address: Annotated[bytes, Meta(max_length=ADDRESS_LIMIT_BYTES)]
    lease_s: Annotated[float, Meta(gt=0.0, le=LEASE_LIMIT_S)]
    opaque: Annotated[bytes, Meta(max_length=OPAQUE_LIMIT_BYTES)] = b""
    others: Annotated[tuple[Way, ...], Meta(max_length=8)] = ()

    @property
    def ways(self) -> tuple[Way, ...]:
        """All ways, best first."""
        return (Way(transport=self.transport, address=self.address), *self.others)

    def by(self, way: Way) -> Offer:
        """The same offer with that way only."""
        return msgspec.structs.replace(self, transport=way.transport, address=way.address, others=())

    @property
    def key(self) -> tuple[int, int]:
        return (self.request_id, self.attempt)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """KV of the first `ready_tokens` tokens is final. `digests` covers blocks finished since the last chunk.

    `digests` is a map from index in `Offer.blocks` to one 64-bit digest per KV head of the model (over that
    head's K and V of all layers, valid tokens only; integrity.py); empty when digests are off.
    """

    request_id: Count
    attempt: Count
    ready_tokens: Annotated[int, Meta(ge=0, le=TOKENS_LIMIT)]
    digests: Digests = {}

    @property
    def key(self) -> tuple[int, int]:
        return (self.request_id, self.attempt)


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """The last chunk: the whole prompt is there, and the first token was drawn from it."""

    request_id: Count
    attempt: Count
    prompt_tokens: Tokens
    first_token: Count
    first_log_prob: float | None
    seed: int
    digests: Digests = {}

    @property
    def key(self) -> tuple[int, int]:
        return (self.request_id, self.attempt)


T = TypeVar("T")


def encode(message: Offer | Chunk | Seal) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_offer(data: bytes) -> Offer:
    """Raises TransferError for anything out of bounds, LayoutError for a layout that can't be."""
    offer = decode_message(data, Offer)
    layout = offer.layout
    if max(layout.num_layers, layout.kv_heads, layout.head_dim, layout.tokens_per_block) > LAYOUT_LIMIT:
        raise LayoutError(f"an offer's layout has a size above {LAYOUT_LIMIT}: {layout}")
    if max(layout.tp, layout.pp) > HEADS_LIMIT:
        raise LayoutError(f"an offer's layout has tp or pp above {HEADS_LIMIT}: {layout}")
    expected = 0 if offer.transport == "opaque" else layout.blocks_for(offer.prompt_tokens)
    if not len(offer.blocks) == len(offer.epochs) == expected:
        raise TransferError(
            f"the offer of request {offer.request_id} lists {len(offer.blocks)} blocks and"
            f" {len(offer.epochs)} epochs where {offer.prompt_tokens} prompt tokens need {expected}"
        )
    return offer


def decode_chunk(data: bytes) -> Chunk:
    """Raises TransferError for anything out of bounds."""
    chunk = decode_message(data, Chunk)
    _check_digests(chunk.digests)
    return chunk


def decode_seal(data: bytes) -> Seal:
    """Raises TransferError for anything out of bounds."""
    seal = decode_message(data, Seal)
    _check_digests(seal.digests)
    return seal


def decode_message(data: bytes, kind: type[T]) -> T:
    """A message of a peer's, from msgpack. Raises TransferError when it is too long or not of this kind."""
    if len(data) > MESSAGE_LIMIT_BYTES:
        raise TransferError(f"{kind.__name__} of {len(data)} bytes: at most {MESSAGE_LIMIT_BYTES} are accepted")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise TransferError(
            f"{len(data)} bytes are not a {kind.__name__} ({error}): the peer is of another version"
        ) from error


def _check_digests(digests: Mapping[int, tuple[int, ...]]) -> None:
    for index, values in digests.items():
        if index >= BLOCKS_LIMIT or not all(0 <= value < 1 << 64 for value in values):
            raise TransferError(f"digests of block {index} are not 64-bit numbers of a block")
