from hypothesis import given
from hypothesis import strategies as st
from trtpd_testing.kv import LAYOUT

from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.pull import Pull

TOKENS = 14
OFFER = Offer(
    request_id=1,
    attempt=1,
    generation="g",
    instance="prefill_0",
    transport="shm",
    layout=LAYOUT,
    prompt_tokens=TOKENS,
    blocks=(0, 1, 2, 3),
    epochs=(0, 0, 0, 0),
    address=b"",
    lease_s=1.0,
)
SEAL = Seal(request_id=1, attempt=1, prompt_tokens=TOKENS, first_token=0, first_log_prob=None, seed=0)


def chunk(ready_tokens):
    return Chunk(request_id=1, attempt=1, ready_tokens=ready_tokens)


def take(pull, limit=99):
    piece = pull.piece(limit)
    pull.copied(piece, bytes_moved=len(piece), seconds=0.5)
    return list(piece)


@given(chunks=st.lists(st.integers(0, TOKENS)), limit=st.integers(1, 5), one_piece=st.booleans())
def test_pieces_cover_every_block_once_and_never_one_that_is_not_final(chunks, limit, one_piece):
    pull, taken = Pull(OFFER, [9, 8, 7, 6], one_piece=one_piece), []
    final_blocks = 0
    for ready_tokens in chunks:
        pull.ready(chunk(ready_tokens))
        final_blocks = 0 if one_piece else max(final_blocks, ready_tokens // LAYOUT.tokens_per_block)
        while part := take(pull, limit):
            taken += part
        assert taken == list(range(final_blocks))
    assert not pull.complete
    pull.seal(SEAL, 5.0)
    while part := take(pull, limit):
        assert len(part) <= limit
        taken += part
    assert taken == [0, 1, 2, 3]
    assert pull.complete


def test_exposed_time_runs_from_the_first_seal():
    pull = Pull(OFFER, [9, 8, 7, 6], one_piece=False)
    pull.ready(chunk(8))
    take(pull)
    pull.seal(SEAL, 5.0)
    pull.seal(SEAL, 6.0)
    take(pull)
    result = pull.result(7.5)
    assert (result.exposed_s, result.seconds, result.chunks, result.bytes_moved) == (2.5, 1.0, 2, 4)


def test_a_chunk_beyond_the_prompt_is_a_fault():
    pull = Pull(OFFER, [9, 8, 7, 6], one_piece=False)
    pull.ready(chunk(TOKENS + 1))
    assert pull.fault is not None
    assert not pull.piece(9)


def test_valid_tokens_fill_all_blocks_but_the_last():
    pull = Pull(OFFER, [9, 8, 7, 6], one_piece=False)
    assert [pull.valid_tokens(i) for i in range(4)] == [4, 4, 4, 2]
