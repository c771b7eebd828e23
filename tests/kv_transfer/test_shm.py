import json
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.kv import BLOCKS, LAYOUT, make_pair

from trtpd.errors import CapacityError, InternalError, LeaseError, TransferError
from trtpd.kv_transfer.leases import lease_tag
from trtpd.kv_transfer.offer import decode_offer, decode_seal, encode
from trtpd.kv_transfer.routes import copy_jobs
from trtpd.kv_transfer.shm import ShmAddress

COPY = "trtpd.kv_transfer.shm.copy_jobs"
KEY = (1, 1)
OF, TO = [3, 4, 9, 1], [5, 6, 7, 2]
TOKENS = 14


def begun(pair, **changes):
    offer = pair.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    pair.sink.begin(msgspec.structs.replace(offer, **changes), TO)
    return offer


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_block_tables_and_any_chunks_bring_every_element_once_and_touch_nothing_else(data):
    pair = make_pair("shm", digest_every=data.draw(st.integers(0, 2)))
    try:
        tokens = data.draw(st.integers(1, BLOCKS * LAYOUT.tokens_per_block))
        needed = LAYOUT.blocks_for(tokens)
        of = data.draw(st.permutations(range(BLOCKS)))[:needed]
        to = data.draw(st.permutations(range(BLOCKS)))[:needed]
        offer = pair.source.offer(KEY, prompt_tokens=tokens, blocks=of)
        pair.sink.begin(offer, to)
        for ready_tokens in sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4))):
            pair.sink.ready(pair.source.publish(KEY, ready_tokens=ready_tokens))
        pair.seal(offer)
        assert pair.result().error is None
        assert pair.moved(offer, to)
    finally:
        pair.close()


def test_a_block_freed_while_it_is_copied_voids_the_copy(shm, monkeypatch):
    def copy_then_free(*args):
        yield from copy_jobs(*args)
        shm.source.end(KEY)
        shm.of.bump(OF)

    monkeypatch.setattr(COPY, copy_then_free)
    offer = begun(shm)
    shm.seal(offer)
    assert shm.result().code == "lease_lost"


def test_bytes_overwritten_after_a_free_are_a_lost_lease_and_no_bad_copy(shm, monkeypatch):
    def overwrite_then_copy(*args):
        shm.of.bump(OF)
        shm.of.grid[:] = 0
        return copy_jobs(*args)

    monkeypatch.setattr(COPY, overwrite_then_copy)
    offer = begun(shm)
    shm.seal(offer)
    assert shm.result().code == "lease_lost"


def test_an_abort_is_reported_only_when_the_copy_under_way_is_over(shm, monkeypatch):
    copying, go_on = threading.Event(), threading.Event()

    def slow_copy(*args):
        copying.set()
        assert go_on.wait(20)
        return copy_jobs(*args)

    monkeypatch.setattr(COPY, slow_copy)
    offer = begun(shm)
    shm.seal(offer)
    assert copying.wait(20)
    shm.sink.abort(KEY)
    assert shm.sink.progress() == []
    assert shm.sink.busy()
    go_on.set()
    assert shm.result().code == "aborted"


def test_a_bug_in_one_copy_ends_that_pull_only(shm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(COPY, None)
        offer = begun(shm)
        shm.seal(offer)
        result = shm.result()
        assert (result.code, result.retryable) == ("internal", False)
    other = shm.source.offer((2, 1), prompt_tokens=4, blocks=[0])
    shm.sink.begin(other, [0])
    shm.seal(other)
    assert shm.result().error is None


def test_a_lease_that_ended_before_the_copy_was_used_fails_the_pull(shm, monkeypatch):
    def copy_slowly(*args):
        yield from copy_jobs(*args)
        shm.clock.now_s += 11

    monkeypatch.setattr(COPY, copy_slowly)
    offer = begun(shm)
    shm.seal(offer)
    result = shm.result()
    assert (result.code, result.retryable) == ("lease_lost", False)
    assert "lease" in (result.error or "")


def test_a_waiting_sink_keeps_renewing(shm):
    offer = begun(shm)
    shm.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    slot = msgspec.msgpack.decode(offer.address, type=ShmAddress).lease_slot
    renewed = threading.Event()
    for _ in range(4):
        shm.clock.now_s += offer.lease_s / 3
        while shm.of.leases[slot, 2] < int(shm.clock.now_s * 1e9):
            renewed.wait(0.01)
        assert shm.source.lapsed(shm.clock.now_s) == []


def test_a_pull_that_waits_in_vain_ends_with_its_lease(shm):
    offer = begun(shm)
    shm.source.end(KEY)
    shm.clock.now_s += offer.lease_s + 1
    result = shm.result()
    assert (result.code, result.retryable) == ("lease_lost", False)


def test_renewals_of_an_older_attempt_do_not_count(shm):
    offer = begun(shm)
    shm.sink.abort(KEY)
    shm.result()
    shm.source.seal(KEY, first_token=0, first_log_prob=None, seed=0)
    slot = msgspec.msgpack.decode(offer.address, type=ShmAddress).lease_slot
    shm.clock.now_s += offer.lease_s + 1
    stale = lease_tag(1, 0, offer.generation)
    sent_ns = int(shm.clock.now_s * 1e9)
    shm.of.leases[slot, 1:4] = [stale, sent_ns, stale ^ sent_ns]
    assert shm.source.lapsed(shm.clock.now_s) == [KEY]


def test_lease_slots_come_back(shm):
    for attempt in range(1, 3 * BLOCKS):
        shm.source.offer((1, attempt), prompt_tokens=1, blocks=[0])
        shm.source.end((1, attempt))
    for request_id in range(BLOCKS):
        shm.source.offer((request_id, 99), prompt_tokens=1, blocks=[0])
    with pytest.raises(CapacityError, match="lease slots"):
        shm.source.offer((99, 99), prompt_tokens=1, blocks=[0])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"address": b"\xc1junk"}, TransferError),
        ({"blocks": (3, 4, 9, BLOCKS)}, TransferError),
        ({"epochs": (0, 0, 0, 1)}, LeaseError),
    ],
)
def test_an_offer_that_does_not_fit_its_pool_is_refused(shm, change, error):
    with pytest.raises(error):
        begun(shm, **change)
    assert not shm.sink.busy()


