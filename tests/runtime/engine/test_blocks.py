from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from trtpd.errors import InternalError
from trtpd.runtime.engine.blocks import BlockAllocator


def test_a_sequence_gets_the_shortest_run_that_fits():
    blocks = BlockAllocator(20)
    for owner, count in (("a", 5), ("b", 1), ("c", 3), ("d", 1)):
        blocks.allocate(owner, count)
    blocks.free("a")
    blocks.free("c")
    assert blocks.allocate("e", 2) == (6, 7)
    assert blocks.allocate("f", 4) == (0, 1, 2, 3)
    assert blocks.allocate("g", 6) == (10, 11, 12, 13, 14, 15)


def test_without_a_run_long_enough_it_gets_few_pieces():
    blocks = BlockAllocator(10)
    for owner, count in (("a", 3), ("b", 1), ("c", 2), ("d", 1), ("e", 2), ("f", 1)):
        blocks.allocate(owner, count)
    for owner in "ace":
        blocks.free(owner)
    assert blocks.allocate("g", 5) == (0, 1, 2, 4, 5)


def test_growth_takes_the_neighbour_when_it_can():
    blocks = BlockAllocator(10)
    blocks.allocate("a", 2, peak=4)
    assert blocks.grow("a") == 2
    blocks.allocate("b", 1)
    assert blocks.blocks_of("b") == [3]
    assert blocks.grow("a") == 4
    assert list(blocks.blocks_of("a")) == [0, 1, 2, 4]


def test_what_is_promised_is_not_given_to_others():
    blocks = BlockAllocator(10)
    blocks.allocate("a", 2, peak=8)
    assert (blocks.free_blocks, blocks.available_blocks) == (8, 2)
    assert blocks.allocate("b", 3) is None
    assert blocks.allocate("b", 1, peak=3) is None
    assert blocks.set_peak("a", 3)
    assert blocks.allocate("b", 7) is not None
    assert not blocks.set_peak("a", 4)
    blocks.check_integrity()


def test_freeing_is_told_before_the_blocks_can_be_had_again():
    told: list[list[int]] = []
    blocks = BlockAllocator(4, on_free=lambda freed: told.append([*freed, blocks.free_blocks]))
    blocks.allocate("a", 3)
    blocks.free("a")
    assert told == [[0, 1, 2, 1]]


def test_misuse_is_a_bug_and_says_so():
    blocks = BlockAllocator(4)
    blocks.allocate("a", 1)
    for misuse in (
        lambda: blocks.allocate("a", 1),
        lambda: blocks.allocate("b", 0),
        lambda: blocks.allocate("b", 3, peak=2),
        lambda: blocks.grow("a"),
        lambda: blocks.free("nobody"),
        lambda: blocks.set_peak("a", 0),
        lambda: BlockAllocator(0),
    ):
        with pytest.raises(InternalError):
            misuse()
    blocks.check_integrity()


def test_an_integrity_check_sees_a_block_held_twice():
    blocks = BlockAllocator(4)
    blocks.allocate("a", 2)
    blocks.blocks_of("a").append(3)  # type: ignore[attr-defined]
    with pytest.raises(InternalError):
        blocks.check_integrity()


def test_shared_blocks_are_freed_by_their_last_owner():
    told: list[int] = []
    blocks = BlockAllocator(8, on_free=told.extend)
    blocks.allocate("a", 3)
    assert blocks.allocate("b", 4, shared=[0, 1]) == (0, 1, 3, 4)
    assert blocks.available_blocks == 3
    blocks.free("a")
    assert told == [2]
    blocks.free("b")
    assert told == [2, 0, 1, 3, 4]
    blocks.check_integrity()


def test_kept_blocks_count_as_free_and_go_when_they_are_needed_the_end_of_the_oldest_first():
    told: list[int] = []
    blocks = BlockAllocator(6, on_free=told.extend, keeps=lambda block: block < 4)
    blocks.allocate("a", 2)
    blocks.allocate("b", 4)
    blocks.free("a")
    blocks.free("b")
    assert told == [4, 5]
    assert (blocks.kept_blocks, blocks.available_blocks) == (4, 6)
    assert blocks.allocate("c", 4, shared=[2, 3]) == (2, 3, 4, 5)
    assert told == [4, 5]
    blocks.allocate("d", 1)
    assert told == [4, 5, 1]
    assert blocks.kept_blocks == 1
    blocks.check_integrity()


