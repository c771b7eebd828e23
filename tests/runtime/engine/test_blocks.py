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


class Traffic(RuleBasedStateMachine):
    """Allocates, grows and frees at random beside a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.blocks = BlockAllocator(24, on_free=self.freed.extend)
        self.model: dict[int, tuple[list[int], int]] = {}
        self.number = 0

    owners = Bundle("owners")

    @rule(target=owners, count=st.integers(1, 12), growth=st.integers(0, 8))
    def allocate(self, count: int, growth: int) -> int:
        self.number += 1
        available = self.blocks.available_blocks
        got = self.blocks.allocate(self.number, count, peak=count + growth)
        assert (got is not None) == (count + growth <= available)
        if got is not None:
            assert len(got) == count
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
            assert self.freed == self.model.pop(owner)[0]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.owners() == set(self.model)
        for owner, (held, _) in self.model.items():
            assert list(self.blocks.blocks_of(owner)) == held
        peaks = sum(peak for _, peak in self.model.values())
        assert self.blocks.available_blocks == 24 - peaks


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
