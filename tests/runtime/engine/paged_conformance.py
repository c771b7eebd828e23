"""What an engine whose KV lies in blocks of ours must do beside what conformance.py says of all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.runtime.engine.conformance import EngineConformance
from tests.runtime.engine.driver import CONTEXT_ONLY, GENERATION_ONLY, Driver, blocks_of, prompt, request

from trtpd.errors import RequestError
from trtpd.runtime.core.events import Drained
from trtpd.runtime.engine.base import PrefillBegan, PrefillChunk, PrefillDone, Sampling


class PagedConformance(EngineConformance):
    def shift_blocks(self, sink: Driver) -> None:
        for key in ((97, 1), (98, 1), (99, 1)):
            sink.kv.reserve(key, 20, peak_tokens=30)
        sink.kv.free((98, 1))

    def test_freeing_an_unknown_key_is_ignored(self, driver):
        driver.kv.free((99, 1))
        assert driver.step().events == ()

    def test_shutdown_frees_the_pool(self, make_engine):
        driver = Driver(make_engine())
        driver.submit(request(1, prompt(60)))
        driver.step()
        pool = driver.kv.pool
        driver.engine.shutdown()
        assert pool.gone()

    def test_admission_is_reported_before_the_first_chunk_runs(self, driver):
        key = driver.submit(request(1, prompt(40)))
        report = driver.step()
        assert [type(event) for event in report.events] == [PrefillBegan]
        assert report.load.step_tokens == 0
        assert len(blocks_of(driver, key)) == 2

    def test_kv_that_was_not_copied_changes_the_tokens(self, make_engine, driver):
        sink = Driver(make_engine())
        what = request(1, prompt(70))
        expected = driver.run(what)
        sink.kv.reserve(what.key, 70, peak_tokens=82)
        rest = sink.run(replace(what, kind=GENERATION_ONLY, first_token=expected[0]))
        assert rest != expected[1:]

    def test_ready_kv_is_not_written_again(self, driver):
        key = driver.submit(request(1, prompt(90), kind=CONTEXT_ONLY))
        pool = driver.kv.pool
        seen: dict[int, bytes] = {}

        def content(tokens: int) -> bytes:
            blocks = blocks_of(driver, key)[: tokens // 32]
            return b"".join(array[blocks].tobytes() for array in (*pool.keys, *pool.values))

        while not driver.of(key, PrefillDone):
            driver.step()
            for event in driver.of(key, PrefillChunk):
                seen.setdefault(event.ready_tokens, content(event.ready_tokens))
        assert list(seen) == [32, 64]
        assert all(content(tokens) == then for tokens, then in seen.items())
        driver.engine.release(key)

    def test_chunks_answer_as_a_whole_prompt_does(self, make_engine, driver):
        whole = Driver(make_engine(chunk_tokens=200, max_step_tokens=200))
        small = Driver(make_engine(chunk_tokens=7))
        what = request(1, prompt(90))
        assert whole.run(what) == small.run(what) == driver.run(what)
        assert len(whole.of((1, 1), PrefillChunk)) == 0
        assert len(small.of((1, 1), PrefillChunk)) == 12

    def test_a_transferred_sequence_can_be_cancelled_before_it_joins(self, driver):
        driver.kv.reserve((1, 1), 40)
        driver.submit(request(1, prompt(40), kind=GENERATION_ONLY, first_token=3))
        driver.engine.cancel((1, 1))
        assert [type(event) for event in driver.step().events] == [Drained]

    def test_a_transferred_sequence_that_has_ended_is_refused_and_keeps_its_reservation(self, driver):
        kv = driver.kv
        kv.reserve((1, 1), 9)
        ended = request(1, prompt(9), kind=GENERATION_ONLY, first_token=4, sampling=Sampling(end_ids=(4,)))
        for wrong in (ended, request(1, prompt(9), kind=GENERATION_ONLY, first_token=4, max_tokens=1)):
            with pytest.raises(RequestError):
                driver.engine.submit(wrong)
        with pytest.raises(RequestError, match="reserved for 9"):
            driver.engine.submit(request(1, prompt(8), kind=GENERATION_ONLY, first_token=4))
        kv.free((1, 1))
        driver.engine.check_integrity()

    def test_what_runs_never_lacks_blocks(self, make_engine):
        driver = Driver(make_engine(kv_blocks=5))
        keys = [driver.submit(request(n, prompt(20, n), max_tokens=100)) for n in range(1, 4)]
        driver.step()
        assert driver.step().load.running == 1
        driver.finish(*keys)
        assert [len(driver.output(key)) for key in keys] == [100] * 3

    def test_reservations_end_where_room_ends(self, make_engine):
        driver = Driver(make_engine(kv_blocks=5))
        kv = driver.kv
        assert driver.reserve((1, 1), 32, peak_tokens=60) == 2
        assert driver.reserve((2, 1), 31, peak_tokens=96) == 1
        assert driver.reserve((3, 1), 5, peak_tokens=20) is None
        kv.free((2, 1))
        kv.free((2, 1))
        assert driver.reserve((3, 1), 5, peak_tokens=20) == 1

    def test_reservations_leave_the_blocks_of_the_first_in_line_alone(self, make_engine):
        driver = Driver(make_engine(kv_blocks=5))
        running = driver.submit(request(1, prompt(40), max_tokens=50))
        driver.step()
        first_in_line = driver.submit(request(2, prompt(120), max_tokens=2))
        driver.step()
        assert driver.kv.reserve((3, 1), 10, peak_tokens=20) is None
        driver.finish(running)
        driver.step()
        assert driver.of(first_in_line, PrefillBegan)
        assert driver.kv.reserve((3, 1), 10, peak_tokens=20) is not None

    def test_a_short_prompt_that_comes_later_is_done_first_and_not_for_ever(self, make_engine):
        """In steps of 32 tokens a prompt of 100 may be overtaken until 200 were computed."""
        driver = Driver(make_engine(max_step_tokens=32))
        assert driver.engine.capabilities.shorter_first
        long = driver.submit(request(1, prompt(100), kind=CONTEXT_ONLY))
        overtook = 0
        while not driver.of(long, PrefillDone):
            short = driver.submit(request(2 + overtook, prompt(30, overtook), kind=CONTEXT_ONLY))
            while not (driver.of(short, PrefillDone) or driver.of(long, PrefillDone)):
                driver.step()
            overtook += bool(driver.of(short, PrefillDone))
            driver.engine.release(short) if driver.of(short, PrefillDone) else driver.engine.cancel(short)
        assert 4 <= overtook <= 6
        driver.engine.release(long)
        driver.finish()
        driver.engine.shutdown()

    def test_freed_blocks_get_a_new_epoch(self, driver):
        what = request(1, prompt(40), kind=CONTEXT_ONLY)
        driver.prefill(what)
        blocks = blocks_of(driver, what.key)
        before = driver.kv.pool.epochs_of(blocks)
        driver.engine.release(what.key)
        after = driver.kv.pool.epochs_of(blocks)
        assert all(new > old for old, new in zip(before, after, strict=True))

    def test_load_tells_what_is_queued_and_running(self, driver):
        keys = [driver.submit(request(n, prompt(60, n))) for n in range(1, 7)]
        loads = [driver.step().load for _ in range(2)]
        assert (loads[0].running, loads[0].waiting, loads[0].queued_tokens) == (2, 4, 360)
        assert (loads[1].queued_tokens, loads[1].step_tokens) == (296, 64)
        assert loads[1].step_s >= 0
        assert loads[1].kv_blocks_free == driver.engine.limits.kv_blocks - 6
        driver.finish(*keys)
