"""Timers against a plain list, and the wake-ups they ask for."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from trtpd.runtime.core.timers import Timers

times = st.floats(0.0, 100.0)


@given(st.lists(st.tuples(times, st.booleans()), max_size=200), times)
def test_what_is_due_fires_once_in_order_and_what_was_cancelled_does_not(
    wanted: list[tuple[float, bool]], now_s: float
) -> None:
    timers = Timers()
    fired: list[float] = []
    made = [(timers.at(at_s, partial(fired.append, at_s)), cancel) for at_s, cancel in wanted]
    for timer, cancel in made:
        if cancel:
            timers.cancel(timer)
            timers.cancel(timer)
    timers.fire(now_s)
    kept = sorted(at_s for at_s, cancel in wanted if not cancel)
    assert fired == [at_s for at_s in kept if at_s <= now_s]
    assert len(timers) == len([at_s for at_s in kept if at_s > now_s])
    assert timers.next_s() == min((at_s for at_s in kept if at_s > now_s), default=None)


def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers()
    for number in range(10_000):
        timers.cancel(timers.at(1e9 + number, lambda: None))
    assert len(timers._heap) < 200


@given(st.lists(st.tuples(times, st.floats(0.0, 5.0)), max_size=60))
def test_a_driver_that_obeys_wake_ups_misses_no_instant(plan: list[tuple[float, float]]) -> None:
    timers, now_s = Timers(), 0.0
    asked: list[float] = []
    fired: list[float] = []
    for at_s, wait_s in plan:
        due_s = now_s + at_s
        timers.at(due_s, partial(fired.append, due_s))
        wake_s = timers.wake_s(now_s, ticked=False)
        asked += [] if wake_s is None else [wake_s]
        end_s = now_s + wait_s
        while asked and min(asked) <= end_s:
            now_s = max(now_s, min(asked))
            asked.remove(min(asked))
            timers.fire(now_s)
            wake_s = timers.wake_s(now_s, ticked=True)
            asked += [] if wake_s is None else [wake_s]
        now_s = end_s
        next_s = timers.next_s()
        assert next_s is None or next_s > now_s
    assert fired == sorted(fired)
