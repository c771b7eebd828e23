"""Collections come when they are due, and take what was left in a cycle."""

from __future__ import annotations

import weakref

from trtpd.runtime.worker.garbage import EVERY_S, Collector


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_left_in_a_cycle_is_gone_after_the_next_collection() -> None:
    collector, knot = Collector(), weakref.ref(Knot())
    assert [collector.look(at_s) for at_s in (5.0, 6.0, 5.0 + 0.9 * EVERY_S)] == [False, False, False]
    assert collector.look(5.0 + EVERY_S)
    assert knot() is None
    assert not collector.look(6.0 + EVERY_S)
    assert collector.look(5.0 + 2 * EVERY_S)
