"""Two leaders with emulated engines and shared-memory pools, and a real router link between them."""

from __future__ import annotations

import shutil
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.emulated_build import write_build
from trtpd_testing.mini_router import MiniRouter, make_request

from trtpd.errors import RequestError, SaturatedError
from trtpd.kv_transfer.factory import TRANSPORTS
from trtpd.kv_transfer.offer import decode_offer, encode
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import RequestKind, Sampling
from trtpd.runtime.worker.assembly import Place, Worker, assemble
from trtpd.runtime.worker.local_client import LocalClient
from trtpd.runtime.worker.messages import WithdrawWork

PROMPT = tuple(range(10, 80))
KEY = (1, 1)
KV_BLOCKS = 192


class Pair:
    """prefill_0 and decode_0 in threads of this process, and one router at a time."""

    def __init__(self, *, path: str = "auto", **costs: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tw-"))
        self.address = f"ipc://{self.folder}/router"
        build = write_build(self.folder / "build", "prefill", "decode", kv_blocks=KV_BLOCKS, path=path, **costs)
        self.workers: dict[str, Worker] = {}
        self.threads: list[threading.Thread] = []
        with ExitStack() as undo:
            for name in ("prefill_0", "decode_0"):
                place = Place(build=build, instance=name, router=self.address, run_dir=self.folder, keys=None)
                self.workers[name] = assemble(place)
                undo.callback(self.workers[name].close, "test ends")
            self.undo = undo.pop_all()
        for worker in self.workers.values():
            thread = threading.Thread(target=worker.leader.run)
            thread.start()
            self.threads.append(thread)
        self.router = self.new_router()

    def new_router(self) -> MiniRouter:
        self.router = MiniRouter(self.address)
        self.router.until(lambda: len(self.router.hellos) == 2)
        return self.router

    def local(self, name: str) -> LocalClient:
        return LocalClient(self.workers[name].local_address)

    def settled(self) -> bool:
        """Nothing runs, waits, is held or is reserved on either side."""
        with self.local("prefill_0") as prefill, self.local("decode_0") as decode:
            for status in (prefill.status(), decode.status()):
                load = status.load
                if status.jobs or load is None or load.kv_blocks_free != KV_BLOCKS or load.kv_blocks_held:
                    return False
        return True

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.leader.request_stop(0.0)
        for thread in self.threads:
            thread.join()
        for worker in self.workers.values():
            worker.leader.check_integrity()
        self.undo.close()
        self.router.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.stop()


@pytest.fixture
def slow_pair():
    """20 ms a decode step, and a prompt takes about 70 ms in 5 chunks."""
    made = Pair(prefill_tokens_per_s=1000.0, decode_step_ms=20.0)
    yield made
    made.stop()


@pytest.fixture
def caching_pair():
    """20 ms a decode step, and prefixes are shared."""
    made = Pair(prefix_cache=True, decode_step_ms=20.0)
    yield made
    made.stop()


def test_what_both_sides_have_of_a_prompt_is_neither_computed_nor_moved_again(caching_pair):
    router, answers = caching_pair.router, []
    for number in (1, 2, 3):
        request = make_request(number, PROMPT, max_tokens=6)
        router.start(request)
        router.until(lambda key=request.key: router.finished(key))
        answers.append(router.answer(request.key))
    assert answers[0] == answers[1] == answers[2]
    offers, moves = ([router.of((n, 1), kind)[0] for n in (1, 2, 3)] for kind in (core.Offered, core.TransferDone))
    assert [offer.cached_tokens for offer in offers] == [0, 68, 68]  # 17 of 18 blocks of 4
    assert [move.present_tokens for move in moves] == [0, 68, 68]
    assert moves[1].bytes_moved * 18 == moves[0].bytes_moved
    router.until(caching_pair.settled)


def test_a_pull_that_is_cancelled_leaves_shared_blocks_to_those_that_use_them(caching_pair):
    router = caching_pair.router
    first = make_request(1, PROMPT, max_tokens=30)
    router.start(first)
    router.until(lambda: bool(router.of(first.key, core.TransferDone)))
    second = make_request(2, PROMPT, max_tokens=30)
    router.start(second)
    router.until(lambda: bool(router.of(second.key, core.TransferBegun)))
    router.cancel("decode_0", second.key)
    router.until(lambda: router.finished(first.key))
    assert router.answer(first.key) == whole(caching_pair, 3, max_tokens=30)


def test_measurements_of_one_stage_stay_out_of_the_prefix_cache(caching_pair):
    router = caching_pair.router
    with caching_pair.local("prefill_0") as local, caching_pair.local("decode_0") as decode:
        for _ in range(2):
            assert local.prefill(PROMPT, timeout_s=20.0, cancelled=lambda: False) is not None
        list(decode.decode(kv_tokens=70, max_tokens=2, timeout_s=20.0, cancelled=lambda: False))
        assert local.status().load.cached_blocks == decode.status().load.cached_blocks == 0
    request = make_request(1, (0,) * 70, max_tokens=4)
    router.start(request)
    router.until(lambda: router.finished(request.key))
    assert router.of(request.key, core.TransferDone)[0].present_tokens == 0


def whole(pair: Pair, request_id: int, **changes) -> list[int]:
    """The answer of one engine that does it all."""
    kind = RequestKind.CONTEXT_AND_GENERATION
    request = make_request(request_id, PROMPT, kind=kind, **changes)
    pair.router.submit("decode_0", request)
    pair.router.until(lambda: pair.router.finished(request.key))
    return pair.router.answer(request.key)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=11)], ids=["greedy", "seeded"])
