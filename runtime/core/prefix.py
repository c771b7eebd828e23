"""Which prompt blocks each instance was sent and should still hold: the router's own record, no instance is asked.

A block's hash covers all tokens before it too, so who holds block n of a prompt holds its first n blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

HOLDERS_AT_MOST = 16
"""Instances remembered per block: enough to choose from, and a bound for the hottest prefix."""


class Prefixes:
    """Bounded by the instances' own caches: of each, the blocks sent last."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, dict[str, None]] = {}

    def sent(self, instance: str, hashes: Sequence[int], *, most_blocks: int) -> None:
        """A prompt goes there. Its later blocks are forgotten before its earlier ones."""
        held = self._held.setdefault(instance, OrderedDict())
        for block in reversed(hashes):
            if block in held:
                held.move_to_end(block)
                continue
            holders = self._holders.setdefault(block, {})
            if len(holders) < HOLDERS_AT_MOST:
                held[block] = None
                holders[instance] = None
        while len(held) > most_blocks:
            self._drop(held.popitem(last=False)[0], instance)

    def evicted(self, instance: str, hashes: Sequence[int]) -> None:
        """By its own word it holds these no more."""
        held = self._held.get(instance)
        if held is not None:
            for block in hashes:
                if block in held:
                    del held[block]
                    self._drop(block, instance)

    def forget(self, instance: str) -> None:
        """It restarted or is lost: its cache is gone."""
        for block in self._held.pop(instance, ()):
            self._drop(block, instance)

    def _drop(self, block: int, instance: str) -> None:
        holders = self._holders[block]
        del holders[instance]
        if not holders:
            del self._holders[block]

    def hits(self, hashes: Sequence[int]) -> dict[str, int]:
        """Instances that should hold a beginning of this prompt, and how many blocks of it."""
        if not hashes or not self._holders:
            return {}
        low, high = 0, len(hashes)
        while low < high:  # somebody holds the first `low` blocks
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in self._holders else (low, middle - 1)
        found: dict[str, int] = {}
        depth = low
        while depth > 0 and len(found) < HOLDERS_AT_MOST:
            for instance in self._holders.get(hashes[depth - 1], ()):
                found.setdefault(instance, depth)
            depth //= 2
        return found

    def blocks_of(self, instance: str) -> int:
        """How many blocks it is taken to hold."""
        return len(self._held.get(instance, ()))

    def check_integrity(self) -> bool:
        """Whether both indexes say the same."""
        one = {(instance, block) for instance, held in self._held.items() for block in held}
        other = {(instance, block) for block, holders in self._holders.items() for instance in holders}
        return one == other
