"""What the two sides of a hand-off tell each other: offer, chunk, seal.

An attempt is fenced by (request_id, attempt, generation): an answer that carries another triple changes
nothing. All of it travels as msgpack; nothing here is ever unpickled.
"""

from __future__ import annotations

import msgspec

from trtpd.kv_transfer.layout import KVLayout


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Made by prefill before its first chunk: where the KV of one request will be, and until when.

    `blocks[i]` holds the tokens `i * tokens_per_block ...` of the prompt in the source's pool, `epochs[i]` is
    that block's epoch at the offer: a sink compares it after its copy. `address` is the transport's own
    description of the pool (for shm: `PoolAddress` as msgpack). `opaque` is the engine's own hand-off state
    where the engine moves its KV itself (transport "opaque"), at most OPAQUE_LIMIT_BYTES.
    """

    request_id: int
    attempt: int
    generation: str
    instance: str
    transport: str
    layout: KVLayout
    prompt_tokens: int
    blocks: tuple[int, ...]
    epochs: tuple[int, ...]
    address: bytes
    lease_s: float
    opaque: bytes = b""


OPAQUE_LIMIT_BYTES = 1 << 20


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """KV of the first `ready_tokens` tokens is final. `digests` covers blocks finished since the last chunk.

    `digests` is a map from index in `Offer.blocks` to one 64-bit digest per KV head of the source rank
    (over that head's K and V of all layers, valid tokens only); empty when digests are off.
    """

    request_id: int
    attempt: int
    ready_tokens: int
    digests: dict[int, tuple[int, ...]] = {}


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """The last chunk: the whole prompt is there, and the first token was drawn from it."""

    request_id: int
    attempt: int
    prompt_tokens: int
    first_token: int
    first_log_prob: float | None
    seed: int
    digests: dict[int, tuple[int, ...]] = {}
