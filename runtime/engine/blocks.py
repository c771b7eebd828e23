"""BlockAllocator: who has which KV blocks, with whom they are shared, and how many more each owner may need. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trtpd.errors import InternalError

OnFree = Callable[[Sequence[int]], None]
Keeps = Callable[[int], bool]


def _ignore(blocks: Sequence[int]) -> None:
    del blocks


def _none(block: int) -> bool:
    del block
    return False


@dataclass(slots=True)
class _Holding:
    """Blocks of one owner in sequence order; it may grow to `peak` blocks without asking."""

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

    An owner is admitted with blocks that stay promised to it (`peak`), so `grow` up to them can't fail. Owners may
    share blocks whose content is the same. A block that its last owner gives back is kept if `keeps(block)` says so,
    at most `keep_at_most` of them: it can be shared again until its place is needed, and those given back longest ago
    go first. `on_free(blocks)` is called before freed blocks can be handed out again.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        on_free: OnFree = _ignore,
        keeps: Keeps = _none,
        keep_at_most: int | None = None,
    ) -> None:
        if num_blocks < 1:
            raise InternalError(f"a KV pool of {num_blocks} blocks can't be allocated from")
        self.num_blocks = num_blocks
        self._on_free = on_free
        self._keeps = keeps
        self._keep_at_most = num_blocks if keep_at_most is None else keep_at_most
        self._free = _FreeRuns(starts=[0], lengths={0: num_blocks}, total=num_blocks)
        self._holdings: dict[Hashable, _Holding] = {}
        self._owners_of: Counter[int] = Counter()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._promised = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has, kept and promised ones included."""
        return self._free.total + len(self._kept)

    @property
    def kept_blocks(self) -> int:
        """Blocks that nobody has and whose content is kept."""
        return len(self._kept)

    @property
    def available_blocks(self) -> int:
        """Blocks that nobody has and nobody was promised."""
        return self.free_blocks - self._promised

    def owners(self) -> frozenset[Hashable]:
        return frozenset(self._holdings)

    def blocks_of(self, owner: Hashable) -> Sequence[int]:
        """The owner's blocks in sequence order. The list is live: it grows with `grow`. Don't change it."""
        return self._holdings[owner].blocks

    def peak_of(self, owner: Hashable) -> int:
        return self._holdings[owner].peak

    def needed(self, peak: int, shared: Sequence[int] = ()) -> int:
        """What `allocate` with these would take of `available_blocks`."""
        return peak - sum(1 for block in shared if block not in self._kept)

    def allocate(
        self, owner: Hashable, count: int, *, peak: int | None = None, shared: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """`count` blocks now and up to `peak` (default: `count`) in all later; None if that is more than
        `available_blocks`. The first of them are `shared`, which others have or which are kept; the others prefer one
        run: the shortest that fits, else the longest ones there are."""
        peak = count if peak is None else peak
        if owner in self._holdings:
            raise InternalError(f"{owner!r} has blocks already")
        if not max(1, len(shared)) <= count <= peak:
            raise InternalError(f"{owner!r} asks for {count} blocks, {len(shared)} shared, with a peak of {peak}")
        if stray := [block for block in shared if block not in self._kept and not self._owners_of[block]]:
            raise InternalError(f"{owner!r} would share blocks {stray}, which are free")
        if self.needed(peak, shared) > self.available_blocks:
            return None
        for block in shared:
            self._kept.pop(block, None)
        blocks = [*shared, *self._take(count - len(shared))]
        self._holdings[owner] = _Holding(blocks, peak)
        self._owners_of.update(blocks)
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
            self._make_free(1)
            run = neighbour = self._free.longest()
        self._free.take(run, neighbour, 1)
        holding.blocks.append(neighbour)
        self._owners_of[neighbour] = 1
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
        """Gives back all the owner has and was promised; what others share stays theirs. Raises InternalError for an
        unknown owner."""
        holding = self._holdings.pop(owner, None)
        if holding is None:
            raise InternalError(f"{owner!r} has no blocks to free")
        self._promised -= holding.peak - len(holding.blocks)
        self._owners_of.subtract(holding.blocks)
        mine = [block for block in holding.blocks if not self._owners_of[block]]
        kept = [block for block in mine if self._keeps(block)]
        for block in mine:
            del self._owners_of[block]
        # The end of a sequence is of no use without its beginning, so it goes first.
        self._kept.update((block, None) for block in reversed(kept))
        self._give([block for block in mine if block not in self._kept])
        self._evict(len(self._kept) - self._keep_at_most)

    def check_integrity(self) -> None:
        """Raises InternalError unless every block is free, kept or somebody's, shares are counted right and promises
        are covered."""
        free = [b for start in self._free.starts for b in range(start, start + self._free.lengths[start])]
        shares = Counter(b for holding in self._holdings.values() for b in holding.blocks)
        if sorted([*free, *self._kept, *shares]) != list(range(self.num_blocks)):
            raise InternalError(
                f"of {self.num_blocks} blocks {len(free)} are free, {len(self._kept)} kept and {len(shares)} held"
            )
        if shares != self._owners_of or any(len(set(h.blocks)) < len(h.blocks) for h in self._holdings.values()):
            raise InternalError(f"blocks have {shares} owners, {self._owners_of} were counted")
        if len(self._kept) > self._keep_at_most or not all(map(self._keeps, self._kept)):
            raise InternalError(f"{len(self._kept)} blocks are kept, at most {self._keep_at_most} of use may be")
        if len(free) != self._free.total:
            raise InternalError(f"{len(free)} blocks are free, {self._free.total} were counted")
        starts = self._free.starts
        if any(a + self._free.lengths[a] >= b for a, b in pairwise(starts)):
            raise InternalError(f"free runs touch or overlap: {starts}")
        promised = sum(h.peak - len(h.blocks) for h in self._holdings.values())
        if promised != self._promised or not 0 <= promised <= self.free_blocks:
            raise InternalError(f"{promised} blocks are promised, {self._promised} counted, {self.free_blocks} free")

    def _take(self, count: int) -> list[int]:
        self._make_free(count)
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

    def _make_free(self, count: int) -> None:
        self._evict(count - self._free.total)

    def _evict(self, count: int) -> None:
        """Frees so many of the kept blocks, those given back longest ago."""
        if count > 0:
            self._give([self._kept.popitem(last=False)[0] for _ in range(count)])

    def _give(self, blocks: list[int]) -> None:
        if blocks:
            self._on_free(blocks)
        for block in blocks:
            self._free.give(block)
