"""Runs: blocks that lie side by side at both ends move as one: from Python small pieces are dear."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


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
