import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.kv import BLOCKS, LAYOUT, fill

from trtpd.errors import IntegrityError
from trtpd.kv_transfer.integrity import BlockDigester, is_sampled, verify
from trtpd.kv_transfer.pool import SharedPool


@pytest.fixture(scope="module")
def pool():
    made = SharedPool.create("digests", LAYOUT, BLOCKS, generation="g")
    fill(made)
    yield made
    made.close()


@given(block=st.integers(0, BLOCKS - 1), tokens=st.integers(1, LAYOUT.tokens_per_block))
def test_a_digest_is_xxh3_over_one_heads_k_and_v_of_all_layers(pool, block, tokens):
    for head, digest in enumerate(BlockDigester(pool).digest(block, tokens)):
        data = b"".join(
            array[block, head, :tokens].tobytes()
            for layer in range(LAYOUT.num_layers)
            for array in (pool.keys[layer], pool.values[layer])
        )
        assert digest == xxhash.xxh3_64_intdigest(data)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_changes_the_digest_of_its_head_and_no_other(pool, data):
    digester, block = BlockDigester(pool), data.draw(st.integers(0, BLOCKS - 1))
    before = digester.digest(block, LAYOUT.tokens_per_block)
    head = data.draw(st.integers(0, LAYOUT.kv_heads - 1))
    array = data.draw(st.sampled_from(pool.keys + pool.values))
    flipped = array[block, head].view(np.uint32).reshape(-1)
    at, bit = data.draw(st.integers(0, flipped.size - 1)), np.uint32(1 << data.draw(st.integers(0, 31)))
    flipped[at] ^= bit
    after = digester.digest(block, LAYOUT.tokens_per_block)
    flipped[at] ^= bit
    assert [h for h in range(LAYOUT.kv_heads) if before[h] != after[h]] == [head]


def test_digests_fed_in_parts_equal_digests_of_the_whole(pool):
    digester = BlockDigester(pool)
    opened = digester.open([(2, 4), (7, 3)])
    opened.feed(0, 1)
    opened.feed(1, 3)
    opened.feed(3, 4)
    assert opened.values() == [digester.digest(2, 4), digester.digest(7, 3)]


def test_a_difference_names_block_and_heads():
    with pytest.raises(IntegrityError, match=r"prefill_0: block 3 .*heads \[0, 2\] of 3"):
        verify({3: (1, 2, 3)}, {3: (9, 2, 9)}, "prefill_0")


@given(st.integers(0, 100), st.integers(1, 10))
def test_one_block_in_so_many_is_sampled(index, every):
    assert is_sampled(index, every=1)
    assert not is_sampled(index, every=0)
    assert sum(is_sampled(i, every=every) for i in range(index, index + every)) == 1