def test_a_moved_request_gets_the_tokens_of_one_engine_alone(pair, sampling):
    pair.router.start(make_request(1, PROMPT, sampling=sampling))
    pair.router.until(lambda: pair.router.finished(KEY))
    assert pair.router.answer(KEY) == whole(pair, 2, sampling=sampling)
    (moved,) = pair.router.of(KEY, core.TransferDone)
    assert moved.bytes_moved >= len(PROMPT) * 2 * 2 * 2 * 8 * 4
    assert moved.path == "shm"
    pair.router.until(pair.settled)


@pytest.mark.parametrize("path", [name for name in TRANSPORTS if name != "shm"])
def test_so_it_does_over_any_transport_the_pipeline_file_asks_for(path):
    pair = Pair(path=path)
    try:
        pair.router.start(make_request(1, PROMPT))
        pair.router.until(lambda: pair.router.finished(KEY))
        assert pair.router.answer(KEY) == whole(pair, 2)
        assert [moved.path for moved in pair.router.of(KEY, core.TransferDone)] == [path]
        pair.router.until(pair.settled)
    finally:
        pair.stop()


def test_many_requests_at_once_all_get_their_own_tokens(pair):
    prompts = {n: tuple(range(n, n + 5 + 7 * n)) for n in range(1, 9)}
    for n, prompt in prompts.items():
        pair.router.start(make_request(n, prompt))
    pair.router.until(lambda: all(pair.router.finished((n, 1)) for n in prompts))
    for n, prompt in prompts.items():
        alone = make_request(100 + n, prompt, kind=RequestKind.CONTEXT_AND_GENERATION)
        pair.router.submit("decode_0", alone)
        pair.router.until(lambda key=alone.key: pair.router.finished(key))
        assert pair.router.answer((n, 1)) == pair.router.answer(alone.key)
    pair.router.until(pair.settled)


@pytest.mark.parametrize(
    "stage", [None, core.Offered, core.ChunkReady, core.Sealed, core.TransferBegun, core.TransferDone, core.Tokens]
)
def test_a_cancel_at_any_stage_leaves_nothing_on_either_side(slow_pair, stage):
    router = slow_pair.router
    router.start(make_request(1, PROMPT, max_tokens=100))
    if stage is not None:
        router.until_heard(KEY, stage)
    router.moving.clear()
    before = len(router.of(KEY, core.Drained))
    router.cancel("prefill_0", KEY)
    router.cancel("decode_0", KEY)
    router.until_heard(KEY, core.Drained, before + 2)
    router.until(slow_pair.settled)
    assert not router.finished(KEY)


