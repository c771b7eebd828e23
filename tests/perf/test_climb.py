from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtpd.perf.climb import next_to_try


def climb(values, *, first, stride=1, most=None):
    found: dict[int, float] = {}
    more = {} if most is None else {"most": lambda index: most[index]}
    while (index := next_to_try(len(values), found, first=first, stride=stride, **more)) is not None:
        assert index not in found
        assert 0 <= index < len(values)
        found[index] = values[index]
    return found


@st.composite
def peaks(draw):
    """Values that rise strictly to one peak and fall strictly behind it."""
    steps = st.lists(st.integers(1, 9), max_size=12)
    up, down = draw(steps), draw(steps)
    values = [0]
    for step in up:
        values.append(values[-1] + step)
    for step in down:
        values.append(values[-1] - step)
    return values


@given(peaks(), st.data(), st.integers(1, 4))
def test_the_peak_is_found_from_everywhere(values, data, stride):
    first = data.draw(st.integers(0, len(values) - 1))
    found = climb(values, first=first, stride=stride)
    assert max(found.values()) == max(values)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.data(), st.integers(1, 4))
def test_it_ends_whatever_the_values_are(values, data, stride):
    climb(values, first=data.draw(st.integers(0, len(values) - 1)), stride=stride)


def test_rates_that_could_not_give_more_are_left_out():
    rates = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    good = [1.0, 2.0, 2.9, 3.1, 1.0, 0.5]
    assert set(climb(good, first=2, stride=2, most=rates)) == {2, 3, 4}


def test_a_rate_that_is_hardly_served_is_left_downwards():
    rates = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert list(climb([0.9, 0.3, 0.1, 0.0, 0.0], first=2, stride=1, most=rates))[:2] == [2, 1]
