import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.kv import BLOCKS, LAYOUT, fill

from trtpd.kv_transfer.integrity import GroupDigester, array_weights, head_sums, is_sampled
from trtpd.kv_transfer.pool import SharedPool
from trtpd.kv_transfer.ranks import RankPools


@pytest.fixture(scope="module")
def pool():
    made = SharedPool.create("digests", LAYOUT, BLOCKS, generation="g")
    fill(made)
    yield made
    made.close()


@given(block=st.integers(0, BLOCKS - 1), tokens=st.integers(1, LAYOUT.tokens_per_block))
def test_a_digest_is_the_weighted_sum_of_hashes_of_one_heads_k_and_v_in_all_layers(pool, block, tokens):
    (digests,) = GroupDigester(RankPools([pool])).digests([block], tokens)
    for head, digest in enumerate(digests):
        expected = 0
        for layer in range(LAYOUT.num_layers):
            for name, array in (("K", pool.keys[layer]), ("V", pool.values[layer])):
                weight = xxhash.xxh3_64_intdigest(f"{layer} {name}".encode()) | 1
                expected += weight * xxhash.xxh3_64_intdigest(array[block, head, :tokens].tobytes())
        assert digest == expected % 2**64


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_changes_the_digest_of_its_head_and_no_other(pool, data):
    digester, block = GroupDigester(RankPools([pool])), data.draw(st.integers(0, BLOCKS - 1))
    (before,) = digester.digests([block], LAYOUT.tokens_per_block)
    head = data.draw(st.integers(0, LAYOUT.kv_heads - 1))
    array = data.draw(st.sampled_from(pool.keys + pool.values))
    flipped = array[block, head].view(np.uint32).reshape(-1)
    at, bit = data.draw(st.integers(0, flipped.size - 1)), np.uint32(1 << data.draw(st.integers(0, 31)))
    flipped[at] ^= bit
    (after,) = digester.digests([block], LAYOUT.tokens_per_block)
    flipped[at] ^= bit
    assert [h for h in range(LAYOUT.kv_heads) if before[h] != after[h]] == [head]


def test_k_and_v_that_changed_places_change_the_digest(pool):
    (before,) = GroupDigester(RankPools([pool])).digests([1], 4)
    keys, values = pool.keys[0][1].copy(), pool.values[0][1].copy()
    pool.keys[0][1], pool.values[0][1] = values, keys
    (after,) = GroupDigester(RankPools([pool])).digests([1], 4)
    pool.keys[0][1], pool.values[0][1] = keys, values
    assert all(a != b for a, b in zip(before, after, strict=True))


@given(cut=st.integers(0, 4), tokens=st.integers(1, 4))
def test_sums_over_parts_of_the_arrays_add_up_to_the_whole(pool, cut, tokens):
    weights = array_weights(range(LAYOUT.num_layers))
    cells = pool.cells[:, 2:7]
    parts = [head_sums(cells[part], tokens, 4, weights[part]) for part in (slice(cut), slice(cut, 4))]
    assert np.array_equal(parts[0] + parts[1], head_sums(cells, tokens, 4, weights))


def test_digests_of_scattered_blocks_are_those_of_each_alone(pool):
    digester, blocks = GroupDigester(RankPools([pool])), [9, 3, 4, 5, 1]
    together = digester.digests(blocks, 3)
    assert together == [digester.digests([block], 3)[0] for block in blocks]


@given(st.integers(0, 100), st.integers(1, 10))
def test_one_block_in_so_many_is_sampled(index, every):
    assert is_sampled(index, every=1)
    assert not is_sampled(index, every=0)
    assert sum(is_sampled(i, every=every) for i in range(index, index + every)) == 1
