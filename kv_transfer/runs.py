"""Runs: blocks that lie side by side at both ends move as one: from Python small pieces are dear."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from trtpd.kv_transfer.integrity import OpenDigests
from trtpd.kv_transfer.pool import SharedPool

TILE_BYTES = 1 << 20
"""A copy with digests goes in tiles of about this size: digested while in cache, and few enough calls."""


class Run(msgspec.Struct, frozen=True):
    """`count` blocks from `source` on in the source's pool go to `sink` on in the sink's. The first of them
    is block `index` of the prompt."""

    index: int
    source: int
    sink: int
    count: int

    @property
    def indexes(self) -> range:
        return range(self.index, self.index + self.count)


def coalesce(source: Sequence[int], sink: Sequence[int], *, first_index: int = 0) -> list[Run]:
    """The fewest runs that move source[i] to sink[i], in order. Both are equally long."""
    runs: list[Run] = []
    for i, (a, b) in enumerate(zip(source, sink, strict=True), start=first_index):
        last = runs[-1] if runs else None
        if last is not None and (a, b) == (last.source + last.count, last.sink + last.count):
            runs[-1] = Run(last.index, last.source, last.sink, last.count + 1)
        else:
            runs.append(Run(i, a, b, 1))
    return runs


def split(run: Run, blocks: int) -> list[Run]:
    """The run as runs of at most `blocks` blocks."""
    return [
        Run(run.index + i, run.source + i, run.sink + i, min(blocks, run.count - i))
        for i in range(0, run.count, blocks)
    ]


def copy_run(source: SharedPool, sink: SharedPool, run: Run) -> None:
    """Copies a run in all layers, in one call that lets other Python threads run."""
    sink_part = sink.grid[:, run.sink : run.sink + run.count]
    np.copyto(sink_part, source.grid[:, run.source : run.source + run.count])


def copy_run_digesting(source: SharedPool, sink: SharedPool, run: Run, opened: OpenDigests) -> None:
    """The same, and feeds what arrived in the sink's pool to `opened`, which digests blocks of the sink."""
    to = sink.grid[:, run.sink : run.sink + run.count]
    of = source.grid[:, run.source : run.source + run.count]
    step = max(1, TILE_BYTES // (to[0].nbytes))
    for first in range(0, len(to), step):
        end = min(first + step, len(to))
        np.copyto(to[first:end], of[first:end])
        opened.feed(first, end)


def tile_blocks(pool: SharedPool) -> int:
    """Blocks of a run to copy with one set of open digests: many arrays of few blocks make the best
    tile, since digests then go on from array to array."""
    block_bytes = pool.grid.shape[2] * pool.grid.itemsize
    return max(1, TILE_BYTES // (16 * block_bytes))