def test_no_more_blocks_are_kept_than_asked_for():
    told: list[int] = []
    blocks = BlockAllocator(6, on_free=told.extend, keeps=lambda block: True, keep_at_most=2)
    blocks.allocate("a", 4)
    blocks.free("a")
    assert told == [3, 2]
    blocks.check_integrity()


def test_a_kept_block_that_is_shared_takes_room_and_one_in_use_does_not():
    blocks = BlockAllocator(6, keeps=lambda block: True)
    blocks.allocate("a", 2)
    blocks.allocate("b", 2)
    blocks.free("a")
    assert blocks.needed(4, [0, 1]) == 4
    assert blocks.needed(4, [2, 3]) == 2
    assert blocks.allocate("c", 5, shared=[0, 1]) is None
    assert blocks.allocate("d", 6, shared=[2, 3]) is not None
    blocks.check_integrity()


class Traffic(RuleBasedStateMachine):
    """Allocates, shares, grows and frees at random beside a plain model. Blocks with an even number are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.blocks = BlockAllocator(24, on_free=self.freed.extend, keeps=lambda block: block % 2 == 0, keep_at_most=6)
        self.model: dict[int, tuple[list[int], int]] = {}
        self.number = 0

    owners = Bundle("owners")

    @rule(target=owners, count=st.integers(1, 12), growth=st.integers(0, 8))
    def allocate(self, count: int, growth: int) -> int:
        return self._allocate(count, growth, [])

    @rule(target=owners, owner=owners, common=st.integers(0, 6), more=st.integers(1, 6), growth=st.integers(0, 4))
    def share(self, owner: int, common: int, more: int, growth: int) -> int:
        held, _ = self.model.get(owner, ([], 0))
        shared = held[:common]
        return self._allocate(len(shared) + more, growth, shared)

    @rule(target=owners, more=st.integers(1, 4))
    def revive(self, more: int) -> int:
        """Shares what nobody has any more."""
        in_use = {block for held, _ in self.model.values() for block in held}
        kept = [block for block in self.kept() if block not in in_use][:3]
        return self._allocate(len(kept) + more, 0, kept)

    def kept(self) -> list[int]:
        return list(self.blocks._kept)

    def _allocate(self, count: int, growth: int, shared: list[int]) -> int:
        self.number += 1
        self.freed.clear()
        available, kept = self.blocks.available_blocks, set(self.kept())
        needed = count + growth - sum(block not in kept for block in shared)
        got = self.blocks.allocate(self.number, count, peak=count + growth, shared=shared)
        assert (got is not None) == (needed <= available)
        if got is not None:
            assert len(set(got)) == count
            assert list(got[: len(shared)]) == shared
            assert not set(got) & (kept - set(self.freed) - set(shared))
            self.model[self.number] = (list(got), count + growth)
        return self.number

    @rule(owner=owners)
    def grow(self, owner: int) -> None:
        held, peak = self.model.get(owner, ([], 0))
        if len(held) < peak:
            held.append(self.blocks.grow(owner))

    @rule(owner=owners, change=st.integers(-4, 4))
    def set_peak(self, owner: int, change: int) -> None:
        if owner in self.model:
            held, peak = self.model[owner]
            new = max(peak + change, len(held))
            if self.blocks.set_peak(owner, new):
                self.model[owner] = (held, new)

    @rule(owner=consumes(owners))
    def free(self, owner: int) -> None:
        if owner in self.model:
            self.freed.clear()
            self.blocks.free(owner)
            held, _ = self.model.pop(owner)
            others = {block for blocks, _ in self.model.values() for block in blocks}
            gone = [block for block in held if block not in others]
            assert {block for block in gone if block % 2} <= set(self.freed)
            assert not set(self.freed) & others

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.owners() == set(self.model)
        for owner, (held, _) in self.model.items():
            assert list(self.blocks.blocks_of(owner)) == held
        in_use = len({block for held, _ in self.model.values() for block in held})
        promised = sum(peak - len(held) for held, peak in self.model.values())
        assert self.blocks.available_blocks == 24 - in_use - promised


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
