"""Sources in processes of their own that are killed, stopped and restarted, over every transport."""

import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import numpy as np
import pytest
from trtpd_testing.kv import LAYOUT, fill_group, leftovers, make_group, whole
from trtpd_testing.kv_process import SinkProcess, SourceProcess

from trtpd.kv_transfer import nixl_link, pace, tcp_link
from trtpd.kv_transfer.pool import sweep

OF, TO = [3, 4, 9, 1], [5, 6, 7, 2]
TOKENS = 14
TRANSPORTS = ["shm", "tcp", "nixl"]
NETWORKED = ["tcp", "nixl"]


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def pair(pairs, transport):
    return pairs(transport, still=False)


@pytest.fixture
def other(pair, transport):
    with SourceProcess(transport) as process:
        yield process
    sweep()


def arrived(pair):
    expected = make_group("expected", LAYOUT, "expected")
    fill_group(expected)
    same = np.array_equal(whole(pair.sink_pools)[:, TO], whole(expected)[:, OF])
    for pool in expected:
        pool.close()
    return same


def wait(pair, seconds):
    """Lets the sink's threads run."""
    threading.Event().wait(seconds)
    assert pair.sink.progress() == []


def test_kv_of_another_process_arrives(pair, other):
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    pair.sink.ready(other.publish(9))
    pair.sink.sealed(other.seal())
    assert pair.result().error is None
    assert arrived(pair)


def test_a_source_killed_before_its_offer_is_pulled_is_refused_or_gone(pair, other):
    offer = other.offer(TOKENS, OF)
    other.kill()
    sweep()
    assert pair.refusal(offer, TO).split(":")[0] in ("lease_lost", "peer_gone")
    assert not pair.sink.busy()


def test_a_source_killed_before_the_seal_ends_the_pull_at_once(pair, other):
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    pair.sink.ready(other.publish(9))
    wait(pair, 0.3)
    other.kill()
    result = pair.result()
    assert (result.code, result.retryable) == ("peer_gone", False)
    assert "prefill_9" in (result.error or "")


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_source_killed_while_its_bytes_are_waited_for_ends_the_pull_at_once(pair, other):
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    seal = other.seal()
    wait(pair, 0.3)
    other.stop()
    pair.sink.sealed(seal)
    wait(pair, 0.2)
    other.kill()
    result = pair.result()
    assert (result.code, result.retryable) == ("peer_gone", False)
    assert not pair.sink.busy()


def test_a_source_killed_after_the_pull_ended_changes_nothing(pair, other):
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    pair.sink.sealed(other.seal())
    assert pair.result().error is None
    other.kill()
    wait(pair, 0.2)
    assert arrived(pair)


def test_a_source_that_stood_still_for_a_while_only_makes_the_pull_late(pair, other):
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    seal = other.seal()
    wait(pair, 0.3)
    other.stop()
    pair.sink.sealed(seal)
    threading.Event().wait(0.7)
    other.go_on()
    assert pair.result().error is None
    assert arrived(pair)


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_source_that_stands_still_too_long_ends_the_pull_in_bounded_time(pair, other, monkeypatch):
    monkeypatch.setattr(pace, "SLACK_S", 0.3)
    for link in (tcp_link, nixl_link):
        monkeypatch.setattr(link, "ANSWER_S", 0.3)
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    seal = other.seal()
    wait(pair, 0.3)
    other.stop()
    pair.sink.sealed(seal)
    result = pair.result()
    assert (result.code, result.retryable) == ("transfer_timeout", False)
    before = whole(pair.sink_pools).copy()
    other.go_on()
    threading.Event().wait(0.3)
    assert np.array_equal(whole(pair.sink_pools), before)  # what comes late touches no block
    assert other.process.poll() is None


@pytest.mark.parametrize("transport", NETWORKED)
def test_a_pull_from_a_source_that_stands_still_is_aborted_at_once_and_nothing_arrives_later(pair, other):
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    seal = other.seal()
    wait(pair, 0.3)
    other.stop()
    pair.sink.sealed(seal)
    wait(pair, 0.2)
    pair.sink.abort(offer.key)
    assert pair.result().code == "aborted"
    before = whole(pair.sink_pools).copy()
    other.go_on()
    threading.Event().wait(0.3)
    assert np.array_equal(whole(pair.sink_pools), before)
    assert other.process.poll() is None


@pytest.mark.parametrize("transport", NETWORKED)
def test_one_source_that_hangs_holds_up_no_other(pairs, pair, other, transport):
    hanging = other.offer(TOKENS, OF)
    pair.sink.begin(hanging, TO)
    seal = other.seal()
    wait(pair, 0.3)
    other.stop()
    pair.sink.sealed(seal)
    offer = pair.source.offer((2, 2), prompt_tokens=4, blocks=[0])
    pair.sink.begin(offer, [0])
    pair.seal(offer)
    assert (result := pair.result()).key == (2, 2)
    assert result.error is None


@pytest.mark.parametrize("stopped", [False, True])
def test_a_sink_killed_while_it_pulls_does_its_source_no_harm(pairs, transport, stopped):
    layout = replace(LAYOUT, num_layers=8, head_dim=1024, tokens_per_block=16)  # 25 MB in 16 blocks
    pair = pairs(transport, layout=layout, still=False)
    offer = pair.source.offer((1, 1), prompt_tokens=16 * 16, blocks=list(range(16)))
    seal = pair.source.seal((1, 1), first_token=0, first_log_prob=None, seed=0)
    with SinkProcess(transport, layout) as sink:
        assert sink.pull(offer, seal) is None
        threading.Event().wait(0.1)
        if stopped:
            sink.stop()
            threading.Event().wait(0.1)
        sink.kill()
    sweep()
    pair.sink.begin(offer, list(range(16)))
    pair.sink.sealed(seal)
    assert pair.result().error is None
    assert pair.source.end((1, 1))


def test_a_peer_that_restarted_gets_a_new_start(pair, other, transport):
    offer = other.offer(TOKENS, OF)
    pair.sink.begin(offer, TO)
    pair.sink.sealed(other.seal())
    assert pair.result().error is None
    other.kill()
    with SourceProcess(transport) as again:
        offer = again.offer(TOKENS, OF)
        pair.sink.begin(offer, TO)
        pair.sink.sealed(again.seal())
        assert pair.result().error is None
    sweep()


FULL = textwrap.dedent("""
    import sys
    from pathlib import Path
    from trtpd.errors import CapacityError
    from trtpd.kv_transfer.pool import SharedPool
    from trtpd_testing.kv import LAYOUT
    try:
        SharedPool.create("full", LAYOUT, 4096, generation="g", directory=Path(sys.argv[1]))
    except CapacityError as error:
        print(error)
    print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
""")


def test_a_full_dev_shm_is_an_error_that_says_so_and_leaves_nothing(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    script = f"mount -t tmpfs -o size=1M none {tmp_path} && exec {sys.executable} -P -c '{FULL}' {tmp_path}"
    path = ":".join(entry for entry in sys.path if entry)
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={"PYTHONPATH": path, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "ermi" in run.stderr:
        pytest.skip("mounts can't be made here")
    assert "1048576 free" in run.stdout
    assert run.stdout.endswith("[]\n"), run.stderr


def test_no_pool_is_left_in_dev_shm(pair, other):
    other.offer(TOKENS, OF)
    other.kill()
    sweep()
    assert leftovers("child") == []
