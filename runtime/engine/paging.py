"""EngineKV: the engine's KV blocks as transports and the scheduler see them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtpd.errors import InternalError, RequestError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import PoolAddress, SharedPool
from trtpd.runtime.engine.base import Key
from trtpd.runtime.engine.blocks import BlockAllocator
from trtpd.runtime.engine.prefix import BlockHasher, PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPolicy:
    """How a pool is shared out.

    `growth_kept`: the share of what a sequence may still grow by that is kept free for it from its admission on; with
    1 it can't run out of blocks. `prefix_cache`: whether equal beginnings of prompts share blocks; `keep_blocks`: how
    many blocks that no sequence has are kept for that at most. `salt` names the model to the cache.
    """

    growth_kept: float = 1.0
    prefix_cache: bool = False
    keep_blocks: int | None = None
    salt: str = ""


@dataclass(slots=True)
class _Reserved:
    """Blocks that wait for their KV. The first `present` of them have it."""

    tokens: int
    present: int


class EngineKV:
    """PagedKV over a SharedPool, which it owns. Freed blocks get a new epoch before anyone has them again.

    `others` are the pools of a group's other ranks: blocks have the same numbers there, and no epochs of their own.
    `set_aside_blocks` are left for what runs and for the request that is first in line for blocks: `reserve` does not
    touch them.
    """

    def __init__(
        self,
        pool: SharedPool,
        *,
        max_seq_tokens: int,
        others: Sequence[PoolAddress] = (),
        policy: KVPolicy | None = None,
    ) -> None:
        self._pool = pool
        self._others = tuple(others)
        self._max_seq_tokens = max_seq_tokens
        self._policy = policy or KVPolicy()
        self._cache = PrefixCache()
        self._allocator = BlockAllocator(
            pool.num_blocks,
            on_free=self._freed,
            keeps=self._cache.__contains__,
            keep_at_most=self._policy.keep_blocks,
        )
        self._reserved: dict[Key, _Reserved] = {}
        self.hasher = BlockHasher(self._policy.salt, pool.layout.tokens_per_block)
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
    def caches(self) -> bool:
        """Whether equal beginnings of prompts share blocks."""
        return self._policy.prefix_cache

    @property
    def may_run_out(self) -> bool:
        """Whether sequences may come to need blocks that weren't promised to them."""
        return self._policy.growth_kept < 1.0

    @property
    def available_blocks(self) -> int:
        return self._allocator.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks whose beginning can be found again, in use or not."""
        return len(self._cache)

    def take_evicted(self) -> tuple[int, ...]:
        """See PrefixCache."""
        return self._cache.take_evicted()

    def reserve(
        self, key: Key, tokens: int, *, peak_tokens: int | None = None, prompt_ids: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """See PagedKV."""
        if tokens < 1:
            raise InternalError(f"blocks for {tokens} tokens can't be reserved")
        count = self.layout.blocks_for(tokens + 1)
        longest = min(peak_tokens or self._max_seq_tokens, self._max_seq_tokens)
        peak = self._promised(count, min(self.layout.blocks_for(longest), self._pool.num_blocks))
        shared = self._match(prompt_ids) if self.caches else []
        if self._allocator.needed(peak, shared) > self.available_blocks - self.set_aside_blocks:
            return None
        blocks = self._allocator.allocate(key, count, peak=peak, shared=shared)
        self._reserved[key] = _Reserved(tokens, len(shared))
        return blocks

    def _match(self, ids: Sequence[int]) -> list[int]:
        hashes: list[bytes] = []
        self.hasher.extend(hashes, ids, tokens=len(ids))
        return self._cache.match(hashes)

    def present_blocks(self, key: Key) -> int:
        """See PagedKV."""
        return self._reserved[key].present

    def free(self, key: Key) -> None:
        """See PagedKV. Blocks of a submitted request are not touched."""
        if self._reserved.pop(key, None) is not None:
            self._allocator.free(key)

    def claim(self, key: Key, *, tokens: int, peak_tokens: int) -> None:
        """A reserved key is submitted: from now on the scheduler frees its blocks. Raises RequestError, and
        changes nothing, if `tokens` tokens weren't reserved or its peak can't be kept free."""
        reserved = self._reserved.get(key)
        if reserved is None or reserved.tokens != tokens:
            raise RequestError(
                f"request {key[0]}: generation_only with a prompt of {tokens} tokens, but blocks were "
                f"reserved for {reserved.tokens if reserved else 0}; reserve(key, {tokens}) must come first"
            )
        peak = self._promised(len(self._allocator.blocks_of(key)), self.layout.blocks_for(peak_tokens))
        if not self._allocator.set_peak(key, peak):
            raise RequestError(
                f"request {key[0]}: it may grow to {peak} KV blocks, {self._allocator.peak_of(key)} were "
                f"reserved and {self.available_blocks} are available; reserve with its peak_tokens"
            )
        del self._reserved[key]

    def cached(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks here that hold the longest beginning of a sequence with these hashes."""
        return self._cache.match(hashes) if self.caches else []

    def needed_blocks(self, *, tokens: int, peak_tokens: int, shared: Sequence[int]) -> int:
        """What `admit` with these takes of the available blocks."""
        count = self.layout.blocks_for(tokens)
        return self._allocator.needed(self._promised(count, self.layout.blocks_for(peak_tokens)), shared)

    def admit(self, key: Key, *, tokens: int, peak_tokens: int, shared: Sequence[int]) -> tuple[int, ...]:
        """Blocks for `tokens` tokens, the first of them `shared`. The planner has seen that there is room."""
        count = self.layout.blocks_for(tokens)
        peak = self._promised(count, self.layout.blocks_for(peak_tokens))
        blocks = self._allocator.allocate(key, count, peak=peak, shared=shared)
        if blocks is None:
            raise InternalError(f"{key} was admitted with {peak} of {self.available_blocks} KV blocks")
        return blocks

    def hold(self, key: Key, tokens: int) -> bool:
        """Grows the sequence's blocks to hold `tokens` tokens; False if there is no room for that now."""
        blocks = self._allocator.blocks_of(key)
        while len(blocks) * self.layout.tokens_per_block < tokens:
            if len(blocks) >= self._allocator.peak_of(key) and not self._allocator.set_peak(key, len(blocks) + 1):
                return False
            self._allocator.grow(key)
        return True

    def outgrows_promise(self, key: Key, peak_tokens: int) -> bool:
        """Whether the sequence's next block is one that wasn't promised to it."""
        held = len(self._allocator.blocks_of(key))
        return self._allocator.peak_of(key) <= held < self.layout.blocks_for(peak_tokens)

    def publish(self, key: Key, hashes: Sequence[bytes], *, first: int) -> None:
        """The sequence's full blocks from `first` on hold what `hashes` (of all its full blocks) say, and are final."""
        blocks = self._allocator.blocks_of(key)
        for index in range(first, len(hashes)):
            self._cache.publish(hashes[index], blocks[index])

    def blocks_of(self, key: Key) -> Sequence[int]:
        return self._allocator.blocks_of(key)

    def release(self, key: Key) -> None:
        """Frees the blocks of a sequence that has ended."""
        self._allocator.free(key)

    def check_integrity(self, sequences: frozenset[Key]) -> None:
        """Raises InternalError unless exactly `sequences` and the reserved keys have blocks."""
        self._allocator.check_integrity()
        expected = sequences | self._reserved.keys()
        if self._allocator.owners() != expected or sequences & self._reserved.keys():
            raise InternalError(f"blocks are held by {set(self._allocator.owners())}, expected {set(expected)}")
        if len(self._cache) and not self.caches:
            raise InternalError(f"{len(self._cache)} blocks are in a prefix cache that is off")

    def close(self) -> None:
        self._pool.close()

    def _promised(self, count: int, peak: int) -> int:
        """Blocks that a sequence is admitted with: `count` at once, and its share of what it may grow by."""
        return count + math.ceil(max(0, peak - count) * self._policy.growth_kept)

    def _freed(self, blocks: Sequence[int]) -> None:
        self._cache.forget(blocks)
        self._pool.bump(blocks)
