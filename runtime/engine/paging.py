"""EngineKV: the engine's KV blocks as transports and the scheduler see them."""

from __future__ import annotations

from collections.abc import Sequence

from trtpd.errors import InternalError, RequestError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import PoolAddress, SharedPool
from trtpd.runtime.engine.base import Key
from trtpd.runtime.engine.blocks import BlockAllocator


class EngineKV:
    """PagedKV over a SharedPool, which it owns. Freed blocks get a new epoch before anyone has them again.

    `others` are the pools of a group's other ranks: blocks have the same numbers there, and no epochs of their own.
    `set_aside_blocks` are left for the request that is first in line for blocks: `reserve` does not touch
    them.
    """

    def __init__(self, pool: SharedPool, *, max_seq_tokens: int, others: Sequence[PoolAddress] = ()) -> None:
        self._pool = pool
        self._others = tuple(others)
        self._max_seq_tokens = max_seq_tokens
        self._allocator = BlockAllocator(pool.num_blocks, on_free=pool.bump)
        self._reserved_tokens: dict[Key, int] = {}
        self.set_aside_blocks = 0

    @property
    def layout(self) -> KVLayout:
        return self._pool.layout

    @property
    def pool(self) -> SharedPool:
        return self._pool

    @property
    def others(self) -> tuple[PoolAddress, ...]:
        """See PagedKV."""
        return self._others

    @property
    def available_blocks(self) -> int:
        return self._allocator.available_blocks

    def reserve(self, key: Key, tokens: int, *, peak_tokens: int | None = None) -> tuple[int, ...] | None:
        """See PagedKV."""
        if tokens < 1:
            raise InternalError(f"blocks for {tokens} tokens can't be reserved")
        count = self.layout.blocks_for(tokens + 1)
        longest = min(peak_tokens or self._max_seq_tokens, self._max_seq_tokens)
        peak = max(count, min(self.layout.blocks_for(longest), self._pool.num_blocks))
        if peak > self.available_blocks - self.set_aside_blocks:
            return None
        blocks = self._allocator.allocate(key, count, peak=peak)
        self._reserved_tokens[key] = tokens
        return blocks

    def free(self, key: Key) -> None:
        """See PagedKV. Blocks of a submitted request are not touched."""
        if self._reserved_tokens.pop(key, None) is not None:
            self._allocator.free(key)

    def claim(self, key: Key, *, tokens: int, peak_tokens: int) -> None:
        """A reserved key is submitted: from now on the scheduler frees its blocks. Raises RequestError, and
        changes nothing, if `tokens` tokens weren't reserved or its peak can't be kept free."""
        reserved = self._reserved_tokens.get(key)
        if reserved != tokens:
            raise RequestError(
                f"request {key[0]}: generation_only with a prompt of {tokens} tokens, but blocks were "
                f"reserved for {reserved or 0}; reserve(key, {tokens}) must come first"
            )
        peak = max(len(self._allocator.blocks_of(key)), self.layout.blocks_for(peak_tokens))
        if not self._allocator.set_peak(key, peak):
            raise RequestError(
                f"request {key[0]}: it may grow to {peak} KV blocks, {self._allocator.peak_of(key)} were "
                f"reserved and {self.available_blocks} are available; reserve with its peak_tokens"
            )
        del self._reserved_tokens[key]

    def admit(self, key: Key, *, tokens: int, peak_tokens: int) -> tuple[int, ...]:
        """Blocks for a prompt of `tokens` tokens. The planner has seen that the peak fits."""
        count, peak = self.layout.blocks_for(tokens), self.layout.blocks_for(peak_tokens)
        blocks = self._allocator.allocate(key, count, peak=peak)
        if blocks is None:
            raise InternalError(f"{key} was admitted with {peak} of {self.available_blocks} KV blocks")
        return blocks

    def blocks_for_tokens(self, key: Key, tokens: int) -> Sequence[int]:
        """The sequence's blocks, grown to hold `tokens` tokens."""
        blocks = self._allocator.blocks_of(key)
        while len(blocks) * self.layout.tokens_per_block < tokens:
            self._allocator.grow(key)
        return blocks

    def blocks_of(self, key: Key) -> Sequence[int]:
        return self._allocator.blocks_of(key)

    def release(self, key: Key) -> None:
        """Frees the blocks of a sequence that has ended."""
        self._allocator.free(key)

    def check_integrity(self, sequences: frozenset[Key]) -> None:
        """Raises InternalError unless exactly `sequences` and the reserved keys have blocks."""
        self._allocator.check_integrity()
        expected = sequences | self._reserved_tokens.keys()
        if self._allocator.owners() != expected or sequences & self._reserved_tokens.keys():
            raise InternalError(f"blocks are held by {set(self._allocator.owners())}, expected {set(expected)}")

    def close(self) -> None:
        self._pool.close()
