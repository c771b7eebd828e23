"""What is learned of a step's two parts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.runtime.core.learned import NEWS, Learned

FIXED_S, EACH_S = 0.02, 0.0005
truths = st.floats(0.1, 10.0)


def seen(learned: Learned, batch: int, truth: tuple[float, float]) -> bool:
    fixed_s, rest_s = FIXED_S, EACH_S * batch
    step_s = fixed_s * truth[0] + rest_s * truth[1]
    return learned.note(fixed_s / step_s, rest_s / step_s)


@given(fixed=truths, rest=truths)
def test_steps_of_many_lengths_tell_both_parts(fixed: float, rest: float) -> None:
    learned = Learned()
    for batch in [1, 64, 16, 128, 4, 32] * 40:
        seen(learned, batch, (fixed, rest))
    for batch in (1, 128):
        true_s, said_s = (FIXED_S * a + EACH_S * b * batch for a, b in ((fixed, rest), learned.parts))
        assert said_s == pytest.approx(true_s, rel=2 * NEWS)


@given(batch=st.integers(1, 64), fixed=truths, rest=truths)
def test_steps_that_are_all_alike_scale_both_parts_alike(batch: int, fixed: float, rest: float) -> None:
    learned = Learned()
    for _ in range(20):
        seen(learned, batch, (fixed, rest))
    assert learned.parts[0] == pytest.approx(learned.parts[1])


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 10.0)), min_size=1, max_size=100))
def test_no_part_is_ever_negative_nor_both_nothing(steps: list[tuple[int, float]]) -> None:
    learned = Learned()
    for batch, step_s in steps:
        learned.note(FIXED_S / step_s, EACH_S * batch / step_s)
        assert min(learned.parts) >= 0.0
        assert max(learned.parts) > 0.0


def test_what_changes_by_little_is_no_news() -> None:
    learned = Learned()
    assert seen(learned, 4, (1.5, 1.5))
    assert not any(seen(learned, 4, (1.55, 1.55)) for _ in range(200))


def test_a_part_that_hardly_counts_is_no_news_however_often_it_doubles() -> None:
    chance, learned = random.Random(1), Learned()
    news = []
    for _ in range(2000):
        step_s = FIXED_S * chance.uniform(0.9, 1.1)  # whatever the batch
        news.append(learned.note(FIXED_S / step_s, EACH_S * chance.choice([1, 2, 4, 64, 128]) / step_s))
    assert sum(news[300:]) < 10
