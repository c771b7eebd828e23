"""BlockAllocator: who has which KV blocks, and how many more each owner may still come to need. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trtpd.errors import InternalError

OnFree = Callable[[Sequence[int]], None]


def _ignore(blocks: Sequence[int]) -> None:
    del blocks


@dataclass(slots=True)
class _Holding:
    """Blocks of one owner in sequence order; it may grow to `peak` blocks."""

    blocks: list[int]
    peak: int


@dataclass(slots=True)
class _FreeRuns:
    """Runs of neighbouring free blocks: their starts in ascending order, and each one's length."""

    starts: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def best_fit(self, count: int) -> int | None:
        """Start of the shortest run of at least `count` blocks, the lowest of equals."""
        fitting = [(length, start) for start, length in self.lengths.items() if length >= count]
        return min(fitting)[1] if fitting else None

    def longest(self) -> int:
        return max(self.starts, key=lambda start: (self.lengths[start], -start))

    def run_of(self, block: int) -> int | None:
        """Start of the run that holds `block`, None if it is not free."""
        at = bisect_left(self.starts, block + 1) - 1
        if at < 0 or block >= self.starts[at] + self.lengths[self.starts[at]]:
            return None
        return self.starts[at]

    def take(self, start: int, first: int, count: int) -> None:
        """Takes `count` blocks from `first` on out of the run at `start`."""
        length = self.lengths.pop(start)
        self.starts.remove(start)
        self._put(start, first - start)
        self._put(first + count, start + length - first - count)
        self.total -= count

    def give(self, block: int) -> None:
        """Adds a block, joining the runs on both sides of it."""
        start, length = block, 1
        before = self.run_of(block - 1)
        if before is not None:
            start, length = before, length + self.lengths[before]
            self._drop(before)
        after = self.lengths.get(block + 1)
        if after is not None:
            length += after
            self._drop(block + 1)
        self._put(start, length)
        self.total += 1

    def _put(self, start: int, length: int) -> None:
        if length:
            insort(self.starts, start)
            self.lengths[start] = length

    def _drop(self, start: int) -> None:
        self.starts.remove(start)
        del self.lengths[start]


class BlockAllocator:
    """Hands out a fixed number of blocks, in runs as long as it can, since copies coalesce runs.

    An owner is admitted with the most it can ever need (`peak`). What it has not taken yet stays promised to
    it, so `grow` up to the peak can't fail. `on_free(blocks)` is called before freed blocks can be handed out
    again.
    """

    def __init__(self, num_blocks: int, *, on_free: OnFree = _ignore) -> None:
        if num_blocks < 1:
            raise InternalError(f"a KV pool of {num_blocks} blocks can't be allocated from")
        self.num_blocks = num_blocks
        self._on_free = on_free
        self._free = _FreeRuns(starts=[0], lengths={0: num_blocks}, total=num_blocks)
        self._holdings: dict[Hashable, _Holding] = {}
        self._promised = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has, promised ones included."""
        return self._free.total

    @property
    def available_blocks(self) -> int:
        """Blocks that nobody has and nobody was promised."""
        return self._free.total - self._promised

    def owners(self) -> frozenset[Hashable]:
        return frozenset(self._holdings)

    def blocks_of(self, owner: Hashable) -> Sequence[int]:
        """The owner's blocks in sequence order. The list is live: it grows with `grow`. Don't change it."""
        return self._holdings[owner].blocks

    def peak_of(self, owner: Hashable) -> int:
        return self._holdings[owner].peak

    def allocate(self, owner: Hashable, count: int, *, peak: int | None = None) -> tuple[int, ...] | None:
        """`count` blocks now and up to `peak` (default: `count`) in all later; None if that is more than
        `available_blocks`. Prefers one run: the shortest that fits, else the longest ones there are."""
        peak = count if peak is None else peak
        if owner in self._holdings:
            raise InternalError(f"{owner!r} has blocks already")
        if not 1 <= count <= peak:
            raise InternalError(f"{owner!r} asks for {count} blocks with a peak of {peak}")
        if peak > self.available_blocks:
            return None
        blocks = self._take(count)
        self._holdings[owner] = _Holding(blocks, peak)
        self._promised += peak - count
        return tuple(blocks)

    def grow(self, owner: Hashable) -> int:
        """One more block of those promised, the neighbour of the owner's last one if it is free."""
        holding = self._holdings[owner]
        if len(holding.blocks) >= holding.peak:
            raise InternalError(f"{owner!r} grows past its peak of {holding.peak} blocks")
        neighbour = holding.blocks[-1] + 1
        run = self._free.run_of(neighbour)
        if run is None:
            run = neighbour = self._free.longest()
        self._free.take(run, neighbour, 1)
        holding.blocks.append(neighbour)
        self._promised -= 1
        return neighbour

    def set_peak(self, owner: Hashable, peak: int) -> bool:
        """Changes what the owner may grow to. False, and no change, if that is more than is available."""
        holding = self._holdings[owner]
        if peak < len(holding.blocks):
            raise InternalError(f"{owner!r} has {len(holding.blocks)} blocks, more than the new peak of {peak}")
        if peak - holding.peak > self.available_blocks:
            return False
        self._promised += peak - holding.peak
        holding.peak = peak
        return True

    def free(self, owner: Hashable) -> None:
        """Gives back all the owner has and was promised. Raises InternalError for an unknown owner."""
        holding = self._holdings.pop(owner, None)
        if holding is None:
            raise InternalError(f"{owner!r} has no blocks to free")
        self._promised -= holding.peak - len(holding.blocks)
        self._on_free(holding.blocks)
        for block in holding.blocks:
            self._free.give(block)

    def check_integrity(self) -> None:
        """Raises InternalError unless every block is either free or somebody's, once, and promises are
        covered."""
        free = [b for start in self._free.starts for b in range(start, start + self._free.lengths[start])]
        held = [b for holding in self._holdings.values() for b in holding.blocks]
        if sorted(free + held) != list(range(self.num_blocks)):
            raise InternalError(f"of {self.num_blocks} blocks {len(free)} are free and {len(held)} held")
        if len(free) != self._free.total:
            raise InternalError(f"{len(free)} blocks are free, {self._free.total} were counted")
        starts = self._free.starts
        if any(a + self._free.lengths[a] >= b for a, b in pairwise(starts)):
            raise InternalError(f"free runs touch or overlap: {starts}")
        promised = sum(h.peak - len(h.blocks) for h in self._holdings.values())
        if promised != self._promised or not 0 <= promised <= len(free):
            raise InternalError(f"{promised} blocks are promised, {self._promised} counted, {len(free)} free")

    def _take(self, count: int) -> list[int]:
        blocks: list[int] = []
        while len(blocks) < count:
            missing = count - len(blocks)
            start = self._free.best_fit(missing)
            if start is None:
                start = self._free.longest()
            length = min(missing, self._free.lengths[start])
            self._free.take(start, start, length)
            blocks.extend(range(start, start + length))
        return blocks
