"""Digests of KV: one 64-bit number per (block, KV head of the model).

The digest of a head is a sum over its K and V of every layer: xxh3 of the valid bytes there, times an odd
number that belongs to that layer's K or V, modulo 2^64. A sum can be taken in parts and in any order, so it does not
depend on how ranks split heads (a sink verifies just those it takes) nor layers (several stages' parts add up),
and can be taken while a copy has the bytes in cache. Bytes behind a prompt's last token don't count. Digests
are of the source's bytes, before any conversion.

A changed word passes unnoticed with probability 2^-64, as do changes in several layers; K and V, or layers, that
changed places with 2^-60 or so. It guards against faults, not against someone who can write into a pool.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from trtpd.errors import IntegrityError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import SharedPool, Words
from trtpd.kv_transfer.pull import Pull
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.reshard import holders_of
from trtpd.kv_transfer.runs import Run, coalesce

Sums = npt.NDArray[np.uint64]


def head_sums(cells: Words, tokens: int, tokens_per_block: int, weights: Sums) -> Sums:
    """What these cells `[array, block, head, word]` add to the digests, per block and head; `weights` are those of
    the arrays, `tokens` the valid ones in each block."""
    arrays, blocks, heads, _ = cells.shape
    data = cells.view(np.uint8)
    valid_bytes = data.shape[3] * tokens // tokens_per_block
    # Scalars of a structured type refer to the array's memory, and numpy makes them in C: the cheapest way to
    # hand pieces of an array to a hash one by one.
    pieces = data[..., :valid_bytes].view(_record(valid_bytes))[..., 0]
    flat = cast("Iterable[bytes]", pieces.flat)
    hashes = np.frombuffer(b"".join(map(xxhash.xxh3_64_digest, flat)), ">u8").astype(np.uint64)
    total: Sums = weights @ hashes.reshape(arrays, blocks * heads)
    return total.reshape(blocks, heads)


@functools.lru_cache(maxsize=1024)
def _record(size_bytes: int) -> np.dtype[np.void]:
    return np.dtype([("bytes", f"V{size_bytes}")])


def array_weights(layers: range) -> Sums:
    """The odd numbers that belong to K and V of these layers of the model."""
    numbers = [xxhash.xxh3_64_intdigest(b"%d %s" % (layer, kv)) | 1 for layer in layers for kv in (b"K", b"V")]
    return np.array(numbers, np.uint64)


class GroupDigester:
    """Digests of whole blocks of a group, each head from the first of its ranks."""

    def __init__(self, pools: RankPools) -> None:
        self._layout = pools.layout
        self._parts: list[tuple[SharedPool, range, Sums]] = []
        for (tp_rank, pp_rank), pool in pools.by_rank.items():
            first = [h for h in pools.layout.rank_heads(tp_rank) if holders_of(pools.layout, h)[0] == tp_rank]
            if first:
                weights = array_weights(pools.layout.rank_layers(pp_rank))
                self._parts.append((pool, range(first[0], first[-1] + 1), weights))

    def digests(self, blocks: Sequence[int], tokens: int) -> list[tuple[int, ...]]:
        """Per block, of its first `tokens` tokens, one digest per KV head of the model."""
        total = np.zeros((len(blocks), self._layout.kv_heads), np.uint64)
        for run in coalesce(blocks, blocks):
            rows = slice(run.index, run.index + run.count)
            for pool, heads, weights in self._parts:
                held = self._layout.rank_heads(pool.address.tp_rank).start
                cells = pool.cells[:, run.source : run.source + run.count, heads.start - held : heads.stop - held]
                sums = head_sums(cells, tokens, self._layout.tokens_per_block, weights)
                total[rows, heads.start : heads.stop] += sums
        return [tuple(row) for row in total.tolist()]


class Arrivals:
    """Digests of the blocks of one piece of a pull, added up as they arrive in the pools of the sink's ranks."""

    def __init__(self, pull: Pull, piece: range, layout: KVLayout) -> None:
        self._pull, self._layout = pull, layout
        self._row = {index: row for row, index in enumerate(i for i in piece if i in pull.digests)}
        self._sums: dict[int, Sums] = {}
        self._adding = threading.Lock()

    def parts(self, run: Run) -> list[Run]:
        """The run in parts whose blocks are all to be verified and equally full, or all not to be."""

        def alike(index: int) -> tuple[bool, int]:
            return index in self._row, self._pull.valid_tokens(index) if index in self._row else 0

        return [
            Run(first, run.source + first - run.index, run.sink + first - run.index, len(indexes))
            for _, group in itertools.groupby(run.indexes, alike)
            if (indexes := list(group)) and (first := indexes[0]) >= 0
        ]

    def wanted(self, part: Run) -> bool:
        """Whether the blocks of a part are to be verified."""
        return part.index in self._row

    def add(self, tp_rank: int, part: Run, heads: range, cells: Words, weights: Sums) -> None:
        """These cells, of heads as the model counts them, have arrived for a rank of the sink; `cells` hold the
        source's bytes. Thread-safe."""
        tokens, row = self._pull.valid_tokens(part.index), self._row[part.index]
        sums = head_sums(cells, tokens, self._layout.tokens_per_block, weights)
        with self._adding:
            if tp_rank not in self._sums:
                self._sums[tp_rank] = np.zeros((len(self._row), self._layout.kv_heads), np.uint64)
            self._sums[tp_rank][row : row + part.count, heads.start : heads.stop] += sums

    def verify(self) -> None:
        """All of the piece has arrived. Raises IntegrityError."""
        for tp_rank, sums in self._sums.items():
            heads, found = self._layout.rank_heads(tp_rank), sums.tolist()
            for index, row in self._row.items():
                self._compare(index, heads, found[row])

    def _compare(self, index: int, heads: range, found: Sequence[int]) -> None:
        announced, where = self._pull.digests[index], self._pull.offer.instance
        if len(announced) != self._layout.kv_heads:
            raise IntegrityError(f"{where}: block {index} came with {len(announced)} digests for {len(found)} heads")
        wrong = [head for head in heads if announced[head] != found[head]]
        if wrong:
            raise IntegrityError(
                f"{where}: block {index} of the prompt arrived with other bytes than were sealed"
                f" (heads {wrong} of {len(announced)}): pull it again"
            )


def is_sampled(index: int, *, every: int) -> bool:
    """Whether the block at `index` of a prompt is digested when one in `every` is; 0 means none are."""
    return every > 0 and index % every == 0