def test_a_lease_slot_out_of_range_is_refused(shm):
    offer = shm.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    address = msgspec.structs.replace(msgspec.msgpack.decode(offer.address, type=ShmAddress), lease_slot=BLOCKS)
    with pytest.raises(TransferError, match="lease slot"):
        shm.sink.begin(msgspec.structs.replace(offer, address=msgspec.msgpack.encode(address)), TO)


def test_blocks_outside_the_own_pool_are_a_bug_of_the_caller(shm):
    offer = shm.source.offer(KEY, prompt_tokens=4, blocks=OF)
    with pytest.raises(InternalError, match="reserved"):
        shm.sink.begin(offer, [BLOCKS])


def test_a_source_that_closed_is_noticed_by_a_waiting_pull(shm):
    begun(shm)
    shm.source.close()
    shm.of.close()
    assert shm.result().code == "peer_gone"


def test_pools_that_closed_are_not_kept_in_memory(shm):
    offer = begun(shm)
    shm.seal(offer)
    assert shm.result().error is None
    shm.close()
    mapped = Path("/proc/self/maps").read_text()
    assert shm.of.address.name not in mapped
    assert shm.to.address.name not in mapped


def test_pages_are_mapped_in_after_the_handshake(shm):
    offer = shm.source.offer(KEY, prompt_tokens=4, blocks=OF)
    shm.sink.handshake(offer)
    (peer,) = shm.sink._peers._peers.values()
    done = threading.Event()
    for _ in range(500):
        if peer.warmed_bytes >= peer.pool.kv_bytes:
            break
        done.wait(0.01)
    assert peer.warmed_bytes == peer.pool.kv_bytes


SOURCE = textwrap.dedent("""
    import json, sys, time
    from trtpd_testing.kv import LAYOUT, fill
    from trtpd.kv_transfer.base import TransferSettings
    from trtpd.kv_transfer.offer import encode
    from trtpd.kv_transfer.pool import SharedPool
    from trtpd.kv_transfer.ranks import RankPools
    from trtpd.kv_transfer.shm import ShmSource
    pool = SharedPool.create("child", LAYOUT, 16, generation="child")
    fill(pool)
    source = ShmSource(RankPools([pool]), TransferSettings(instance="prefill_9", generation="child"))
    offer = source.offer((1, 1), prompt_tokens=14, blocks=[3, 4, 9, 1])
    seal = source.seal((1, 1), first_token=5, first_log_prob=-0.5, seed=3)
    print(json.dumps([encode(offer).hex(), encode(seal).hex()]), flush=True)
    time.sleep(60)
""")


@pytest.fixture
def other():
    """(process, offer, seal) of a source in a process of its own."""
    path = ":".join(entry for entry in sys.path if entry)
    command = [sys.executable, "-P", "-c", SOURCE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": path}) as process:
        try:
            assert process.stdout is not None
            offer_bytes, seal_bytes = map(bytes.fromhex, json.loads(process.stdout.readline()))
            offer = decode_offer(offer_bytes)
            yield process, offer, decode_seal(seal_bytes)
        finally:
            process.kill()
    Path("/dev/shm", pool_name(offer)).unlink(missing_ok=True)


def pool_name(offer):
    return msgspec.msgpack.decode(offer.address, type=ShmAddress).ranks[0].name


def test_the_memory_of_a_killed_source_is_let_go_without_being_asked(shm, other):
    process, offer, _ = other
    shm.sink.handshake(offer)
    name = pool_name(offer)
    assert name in Path("/proc/self/maps").read_text()
    process.kill()
    pause = threading.Event()
    for _ in range(500):
        if name not in Path("/proc/self/maps").read_text():
            break
        pause.wait(0.02)
    assert name not in Path("/proc/self/maps").read_text()


def test_kv_that_was_sealed_before_its_source_was_killed_still_arrives(shm, other):
    process, offer, seal = other
    shm.sink.handshake(offer)
    shm.sink.begin(offer, TO)
    process.send_signal(signal.SIGSTOP)
    shm.sink.sealed(seal)
    process.kill()
    assert shm.result().error is None


def test_a_source_killed_before_the_handshake_is_refused(shm, other):
    process, offer, _ = other
    process.kill()
    process.wait()
    Path("/dev/shm", pool_name(offer)).unlink()
    with pytest.raises(LeaseError, match="gone"):
        shm.sink.begin(offer, TO)


def test_messages_survive_the_wire(shm):
    offer = shm.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    seal = shm.source.seal(KEY, first_token=7, first_log_prob=-0.25, seed=1 << 60)
    assert decode_offer(encode(offer)) == offer
    assert decode_seal(encode(seal)) == seal
