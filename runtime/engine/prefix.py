"""PrefixCache: which KV blocks hold which beginnings of prompts, so that equal beginnings are computed once. Pure.

A full block is known by a hash over all tokens up to its end: each block's hash covers the hash of the block before
it, and the first a salt that names the model. So equal hashes mean equal KV, whatever follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

HASH_BYTES = 16
"""Wide enough that no two beginnings meet, also where someone tries to make them."""


class BlockHasher:
    """Hashes of the full blocks of token sequences, for engines and for whoever foretells what engines hold."""

    def __init__(self, salt: str, tokens_per_block: int) -> None:
        """`salt` names the model: KV of another one is never taken for this one's."""
        self.tokens_per_block = tokens_per_block
        self._start = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES).digest()

    def extend(self, hashes: list[bytes], ids: Sequence[int], *, tokens: int) -> None:
        """Appends what is missing of the hashes of the full blocks of the first `tokens` of `ids`. Those in `hashes`
        are of the same sequence."""
        size = self.tokens_per_block
        first, end = len(hashes), tokens // size
        if first >= end:
            return
        raw = np.array(ids[first * size : end * size], "<u4").tobytes()
        previous = hashes[-1] if hashes else self._start
        for at in range(0, len(raw), 4 * size):
            previous = hashlib.blake2b(previous + raw[at : at + 4 * size], digest_size=HASH_BYTES).digest()
            hashes.append(previous)

    def summary(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The hashes of the full blocks of `ids` as the router knows them (see `short`)."""
        hashes: list[bytes] = []
        self.extend(hashes, ids, tokens=len(ids))
        return tuple(map(short, hashes))


def short(block_hash: bytes) -> int:
    """64 bits of a hash: what engines and router tell each other, who only guess by it where KV may be."""
    return int.from_bytes(block_hash[:8], "little")


class PrefixCache:
    """Blocks by the hash of what they hold. A block is put in only when all of its KV is written, and no one writes
    into it again before it is forgotten."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evicted: list[int] = []

    def __len__(self) -> int:
        return len(self._hash_of)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest beginning that is here."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block_hash: bytes, block: int) -> None:
        """`block` holds this. Where another one does already, that one stays."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> None:
        """The content of these is not to be found any more."""
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._block_of[block_hash]
                self._evicted.append(short(block_hash))

    def take_evicted(self) -> tuple[int, ...]:
        """What was forgotten since the last call, as `short` hashes."""
        evicted, self._evicted = self._evicted, []
        return tuple(evicted)
