"""Hand-offs between groups whose ranks split heads and layers differently."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.kv import BLOCKS, LAYOUT, make_pair, whole

from trtpd.errors import InternalError, LayoutError
from trtpd.kv_transfer.convert import to_bf16
from trtpd.kv_transfer.pool import SharedPool
from trtpd.kv_transfer.ranks import RankPools

KEY = (1, 1)
OF, TO = [3, 4, 5, 1], [5, 6, 7, 2]
TOKENS = 14
NETWORKED = ["tcp", "nixl"]
SPLITS = st.tuples(st.sampled_from((1, 2, 3, 4, 8)), st.integers(1, 3))


def transfer(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    pair.sink.ready(pair.source.publish(KEY, ready_tokens=9))
    pair.seal(offer)
    return pair.result()


def exchange(transport, source, sink, heads):
    base = replace(LAYOUT, num_layers=3, kv_heads=heads)
    of, to = (replace(base, tp=tp, pp=pp) for tp, pp in (source, sink))
    pair = make_pair(transport, layout=of, sink_layout=to)
    try:
        assert transfer(pair).error is None
        assert np.array_equal(whole(pair.sink_pools)[:, TO], whole(pair.source_pools)[:, OF])
        for pool in pair.sink_pools:
            others = np.setdiff1d(np.arange(BLOCKS), TO)
            assert not pool.grid[:, others].any()
    finally:
        pair.close()


@settings(max_examples=40, deadline=None)
@given(source=SPLITS, sink=SPLITS, heads=st.integers(1, 5))
def test_every_rank_of_the_sink_gets_its_heads_and_layers_verified(source, sink, heads):
    exchange("shm", source, sink, heads)


@pytest.mark.parametrize(("source", "sink"), [((3, 1), (2, 1)), ((1, 2), (3, 1)), ((8, 1), (2, 2)), ((2, 3), (8, 1))])
@pytest.mark.parametrize("transport", NETWORKED)
def test_so_it_does_over_every_transport(transport, source, sink):
    exchange(transport, source, sink, heads=3)


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(3, 2), (2, 3), (1, 8), (8, 1)])
@pytest.mark.parametrize("transport", ["shm", *NETWORKED])
def test_one_wrong_byte_at_one_rank_is_noticed_whatever_the_split(pairs, transport, source_tp, sink_tp):
    pair = pairs(transport, layout=replace(LAYOUT, tp=source_tp), sink_layout=replace(LAYOUT, tp=sink_tp))
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    seal = pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    for pool in pair.source_pools:
        held = LAYOUT.kv_heads - 1 in pool.layout.rank_heads(pool.address.tp_rank)
        pool.values[1][OF[2], -1, 0, 0] += 1 if held else 0
    pair.sink.begin(offer, TO)
    pair.sink.sealed(seal)
    result = pair.result()
    assert (result.code, result.retryable) == ("digest_mismatch", True)
    assert "block 2 " in (result.error or "")
    assert "heads [2] of 3" in (result.error or "")


def test_digests_do_not_depend_on_the_split(pairs):
    seals = []
    for tp, pp in itertools.product((1, 2, 3, 8), (1, 2)):
        pair = pairs("shm", layout=replace(LAYOUT, tp=tp, pp=pp))
        pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
        seals.append(pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0).digests)
    assert all(digests == seals[0] for digests in seals)


@pytest.mark.parametrize(("of", "to"), [("f32", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("digest_every", [0, 1])
@pytest.mark.parametrize("transport", ["shm", *NETWORKED])
def test_a_declared_dtype_is_converted_and_the_sources_bytes_are_verified(pairs, transport, of, to, digest_every):
    pair = pairs(
        transport,
        layout=replace(LAYOUT, tp=2, dtype=of),
        sink_layout=replace(LAYOUT, tp=3, dtype=to),
        convert_dtype=True,
        digest_every=digest_every,
    )
    assert transfer(pair).error is None
    source, sink = whole(pair.source_pools)[:, OF], whole(pair.sink_pools)[:, TO]
    narrow, wide = (sink, source) if to == "bf16" else (source, sink)
    assert np.array_equal(narrow, to_bf16(wide.view(np.uint32)))


def test_another_dtype_is_refused_unless_it_was_declared(pairs):
    pair = pairs("shm", sink_layout=replace(LAYOUT, dtype="bf16"))
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with pytest.raises(LayoutError, match="dtype f32 and bf16"):
        pair.sink.begin(offer, TO)


def test_a_leader_maps_the_pools_of_its_other_ranks_and_writes_into_them():
    layout = replace(LAYOUT, tp=2)
    own, other = (SharedPool.create(f"rank{r}", layout, 4, generation="g", tp_rank=r) for r in (0, 1))
    group = RankPools.of_group(own, [other.address])
    group.by_rank[1, 0].keys[1][2] = 5.0
    assert group.complete
    assert (other.keys[1][2] == 5.0).all()
    group.close_attached()
    own.close()
    other.close()


def test_pools_of_different_groups_or_twice_the_same_rank_are_a_bug():
    one, two = (SharedPool.create(f"p{g}", LAYOUT, 4, generation=g) for g in ("g", "h"))
    with pytest.raises(InternalError, match="differ"):
        RankPools([one, two])
    with pytest.raises(InternalError, match="two pools"):
        RankPools([one, one])
    one.close()
    two.close()


def test_a_source_needs_all_ranks_and_a_sink_all_stages(pairs):
    part = SharedPool.create("part", replace(LAYOUT, tp=2, pp=2), 4, generation="g")
    from trtpd.kv_transfer.base import TransferSettings
    from trtpd.kv_transfer.shm import ShmSink, ShmSource

    settings_ = TransferSettings(instance="x", generation="g")
    with pytest.raises(InternalError, match="all ranks"):
        ShmSource(RankPools([part]), settings_)
    with pytest.raises(InternalError, match="all stages"):
        ShmSink(RankPools([part]), settings_)
    part.close()
