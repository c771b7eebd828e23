from __future__ import annotations

import numpy as np
import pytest

from trtpd.perf.instruments_agree import Agreement, RunLatencies, agreement
from trtpd.perf.perf_analyzer import latencies


def runs(count: int, *, of: int = 2, slower: float = 1.0, noise: float = 0.01, seed: int = 0) -> list[RunLatencies]:
    """Requests whose lengths differ tenfold, the same in each run."""
    lengths = np.random.default_rng(7).uniform(0.1, 1.0, count)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(of):
        first = slower * lengths * rng.lognormal(0.0, noise, count)
        gaps = slower * 0.01 * rng.lognormal(0.0, noise, (count, 5))
        arrivals = [[one, *(one + np.cumsum(each))] for one, each in zip(first, gaps, strict=True)]
        found.append(latencies([(10.0 * n, [10.0 * n + at for at in one]) for n, one in enumerate(arrivals)]))
    return found


def compared(theirs: list[RunLatencies], ours: list[RunLatencies]) -> Agreement:
    return agreement("concurrency 2", theirs, ours, np.random.default_rng(0))


def test_both_agree_where_the_whole_interval_of_both_ratios_is_within_a_tenth() -> None:
    found = compared(runs(60), runs(60, seed=1, slower=1.03))
    assert found.agree == "yes"
    for ratio in found.ratios:
        assert ratio.value == pytest.approx(1.03, abs=0.01)
        assert 1.0 < ratio.low <= ratio.value <= ratio.high < 1.06
    assert (found.pairs, found.turns) == (120, 2)


def test_what_requests_differ_by_is_no_uncertainty_of_the_ratio() -> None:
    """Alone, the median of these sixty is known to a quarter at best."""
    ratio = compared(runs(60), runs(60, seed=1)).ttft_ratio
    assert ratio.high - ratio.low < 0.06


def test_a_ratio_that_surely_left_a_tenth_is_a_difference() -> None:
    assert compared(runs(60), runs(60, seed=1, slower=1.3)).agree == "no"


@pytest.mark.parametrize(("slower", "noise"), [(1.25, 0.5), (1.0, 0.5), (1.1, 0.03)])
def test_a_ratio_that_may_lie_on_either_side_shows_nothing(slower: float, noise: float) -> None:
    assert compared(runs(20, noise=noise), runs(20, noise=noise, seed=1, slower=slower)).agree == "not shown"


def test_a_ratio_of_a_few_requests_has_no_bounds_and_shows_nothing() -> None:
    found = compared(runs(2), runs(2))
    assert (found.ttft_ratio.low, found.ttft_ratio.high, found.agree) == (None, None, "not shown")


def test_what_changed_between_two_turns_is_in_the_interval_and_one_turn_shows_nothing() -> None:
    noisy = [*runs(60, of=1), *runs(60, of=1, slower=1.4, seed=2)]
    found = compared(runs(60), noisy)
    assert found.ttft_ratio.low < 1.05
    assert found.ttft_ratio.high > 1.35
    assert found.agree == "not shown"
    assert compared(runs(60, of=1), runs(60, of=1, slower=1.4)).agree == "not shown"


def test_requests_are_paired_by_their_number_whatever_the_order_of_sending() -> None:
    theirs = runs(60)
    ours = [
        latencies([(float(-number), [run.ttft_s[number] - number]) for number in run.ttft_s], numbers=list(run.ttft_s))
        for run in runs(60, seed=1)
    ]
    ratio = compared(theirs, ours).ttft_ratio
    assert ratio.high - ratio.low < 0.06


def test_figures_where_requests_did_not_finish_are_not_compared() -> None:
    whole = latencies([(0.0, [0.1, 0.2, 0.3])] * 9)
    part = latencies([(0.0, [0.1, 0.2, 0.3])] * 9, unfinished={"failed:client_timeout": 2})
    assert compared([whole, whole], [whole, whole]).agree == "yes"
    found = compared([whole, whole], [part, part])
    assert found.agree == "not compared"
    assert found.ours.unfinished == {"failed:client_timeout": 4}
    assert compared([whole, whole], []).agree == "not compared"


def test_an_answer_of_one_response_leaves_its_pace_out_and_not_its_first_token() -> None:
    single = latencies([(0.0, [0.1])] * 9)
    found = compared([single, single], [single, single])
    assert (found.itl_ratio, found.agree) == (None, "yes")
