from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpd.errors import InputError
from trtpd.perf.arrivals import BOUNDS, RATES, Arrivals, parse
from trtpd.perf.arrivals import SHAPES as SHAPE_TABLE

SHAPES = ["even", "poisson", "gamma:0.5", "gamma:3", "bursts:2,6", "ramp:0,2", "ramp:3,1", "ramp:1,1"]


def instants(shape: str, count: int = 4000, rate: float = 5.0, seed: int = 1):
    return parse(shape).instants(count, rate, np.random.default_rng(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_keeps_the_mean_rate_it_was_asked_for(shape):
    found = instants(shape)
    assert len(found) == 4000
    assert np.all(np.diff(found) >= 0)
    assert found[0] >= 0
    assert 4000 / found[-1] == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_seeds_give_equal_instants_and_a_shape_survives_its_text(shape):
    assert np.array_equal(instants(shape, seed=7), instants(str(parse(shape)), seed=7))


@settings(max_examples=20, deadline=None)
@given(cv=st.floats(0.2, 4.0))
def test_gamma_gaps_have_the_coefficient_of_variation_asked_for(cv):
    gaps = np.diff(Arrivals(shape="gamma", numbers=(cv,)).instants(20000, 10.0, np.random.default_rng(3)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15)


def test_bursts_are_silent_between_and_dense_within():
    phase = instants("bursts:2,6") % 8.0
    assert np.all(phase <= 2.0)


def test_a_ramp_has_three_times_as_many_arrivals_in_its_second_half_as_one_from_zero_must():
    found = instants("ramp:0,1")
    half_s = 4000 / 5.0 / 2
    assert (found > half_s).sum() / (found <= half_s).sum() == pytest.approx(3.0, rel=0.15)


ENDS = st.sampled_from([0.0, 1e-6, 1.0, 1e6]) | st.floats(1e-6, 1e6)


@settings(max_examples=80, deadline=None)
@given(
    ends=st.tuples(ENDS, ENDS).filter(any),
    count=st.integers(1, 3000),
    rate=st.floats(0.01, 1e3),
    seed=st.integers(0, 1 << 32),
)
def test_a_ramp_has_all_its_requests_within_the_time_that_the_mean_rate_gives_them(ends, count, rate, seed):
    found = parse(f"ramp:{ends[0]!r},{ends[1]!r}").instants(count, rate, np.random.default_rng(seed))
    length_s = count / rate
    assert len(found) == count
    assert np.all(np.diff(found) >= 0)
    assert found[0] >= 0.0
    assert found[-1] <= length_s * (1 + 1e-12)
    # the instants sent back through the expected count are even draws: no rank is far from its place
    time = found / length_s
    first, last = ends[0] / sum(ends), ends[1] / sum(ends)
    share = 2.0 * first * time + (last - first) * time**2
    ranks = (np.arange(count) + 0.5) / count
    assert np.max(np.abs(share - ranks)) < 3.5 / np.sqrt(count)


@pytest.mark.parametrize("seed", range(5))
def test_a_ramp_to_zero_ends_when_its_time_is_over(seed):
    found = instants("ramp:1,0", count=200, rate=1.0, seed=seed)
    assert 150.0 < found[-1] <= 200.0


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("wave", "there is no shape 'wave'"),
        ("gamma", "gamma takes 1 numbers"),
        ("gamma:0", "CV is 0"),
        ("gamma:x", "'x' is not numbers"),
        ("bursts:1", "bursts takes 2 numbers"),
        ("ramp:0,0", "both 0"),
        ("ramp:nan,1", "A is nan"),
        ("gamma:1e-200", "CV is 1e-200; it must lie between"),
        ("gamma:1e200", r"CV is 1e\+200"),
        ("bursts:1e-300,1", "ON is 1e-300"),
        ("ramp:1e308,1e308", r"A is 1e\+308"),
    ],
)
def test_a_wrong_shape_is_named(text, fault):
    with pytest.raises(InputError, match=fault):
        parse(text)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf")])
def test_a_rate_must_be_above_zero(rate):
    with pytest.raises(InputError, match="must be above 0"):
        Arrivals().instants(10, rate, np.random.default_rng(0))


@settings(max_examples=60, deadline=None)
@given(text=st.sampled_from(list(BOUNDS)), ends=st.tuples(st.booleans(), st.booleans()), rate=st.sampled_from(RATES))
def test_the_ends_of_what_is_taken_give_instants_that_can_be_waited_for(text, ends, rate):
    shape = next(name for name, (_, numbers) in SHAPE_TABLE.items() if text in numbers)
    numbers = ",".join(str(BOUNDS[name][end]) for name, end in zip(SHAPE_TABLE[shape][1], ends, strict=False))
    found = parse(f"{shape}:{numbers}").instants(50, rate, np.random.default_rng(1))
    assert np.all(np.isfinite(found))
    assert np.all(np.diff(found) >= 0)
