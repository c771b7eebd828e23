"""Digests of KV: one 64-bit xxh3 per (block, KV head).

A digest covers that head's bytes of one block in every layer of the rank, K before V, valid tokens only. A
sink that takes only some heads can so verify just those, and garbage behind a prompt's last token doesn't
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import xxhash

from trtpd.errors import IntegrityError
from trtpd.kv_transfer.pool import SharedPool


class BlockDigester:
    """Digests blocks of one pool, whose memory stays mapped until `close`."""

    def __init__(self, pool: SharedPool) -> None:
        layout = pool.layout
        self.heads = len(layout.rank_heads(pool.address.tp_rank))
        self._token_bytes = layout.head_dim * layout.itemsize_bytes
        self._head_bytes = layout.tokens_per_block * self._token_bytes
        # A slice of a memoryview costs a third of what a view of an ndarray and its buffer cost.
        self._arrays = [memoryview(array.reshape(-1).view("u1")) for array in pool.grid]

    def open(self, blocks: Iterable[tuple[int, int]]) -> OpenDigests:
        """Begins digests of `blocks`, given as (block, valid tokens)."""
        spans = []
        for block, tokens in blocks:
            for head in range(block * self.heads, (block + 1) * self.heads):
                start = head * self._head_bytes
                spans.append(slice(start, start + tokens * self._token_bytes))
        return OpenDigests(self._arrays, self.heads, spans)

    def digest(self, block: int, tokens: int) -> tuple[int, ...]:
        """Per head, of the first `tokens` tokens of a block."""
        opened = self.open([(block, tokens)])
        opened.feed(0, len(self._arrays))
        return opened.values()[0]

    def close(self) -> None:
        self._arrays = []


class OpenDigests:
    """Digests under way, fed array by array so that bytes can be digested while a copy has them in cache."""

    def __init__(self, arrays: list[memoryview], heads: int, spans: list[slice]) -> None:
        self._arrays, self._heads = arrays, heads
        self._states = [xxhash.xxh3_64() for _ in spans]
        self._updates = [(state.update, span) for state, span in zip(self._states, spans, strict=True)]

    def feed(self, first: int, end: int) -> None:
        """Arrays `first` up to `end` of the grid hold their final bytes. Each is fed once, in order."""
        arrays = self._arrays[first:end]
        for update, span in self._updates:
            for array in arrays:
                update(array[span])

    def values(self) -> list[tuple[int, ...]]:
        """One tuple per opened block, one digest per head."""
        flat = [state.intdigest() for state in self._states]
        return [tuple(flat[i : i + self._heads]) for i in range(0, len(flat), self._heads)]


def is_sampled(index: int, *, every: int) -> bool:
    """Whether the block at `index` of a prompt is digested when one in `every` is; 0 means none are."""
    return every > 0 and index % every == 0


def verify(expected: Mapping[int, tuple[int, ...]], found: Mapping[int, tuple[int, ...]], where: str) -> None:
    """Compares digests of the blocks in `found` with those announced. Raises IntegrityError."""
    for index, values in found.items():
        if expected[index] != values:
            heads = [h for h, pair in enumerate(zip(expected[index], values, strict=False)) if pair[0] != pair[1]]
            raise IntegrityError(
                f"{where}: block {index} of the prompt arrived with other bytes than were sealed"
                f" (heads {heads} of {len(values)}): pull it again"
            )
