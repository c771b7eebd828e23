"""Who computes what: every head, row and column by someone, and only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trtpd_testing.tiny import CONFIG

from trtpd.build.hf_config import architecture_from_config
from trtpd.build.sharding import Shard, even_part, shard_of
from trtpd.errors import LayoutError
from trtpd.kv_transfer.layout import KVLayout


def shards(kv_heads: int, group: int, tp: int, **changes: Any) -> list[Shard]:
    arch = replace(
        architecture_from_config(CONFIG, Path("config.json")),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * group,
        **changes,
    )
    layout = KVLayout(num_layers=2, kv_heads=kv_heads, head_dim=4, tokens_per_block=32, dtype="f32", tp=tp)
    return [shard_of(arch, layout, rank) for rank in range(tp)]


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, int]:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return kv_heads, group, draw(st.integers(1, kv_heads * group))


@given(groups())
def test_every_query_head_is_computed_once_beside_its_kv_head(shape: tuple[int, int, int]) -> None:
    kv_heads, group, _ = shape
    made = shards(*shape)
    assert [head for shard in made for head in shard.query_heads] == list(range(kv_heads * group))
    for shard in made:
        assert {head // group for head in shard.query_heads} == set(shard.kv_heads)
        assert len(shard.query_heads) % len(shard.kv_heads) == 0


@given(groups())
def test_mlp_and_vocabulary_are_split_evenly(shape: tuple[int, int, int]) -> None:
    made = shards(*shape, intermediate_size=101, vocab_size=203)
    for parts, whole in (([one.inner for one in made], 101), ([one.vocabulary for one in made], 203)):
        assert [index for part in parts for index in part] == list(range(whole))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_three_kv_heads_on_two_ranks_are_two_and_one() -> None:
    made = shards(3, 3, 2)
    assert [(len(one.query_heads), len(one.kv_heads)) for one in made] == [(6, 2), (3, 1)]


def test_ranks_that_share_a_kv_head_share_out_its_query_heads() -> None:
    made = shards(3, 3, 8)
    assert [list(one.kv_heads) for one in made] == [[0], [0], [0], [1], [1], [1], [2], [2]]
    assert [len(one.query_heads) for one in made] == [1, 1, 1, 1, 1, 1, 2, 1]


def test_more_ranks_than_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match="tp is 10, but the model has 9 attention heads"):
        shards(3, 3, 10)


def test_an_even_part_of_a_part_stays_inside() -> None:
    assert [even_part(range(5, 12), 3, part) for part in range(3)] == [range(5, 8), range(8, 10), range(10, 12)]
