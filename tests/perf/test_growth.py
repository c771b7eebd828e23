"""What is flat is called flat and what grows is found, also under noise that wanders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.perf.growth import HOUR_S, SPANS, growth

AT_S = np.arange(600.0, 3600.0, 10.0)


def wandering(seed: int, *, step: float, back: float) -> np.ndarray:
    """What a process holds goes up and down, and each value is near the one before."""
    rng, value, found = np.random.default_rng(seed), 0.0, []
    for _ in AT_S:
        value = back * value + rng.normal(0.0, step)
        found.append(value)
    return np.array(found)


@given(st.floats(0.0, 1e12))
def test_what_stays_is_flat(value: float) -> None:
    found = growth(AT_S, np.full(len(AT_S), value), limit_per_hour=1e-3 * max(value, 1.0))
    assert found.verdict == "flat"
    assert found.level == pytest.approx(value)
    assert found.per_hour == pytest.approx(0.0, abs=1e-6 * max(value, 1.0))


@given(st.floats(0.1, 1e6), st.floats(0.0, 1e6))
def test_a_line_is_found_again(per_hour: float, base: float) -> None:
    found = growth(AT_S, base + per_hour * AT_S / HOUR_S, limit_per_hour=per_hour / 2)
    assert found.per_hour == pytest.approx(per_hour, rel=1e-3, abs=1e-6 * base)
    assert found.later_per_hour == pytest.approx(per_hour, rel=1e-2, abs=1e-6 * base)
    assert found.verdict == "grows"


def test_growth_below_the_limit_and_falling_are_flat() -> None:
    assert growth(AT_S, 100.0 + AT_S / HOUR_S, limit_per_hour=2.0).verdict == "flat"
    assert growth(AT_S, 100.0 - 50.0 * AT_S / HOUR_S, limit_per_hour=2.0).verdict == "flat"


def test_noise_that_wanders_is_hardly_ever_called_growth() -> None:
    found = [growth(AT_S, wandering(seed, step=0.3, back=0.9), limit_per_hour=1.0) for seed in range(200)]
    assert sum(one.verdict == "grows" for one in found) <= 200 * 0.06
    assert sum(one.low <= 0.0 <= one.high for one in found) >= 200 * 0.88


def test_growth_under_such_noise_is_found() -> None:
    found = [
        growth(AT_S, wandering(seed, step=0.3, back=0.9) + 8.0 * AT_S / HOUR_S, limit_per_hour=1.0)
        for seed in range(50)
    ]
    assert all(one.verdict == "grows" for one in found)
    assert sum(one.low <= 8.0 <= one.high for one in found) >= 50 * 0.86


def test_too_much_noise_for_a_verdict_is_said() -> None:
    assert growth(AT_S, wandering(1, step=30.0, back=0.5), limit_per_hour=0.01).verdict == "unclear"


def test_what_fills_up_and_then_stays_shows_in_the_second_half() -> None:
    found = growth(AT_S, np.minimum(AT_S, 1800.0), limit_per_hour=1.0)
    assert found.per_hour > 100.0
    assert found.later_per_hour == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, 2 * SPANS - 1])
def test_too_few_samples_are_said(count: int) -> None:
    assert growth(AT_S[:count], AT_S[:count], limit_per_hour=1.0).verdict == "too short"


@pytest.mark.parametrize("at", [3, 60, 150, 225, len(AT_S) - 1])
def test_one_step_of_an_allocator_is_told_from_growth(at: int) -> None:
    steps = 84.0 + 0.9 * (np.arange(len(AT_S)) >= at)
    found = growth(AT_S, steps, limit_per_hour=1.0)
    assert found.verdict in ("flat", "one step")
    assert (found.step, found.step_at_s) == (pytest.approx(0.9), AT_S[at])
    assert growth(AT_S, steps, limit_per_hour=0.5).verdict != "one step"


@given(st.floats(1.3, 1e3))
def test_no_line_and_no_staircase_is_taken_for_one_step(per_hour: float) -> None:
    line = 84.0 + per_hour * AT_S / HOUR_S
    assert growth(AT_S, line, limit_per_hour=1.0).verdict == "grows"
    stairs = 84.0 + 0.9 * np.floor(3.0 * per_hour * AT_S / HOUR_S)
    assert growth(AT_S, stairs, limit_per_hour=1.0).verdict in ("grows", "unclear")