def test_kv_that_nobody_pulls_is_freed_when_its_lease_lapses():
    pair = Pair(lease_s=0.3)
    try:
        pair.router.submit("prefill_0", make_request(1, PROMPT))
        pair.router.until_heard(KEY, core.Drained)
        assert pair.router.of(KEY, core.Sealed)
        pair.router.until(pair.settled)
    finally:
        pair.stop()


def test_a_new_router_finds_nothing_of_the_old_ones_work(slow_pair):
    old = slow_pair.router
    old.start(make_request(1, PROMPT, max_tokens=100))
    old.submit("prefill_0", make_request(2, PROMPT))
    old.until_heard((2, 1), core.Sealed)
    old.until_heard(KEY, core.Tokens)
    before = {name: hello[-1].generation for name, hello in old.hellos.items()}
    old.close()
    new = slow_pair.new_router()
    assert all(new.hellos[name][-1].generation > before[name] for name in before)
    new.until(slow_pair.settled)
    new.start(make_request(1, PROMPT))
    new.until(lambda: new.finished(KEY))
    common = min(len(old.answer(KEY)), len(new.answer(KEY)))
    assert old.answer(KEY)[:common] == new.answer(KEY)[:common]
    new.until(slow_pair.settled)


def test_a_stage_model_can_measure_prefill_alone(pair):
    with pair.local("prefill_0") as client:
        first = client.prefill(PROMPT, timeout_s=10)
    pair.router.submit("prefill_0", make_request(1, PROMPT))
    (sealed,) = pair.router.until_heard(KEY, core.Sealed)
    assert first.first_token == sealed.token
    pair.router.link.send("prefill_0", WithdrawWork(request_id=1, attempt=1))
    pair.router.until(pair.settled)
    assert set(pair.router.heard) == {KEY}


def test_a_stage_model_can_measure_decode_alone(pair):
    with pair.local("decode_0") as client:
        batches = list(client.decode(kv_tokens=50, max_tokens=9, timeout_s=10))
        again = list(client.decode(kv_tokens=50, max_tokens=9, timeout_s=10))
    tokens = [token for batch in batches for token in batch.ids]
    assert (len(tokens), batches[-1].done, batches[0].first_index) == (9, True, 0)
    assert tokens == [token for batch in again for token in batch.ids]
    pair.router.until(pair.settled)


def test_a_pull_that_could_never_fit_is_rejected_for_good(pair):
    router = pair.router
    router.submit("prefill_0", make_request(1, PROMPT))
    (offered,) = router.until_heard(KEY, core.Offered)
    prompt = (1,) * 256
    offer = msgspec.structs.replace(
        decode_offer(offered.offer), prompt_tokens=256, blocks=tuple(range(64)), epochs=(0,) * 64
    )
    router.pull(
        make_request(1, prompt),
        request=make_request(1, prompt, kind=RequestKind.GENERATION_ONLY),
        offer=encode(offer),
    )
    (rejected,) = router.until_heard(KEY, core.Rejected)
    assert (rejected.code, rejected.permanent) == ("invalid_argument", True)


def test_a_stage_model_that_leaves_stops_its_decode(slow_pair):
    with slow_pair.local("decode_0") as client:
        batches = client.decode(kv_tokens=50, max_tokens=150, timeout_s=30)
        next(batches)
        assert client.status().jobs == 1
        batches.close()
        slow_pair.router.until(slow_pair.settled)


def test_local_requests_that_can_not_be_done_are_refused_with_the_reason(pair):
    with pair.local("prefill_0") as prefill, pair.local("decode_0") as decode:
        with pytest.raises(RequestError, match="vocabulary"):
            prefill.prefill((10**6,), timeout_s=10)
        for kv_tokens in (0, 256, 10**12):
            with pytest.raises(RequestError, match="between 1 and 255"):
                list(decode.decode(kv_tokens=kv_tokens, max_tokens=5, timeout_s=10))
        with pytest.raises(RequestError, match="max_tokens"):
            list(decode.decode(kv_tokens=5, max_tokens=0, timeout_s=10))
        assert decode.drain().draining
        with pytest.raises(SaturatedError, match="draining"):
            list(decode.decode(kv_tokens=5, max_tokens=5, timeout_s=10))
    pair.router.until(pair.settled)
