from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtpd_testing.kv import LAYOUT

from trtpd.errors import LayoutError

COUNTS = st.integers(1, 64)


@given(heads=COUNTS, tp=st.integers(1, 80))
def test_the_ranks_of_any_tp_hold_every_head_and_share_heads_only_when_there_are_too_few(heads, tp):
    layout = replace(LAYOUT, kv_heads=heads, tp=tp)
    held = [head for rank in range(tp) for head in layout.rank_heads(rank)]
    assert set(held) == set(range(heads))
    assert sorted(held) == held
    assert len(held) == max(heads, tp)


@given(layers=COUNTS, pp=st.integers(1, 64))
def test_the_ranks_of_any_pp_hold_every_layer_once(layers, pp):
    layout = replace(LAYOUT, num_layers=layers, pp=pp)
    assert [layer for rank in range(pp) for layer in layout.rank_layers(rank)] == list(range(layers))


def test_three_heads_on_two_ranks_are_two_and_one():
    layout = replace(LAYOUT, kv_heads=3, tp=2)
    assert [list(layout.rank_heads(rank)) for rank in range(2)] == [[0, 1], [2]]


@given(st.integers(1, 10_000))
def test_blocks_hold_all_tokens_and_not_one_block_more(tokens):
    blocks = LAYOUT.blocks_for(tokens)
    assert (blocks - 1) * LAYOUT.tokens_per_block < tokens <= blocks * LAYOUT.tokens_per_block


def test_pairing_ignores_tp_and_the_fingerprint_does_not():
    other = replace(LAYOUT, tp=3)
    assert other.pairing_key == LAYOUT.pairing_key
    assert other.fingerprint != LAYOUT.fingerprint
    assert replace(LAYOUT, dtype="bf16").pairing_key != LAYOUT.pairing_key


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"tp": -1}, {"head_dim": 1.5}, {"dtype": "f8"}])
def test_sizes_that_can_not_be_are_refused_by_name(wrong):
    with pytest.raises(LayoutError, match=next(iter(wrong))):
        replace(LAYOUT, **wrong)


def test_only_f32_and_bf16_pair_across_dtypes_and_only_where_it_was_declared():
    def keys(convert_dtype):
        dtypes: tuple[Any, ...] = ("f32", "bf16", "f16", "fp8")
        return [replace(LAYOUT, dtype=dtype).pairing_key_for(convert_dtype=convert_dtype) for dtype in dtypes]

    assert len(set(keys(convert_dtype=False))) == 4
    f32, bf16, f16, fp8 = keys(convert_dtype=True)
    assert f32 == bf16
    assert len({f32, f16, fp8}) == 3
