from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtpd.build.kv_mapping import Side, mapping_fault, tp_peers

POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(
    kv_heads=st.sampled_from([1, 2, 4, 8, 16, 32]),
    layers=st.integers(4, 9),
    source=st.tuples(POWERS, st.integers(1, 4)),
    sink=st.tuples(POWERS, st.integers(1, 4)),
)
def test_between_powers_of_two_every_layer_and_head_arrives_exactly_once(
    kv_heads: int, layers: int, source: tuple[int, int], sink: tuple[int, int]
) -> None:
    sides = [Side(layers=layers, kv_heads=kv_heads, tp=tp, pp=pp) for tp, pp in (source, sink)]
    assert mapping_fault(*sides) is None


def test_other_sizes_leave_heads_behind() -> None:
    assert mapping_fault(Side(layers=2, kv_heads=6, tp=3), Side(layers=2, kv_heads=6, tp=2)) is not None


def test_a_rank_asks_as_many_peers_as_its_share_is_larger() -> None:
    assert list(tp_peers(2, 8, 1)) == [4, 5, 6, 7]
    assert list(tp_peers(8, 2, 5)) == [1]
