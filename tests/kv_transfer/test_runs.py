from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trtpd.kv_transfer.runs import Run, coalesce, split

TABLES = st.integers(1, 30).flatmap(
    lambda n: st.tuples(st.permutations(range(n)), st.permutations(range(n)), st.integers(0, 5))
)


@given(TABLES)
def test_runs_move_every_block_to_its_place_once(tables):
    of, to, first = tables
    moves = [
        (run.index + i, run.source + i, run.sink + i)
        for run in coalesce(of, to, first_index=first)
        for i in range(run.count)
    ]
    assert moves == [(first + i, a, b) for i, (a, b) in enumerate(zip(of, to, strict=True))]


@given(TABLES)
def test_neighbouring_runs_can_not_be_joined(tables):
    runs = coalesce(tables[0], tables[1])
    for left, right in pairwise(runs):
        assert (left.source + left.count, left.sink + left.count) != (right.source, right.sink)


def test_blocks_side_by_side_at_both_ends_are_one_run():
    assert coalesce([4, 5, 6, 9], [1, 2, 3, 4]) == [Run(0, 4, 1, 3), Run(3, 9, 4, 1)]


@given(st.integers(1, 40), st.integers(1, 10))
def test_a_split_run_is_the_same_blocks_in_small_runs(count, limit):
    parts = split(Run(2, 10, 20, count), limit)
    assert all(0 < part.count <= limit for part in parts)
    assert [i for part in parts for i in part.indexes] == list(range(2, 2 + count))
    assert all(part.source - 10 == part.sink - 20 == part.index - 2 for part in parts)
