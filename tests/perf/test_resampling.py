"""Intervals hold the truth as often as they say, for independent values of a known distribution."""

from __future__ import annotations

import numpy as np
import pytest

from trtpd.perf.report import interval, percent
from trtpd.perf.resampling import Interval, distribution, grouped_distribution, rank_bounds, share, share_bounds

RUNS = 150
LEAST = 0.93


def generators() -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(RUNS)]


def held(found: list[Interval], truth: float) -> float:
    """How often the truth lay within."""
    inside = [(one.low is None or one.low <= truth) and (one.high is None or truth <= one.high) for one in found]
    return sum(inside) / len(found)


def width(found: list[Interval]) -> float:
    """At the median, of those with both bounds."""
    return float(np.median([one.high - one.low for one in found if one.low is not None and one.high is not None]))


@pytest.mark.parametrize("count", [50, 100, 500])
def test_intervals_of_percentiles_hold_the_truth_and_are_not_absurdly_wide(count: int) -> None:
    drawn = [distribution(list(rng.exponential(size=count)), rng) for rng in generators()]
    middle = [one.p50 for one in drawn if one is not None]
    tail = [one.p99 for one in drawn if one is not None]
    assert held(middle, np.log(2.0)) >= LEAST
    assert held(tail, np.log(100.0)) >= LEAST
    # The standard error of a median of such values is 1 / sqrt(count).
    assert width(middle) < 1.3 * 2 * 1.96 / np.sqrt(count)
    if count == 500:
        assert width(tail) < 0.75 * np.log(100.0)
    else:
        assert all(one.high is None and one.low is not None for one in tail)


@pytest.mark.parametrize(("count", "chance", "usual"), [(20, 0.97, 0.15), (180, 0.99, 0.029), (400, 0.7, 0.09)])
def test_intervals_of_shares_hold_the_truth_and_are_never_without_width(
    count: int, chance: float, usual: float
) -> None:
    drawn = [share(list(rng.random(count) < chance), rng) for rng in generators()]
    found = [one for one in drawn if one is not None]
    assert held(found, chance) >= LEAST
    assert width(found) < 1.7 * usual  # of the textbook's 2 x 1.96 standard errors
    assert all(one.low is not None and one.high is not None and one.low < one.high for one in found)


def test_intervals_over_token_gaps_know_that_those_of_a_request_are_alike() -> None:
    def requests(rng: np.random.Generator, count: int) -> list[list[float]]:
        paces = np.exp(rng.normal(0.0, 0.5, count))
        return [list(pace * rng.exponential(size=rng.integers(5, 40))) for pace in paces]

    truth = np.percentile(np.concatenate(requests(np.random.default_rng(RUNS), 20000)), (50, 99))
    drawn = [grouped_distribution(requests(rng, 60), rng) for rng in generators()]
    middle = [one.p50 for one in drawn if one is not None]
    assert held(middle, truth[0]) >= LEAST
    assert held([one.p99 for one in drawn if one is not None], truth[1]) >= LEAST - 0.02
    assert width(middle) < 0.7 * truth[0]


def test_a_share_is_bounded_by_what_could_have_been_missed() -> None:
    assert share_bounds(20, 20) == (pytest.approx(0.025 ** (1 / 20)), 1.0)
    assert share_bounds(0, 20) == (0.0, pytest.approx(1.0 - 0.025 ** (1 / 20)))
    assert share_bounds(7, 20) == (pytest.approx(0.15391, abs=1e-5), pytest.approx(0.59219, abs=1e-5))  # from tables


@pytest.mark.parametrize(("count", "bounded"), [(367, False), (368, True)])
def test_a_p99_is_bounded_from_above_once_so_many_would_not_all_lie_below_it(count: int, bounded: bool) -> None:
    assert (0.99**count <= 0.025) is bounded
    low, high = rank_bounds(np.arange(count, dtype=np.float64), 0.99)
    assert low is not None
    assert (high is not None) is bounded


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.1, 1.4, "1.2 (1.1 to 1.4) s"),
        (1.1, None, "1.2 (at least 1.1) s"),
        (None, 1.4, "1.2 (at most 1.4) s"),
        (None, None, "1.2 (not bounded) s"),
    ],
)
def test_an_open_bound_is_said_in_words(low: float | None, high: float | None, said: str) -> None:
    assert interval(Interval(1.2, low, high), unit="s") == said
    assert percent(Interval(0.97, 0.9, 0.99)) == "97.0% (90.0 to 99.0)"
