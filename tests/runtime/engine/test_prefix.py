from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtpd.runtime.engine.prefix import BlockHasher, PrefixCache, short

IDS = st.lists(st.integers(0, 3), max_size=40)


def hashes_of(ids, salt="m", size=4):
    hashes: list[bytes] = []
    BlockHasher(salt, size).extend(hashes, ids, tokens=len(ids))
    return hashes


@given(IDS, IDS)
def test_hashes_are_equal_as_far_as_whole_blocks_are(one, two):
    common = 0
    while common < min(len(one), len(two)) // 4 and one[: 4 * (common + 1)] == two[: 4 * (common + 1)]:
        common += 1
    same = [a == b for a, b in zip(hashes_of(one), hashes_of(two), strict=False)]
    assert same == [index < common for index in range(len(same))]


@given(IDS, st.integers(0, 40))
def test_hashes_do_not_depend_on_how_a_sequence_grew(ids, first):
    hashes: list[bytes] = []
    hasher = BlockHasher("m", 4)
    hasher.extend(hashes, ids, tokens=min(first, len(ids)))
    hasher.extend(hashes, ids, tokens=len(ids))
    assert hashes == hashes_of(ids)
    assert len(hashes) == len(ids) // 4
    assert hasher.summary(ids) == tuple(map(short, hashes))


def test_another_model_or_block_size_has_other_hashes():
    ids = list(range(16))
    found = [hashes_of(ids), hashes_of(ids, salt="n"), hashes_of(ids, size=8)]
    assert len({value for hashes in found for value in hashes}) == 4 + 4 + 2


def test_the_longest_beginning_is_found_and_the_first_block_of_a_kind_stays():
    cache, (a, b, c) = PrefixCache(), hashes_of(range(12))
    cache.publish(a, 7)
    cache.publish(c, 9)
    assert cache.match([a, b, c]) == [7]
    cache.publish(b, 8)
    cache.publish(b, 5)
    assert cache.match([a, b, c]) == [7, 8, 9]
    assert 5 not in cache


def test_what_is_forgotten_is_told_once():
    cache, (a, b) = PrefixCache(), hashes_of(range(8))
    cache.publish(a, 1)
    cache.publish(b, 2)
    cache.forget([2, 3])
    assert cache.match([a, b]) == [1]
    assert cache.take_evicted() == (short(b),)
    assert cache.take_evicted() == ()
    assert len(cache) == 1
