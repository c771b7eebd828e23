"""What every pair of a source and a sink must do, whatever moves the bytes."""

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from trtpd_testing.kv import LAYOUT

from trtpd.errors import InternalError, LayoutError, TransferError
from trtpd.kv_transfer.offer import Chunk, Seal

TRANSPORTS = ["shm", "memory", "tcp", "nixl"]
KEY = (1, 1)
OF, TO = [3, 4, 9, 1], [5, 6, 7, 2]
TOKENS = 14  # three whole blocks and half of one


@pytest.fixture(params=TRANSPORTS)
def pair(request, pairs):
    return pairs(request.param)


def test_kv_arrives_in_the_reserved_blocks_and_nowhere_else(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    pair.seal(offer)
    result = pair.result()
    assert (result.key, result.error, result.code, result.path) == (KEY, None, "", offer.transport)
    assert result.bytes_moved == 4 * 4 * LAYOUT.bytes_per_token
    assert pair.moved(offer, TO)


def test_chunks_and_the_seal_together_move_each_block_once(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    for ready_tokens in (5, 5, 8, 12):
        pair.sink.ready(pair.source.publish(KEY, ready_tokens=ready_tokens))
    pair.seal(offer)
    result = pair.result()
    assert (result.error, result.bytes_moved) == (None, 4 * 4 * LAYOUT.bytes_per_token)
    assert pair.moved(offer, TO)


def test_spare_reserved_blocks_stay_untouched(pair):
    offer = pair.source.offer(KEY, prompt_tokens=8, blocks=OF)
    assert len(offer.blocks) == 2
    pair.sink.begin(offer, TO)
    pair.seal(offer)
    assert pair.result().error is None
    assert pair.moved(offer, TO)


@pytest.mark.parametrize("chunks", [(), (5, 12)], ids=["at the seal", "in chunks"])
def test_only_blocks_that_are_missing_move(pair, chunks):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.to.grid[:, TO[:2]] = 7
    pair.sink.begin(offer, TO, present=2)
    for ready_tokens in chunks:
        pair.sink.ready(pair.source.publish(KEY, ready_tokens=ready_tokens))
    pair.seal(offer)
    result = pair.result()
    assert (result.error, result.bytes_moved) == (None, 2 * 4 * LAYOUT.bytes_per_token)
    assert (pair.to.grid[:, TO[:2]] == 7).all()
    assert np.array_equal(pair.to.grid[:, TO[2:]], pair.of.grid[:, OF[2:]])


def test_a_pull_of_which_nothing_is_missing_ends_with_the_seal_and_moves_nothing(pair):
    offer = pair.source.offer(KEY, prompt_tokens=8, blocks=OF)
    pair.sink.begin(offer, TO, present=2)
    assert pair.sink.busy()
    pair.seal(offer)
    result = pair.result()
    assert (result.error, result.bytes_moved) == (None, 0)
    assert not pair.to.grid.any()


def test_a_block_that_is_not_full_is_not_taken_to_be_present(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with pytest.raises(InternalError, match="full"):
        pair.sink.begin(offer, TO, present=4)


def test_nothing_is_copied_before_it_is_final(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    pair.sink.ready(pair.source.publish(KEY, ready_tokens=3))
    pair.sink.abort(KEY)
    assert pair.result().bytes_moved == 0
    assert not pair.to.grid.any()


def test_messages_of_unknown_or_older_attempts_change_nothing(pair):
    offer = pair.source.offer((1, 2), prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    for key in ((1, 1), (9, 2)):
        pair.sink.ready(Chunk(request_id=key[0], attempt=key[1], ready_tokens=TOKENS))
        pair.sink.sealed(
            Seal(request_id=key[0], attempt=key[1], prompt_tokens=9, first_token=0, first_log_prob=None, seed=0)
        )
        pair.sink.abort(key)
    assert pair.sink.progress() == []
    pair.seal(offer)
    assert pair.result().error is None


def test_an_aborted_pull_is_reported_once_and_can_be_begun_again(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    assert pair.sink.busy()
    pair.sink.abort(KEY)
    pair.sink.abort(KEY)
    result = pair.result()
    assert (result.code, result.retryable, pair.sink.busy()) == ("aborted", False, False)
    pair.sink.begin(offer, TO)
    pair.seal(offer)
    assert pair.result().error is None
    assert pair.sink.progress() == []


def test_closing_a_sink_ends_its_pulls(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    pair.sink.close()
    assert [result.code for result in pair.sink.progress()] == ["aborted"]


def test_a_key_is_pulled_only_once_at_a_time(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    with pytest.raises(InternalError, match="already"):
        pair.sink.begin(offer, TO)


@pytest.mark.parametrize("blocks", [[5, 6, 7], [5, 6, 7, 7]])
def test_too_few_blocks_or_one_twice_is_a_bug_of_the_caller(pair, blocks):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with pytest.raises(InternalError, match="blocks"):
        pair.sink.begin(offer, blocks)


def test_a_hold_that_ended_can_not_be_pulled(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    assert pair.source.end(KEY)
    assert not pair.source.end(KEY)
    assert pair.refusal(offer, TO).startswith("lease_lost")
    assert not pair.sink.busy()


def test_a_hold_that_ends_during_the_pull_loses_the_lease(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    seal = pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    pair.source.end(KEY)
    pair.sink.sealed(seal)
    result = pair.result()
    assert (result.code, result.retryable) == ("lease_lost", False)


def test_a_block_freed_during_the_pull_loses_the_lease(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    seal = pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    pair.of.bump([OF[1]])
    pair.sink.sealed(seal)
    assert pair.result().code == "lease_lost"


def test_wrong_bytes_are_noticed_and_can_be_pulled_again(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    seal = pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    right = pair.of.values[1][OF[2], 1, 0, 0].copy()
    pair.of.values[1][OF[2], 1, 0, 0] = -1
    pair.sink.begin(offer, TO)
    pair.sink.sealed(seal)
    result = pair.result()
    assert (result.code, result.retryable) == ("digest_mismatch", True)
    assert re.search(r"block 2 .*heads \[1\]", result.error or "")
    pair.of.values[1][OF[2], 1, 0, 0] = right
    pair.sink.begin(offer, TO)
    pair.sink.sealed(seal)
    assert pair.result().error is None


def test_bytes_behind_the_last_token_are_not_verified(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    seal = pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    pair.of.keys[0][OF[3], :, TOKENS % LAYOUT.tokens_per_block :] = -1
    pair.sink.sealed(seal)
    assert pair.result().error is None


@pytest.mark.parametrize(("digest_every", "digested"), [(0, set()), (1, {0, 1, 2, 3}), (3, {0, 3})])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_digests_can_be_sampled_or_off(pairs, transport, digest_every, digested):
    pair = pairs(transport, digest_every=digest_every)
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    chunk = pair.source.publish(KEY, ready_tokens=8)
    pair.sink.ready(chunk)
    seal = pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    pair.sink.sealed(seal)
    assert chunk.digests.keys() | seal.digests.keys() == digested
    assert pair.result().error is None


def test_another_layout_is_refused_at_the_handshake(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    other = msgspec.structs.replace(offer, layout=replace(LAYOUT, head_dim=16))
    with pytest.raises(LayoutError):
        pair.sink.handshake(other)


def test_another_transport_is_refused_at_the_handshake(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with pytest.raises(TransferError, match="'pigeon'"):
        pair.sink.handshake(msgspec.structs.replace(offer, transport="pigeon"))


def test_an_offer_of_another_generation_is_refused(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    assert pair.refusal(msgspec.structs.replace(offer, generation="older"), TO).startswith("lease_lost")


def test_a_seal_of_another_prompt_fails_the_pull(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(offer, TO)
    seal = pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    pair.sink.sealed(msgspec.structs.replace(seal, prompt_tokens=TOKENS + 1))
    assert pair.result().code == "transfer_failed"


def test_a_lease_can_not_lapse_before_the_seal_and_is_reported_once_after_it(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.clock.now_s += 1000
    assert pair.source.lapsed(pair.clock.now_s) == []
    pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    assert pair.source.lapsed(pair.clock.now_s + offer.lease_s - 0.1) == []
    assert pair.source.holds() == {KEY: 4}
    assert pair.source.lapsed(pair.clock.now_s + offer.lease_s) == [KEY]
    assert pair.source.lapsed(pair.clock.now_s + offer.lease_s) == []
    assert pair.source.holds() == {}


def test_a_pull_that_begins_renews_the_lease(pair):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    pair.clock.now_s += offer.lease_s - 1
    pair.sink.begin(offer, TO)
    pair.wait_renewed(offer)
    pair.clock.now_s += 2
    assert pair.source.lapsed(pair.clock.now_s) == []


def test_misuse_of_a_source_is_a_bug(pair):
    pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with pytest.raises(InternalError, match="already"):
        pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with pytest.raises(InternalError, match="1 of 2 blocks"):
        pair.source.offer((2, 1), prompt_tokens=8, blocks=[0])
    with pytest.raises(InternalError, match="holds nothing"):
        pair.source.publish((2, 1), ready_tokens=4)
    pair.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    with pytest.raises(InternalError, match="sealed"):
        pair.source.publish(KEY, ready_tokens=TOKENS)


def test_a_refused_offer_holds_nothing(pair):
    for _ in range(40):
        with pytest.raises(InternalError):
            pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=[1])
    assert pair.source.holds() == {}
    assert pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF).key == KEY


def test_pulls_of_several_requests_do_not_mix(pair):
    tables = {(n, 1): ([2 * n, 2 * n + 1], [15 - 2 * n, 14 - 2 * n]) for n in range(8)}
    offers = {key: pair.source.offer(key, prompt_tokens=8, blocks=of) for key, (of, _) in tables.items()}
    for key, offer in offers.items():
        pair.sink.begin(offer, tables[key][1])
    for offer in reversed(offers.values()):
        pair.seal(offer)
    results = [pair.result() for _ in offers]
    assert {r.key for r in results} == set(offers)
    assert all(r.error is None for r in results)
    for of, to in tables.values():
        assert np.array_equal(pair.to.grid[:, to], pair.of.grid[:, of])
