from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trtpd.build.quantise import group_of, pack, quantise_groups, unpack, widened_groups

VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**40), max_value=2.0**40)
Array = np.ndarray[Any, Any]


@given(hnp.arrays(np.int8, st.tuples(st.integers(1, 5), st.sampled_from([2, 8, 64])), elements=st.integers(-8, 7)))
def test_what_is_packed_reads_back(values: Array) -> None:
    packed = pack(values)
    assert packed.shape == (values.shape[0], values.shape[1] // 2)
    assert np.array_equal(unpack(packed), values)


@given(hnp.arrays(np.float32, (3, 64), elements=VALUES))
@example(np.full((3, 64), 6e-40, np.float32))  # whose squares a float32 can't hold
def test_int4_is_never_further_off_than_one_range_for_each_group(weight: Array) -> None:
    packed, scales = quantise_groups(weight, 32)
    assert scales.shape == (3, 2)
    largest = np.abs(weight.reshape(3, 2, 32)).max(axis=2).astype(np.float64)
    off = np.abs(widened_groups(packed, scales).astype(np.float64) - weight).reshape(3, 2, 32)
    plain = np.square(largest[:, :, None] / 8) * 32
    assert (np.square(off).sum(axis=2) <= np.maximum(1.001 * plain[:, :, 0], 1e-60)).all()


def test_a_groups_outlier_spoils_no_other_group() -> None:
    weight = np.random.default_rng(0).uniform(-1, 1, (4, 64)).astype(np.float32)
    weight[:, 0] = 1000
    off = np.abs(widened_groups(*quantise_groups(weight, 32)) - weight)
    assert off[:, 32:].max() < 0.13
    assert off[:, 1:32].max() > 0.5


@pytest.mark.parametrize(("columns", "group"), [(576, 64), (96, 32), (24, None)])
def test_a_group_divides_the_inputs(columns: int, group: int | None) -> None:
    assert group_of(columns) == group
