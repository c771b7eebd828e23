import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.errors import LayoutError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.reshard import check_convertible, holders_of, slices_for

SIZES = (1, 2, 3, 4, 8)
STAGES = (1, 2, 3)


def layout(**changes):
    return replace(KVLayout(num_layers=7, kv_heads=3, head_dim=8, tokens_per_block=4, dtype="f32"), **changes)


LAYOUTS = st.builds(
    lambda layers, heads, tps, pps: [
        layout(num_layers=layers, kv_heads=heads, tp=tp, pp=pp) for tp, pp in zip(tps, pps, strict=True)
    ],
    st.integers(3, 9),
    st.integers(1, 9),
    st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    st.tuples(st.sampled_from(STAGES), st.sampled_from(STAGES)),
)


def ranks(of):
    return itertools.product(range(of.tp), range(of.pp))


@given(LAYOUTS)
def test_every_layer_and_head_of_every_sink_rank_arrives_exactly_once_from_a_rank_that_has_it(pair):
    source, sink = pair
    for tp_rank, pp_rank in ranks(sink):
        arrived: list[tuple[int, int]] = []
        for part in slices_for(source, sink, tp_rank, pp_rank):
            assert set(part.layers) <= set(source.rank_layers(part.pp_rank))
            assert set(part.heads) <= set(source.rank_heads(part.tp_rank))
            arrived += itertools.product(part.layers, part.heads)
        wanted = itertools.product(sink.rank_layers(pp_rank), sink.rank_heads(tp_rank))
        assert sorted(arrived) == sorted(wanted)


@given(LAYOUTS)
def test_holders_of_a_head_send_it_equally_often_give_or_take_one(pair):
    source, sink = pair
    for head in range(source.kv_heads):
        sent = dict.fromkeys(holders_of(source, head), 0)
        for tp_rank in holders_of(sink, head):
            for part in slices_for(source, sink, tp_rank, 0):
                if head in part.heads and part.pp_rank == 0:
                    sent[part.tp_rank] += 1
        wanting = len(holders_of(sink, head))
        assert all(abs(count - wanting / len(sent)) < 1 for count in sent.values())


@given(LAYOUTS)
def test_equal_splits_pair_rank_with_rank(pair):
    one = pair[0]
    for tp_rank, pp_rank in ranks(one):
        (part,) = slices_for(one, one, tp_rank, pp_rank)
        assert (part.tp_rank, part.pp_rank) == (tp_rank, pp_rank)
        assert (part.layers, part.heads) == (one.rank_layers(pp_rank), one.rank_heads(tp_rank))


def tensorrt_llm_peers(self_tp, self_rank, peer_tp):
    """The tp ranks a rank of TensorRT-LLM connects to, by its own rule: sizes are powers of two, the larger group
    falls into equal shares of neighbours, one share per rank of the smaller."""
    if self_tp <= peer_tp:
        share = peer_tp // self_tp
        return {self_rank * share + i for i in range(share)}
    return {self_rank // (self_tp // peer_tp)}


@pytest.mark.parametrize(("source_tp", "sink_tp"), list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_peers_are_those_of_tensorrt_llm_where_its_rule_applies(source_tp, sink_tp):
    source, sink = (layout(kv_heads=8, tp=tp, num_layers=8, pp=2) for tp in (source_tp, sink_tp))
    for tp_rank, pp_rank in ranks(sink):
        parts = slices_for(source, sink, tp_rank, pp_rank)
        assert {part.tp_rank for part in parts} == tensorrt_llm_peers(sink_tp, tp_rank, source_tp)
        assert {part.pp_rank for part in parts} == {pp_rank}


@pytest.mark.parametrize(("source_tp", "sink_tp"), list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_of_duplicated_heads_one_holder_among_the_peers_of_tensorrt_llm_sends(source_tp, sink_tp):
    source, sink = (layout(kv_heads=2, tp=tp) for tp in (source_tp, sink_tp))
    for tp_rank in range(sink_tp):
        senders = [part.tp_rank for part in slices_for(source, sink, tp_rank, 0)]
        assert set(senders) <= tensorrt_llm_peers(sink_tp, tp_rank, source_tp)
        assert len(senders) == len(set(senders)) == min(source_tp, len(sink.rank_heads(tp_rank)))


@pytest.mark.parametrize(
    "changes", [{"num_layers": 8}, {"kv_heads": 4}, {"head_dim": 16}, {"tokens_per_block": 8}, {"dtype": "bf16"}]
)
def test_layouts_of_other_models_or_blocks_can_not_be_converted(changes):
    (field,) = changes
    with pytest.raises(LayoutError, match=f"prefill_0 .*{field}"):
        check_convertible(layout(), layout(**changes), who="prefill_0")


def test_tp_pp_and_a_declared_dtype_may_differ():
    check_convertible(layout(tp=2), layout(tp=3, pp=2), who="prefill_0")
    check_convertible(layout(), layout(dtype="bf16"), who="prefill_0", convert_dtype=True)
    with pytest.raises(LayoutError, match="dtype f32 and f16"):
        check_convertible(layout(), layout(dtype="f16"), who="prefill_0", convert_dtype=True)
