"""What every engine must do, driven only through the Engine seam; paged_conformance.py has what a PagedKV adds.

A test class per engine inherits EngineConformance and gives it a `make_engine` fixture: a function that returns
an engine of always the same weights, f32, with the overrides of its RoleProfile it is given.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace
from tests.runtime.engine.driver import (
    CONTEXT_ONLY,
    GENERATION_ONLY,
    GREEDY,
    SEEDED,
    Driver,
    hand_over,
    prompt,
    request,
)

from trtpd.errors import EngineError, RequestError
from trtpd.runtime.core.events import Drained, Tokens
from trtpd.runtime.engine.base import Engine, PrefillBegan, PrefillChunk, Sampling

MakeEngine = Callable[..., Engine]
BOTH = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


def skip_unless_resumed(driver: Driver, sampling: Sampling) -> None:
    """Where a drawn answer can't go on from another engine, or from a journal, the engine says so."""
    if sampling.temperature and not driver.engine.capabilities.seeded_resume:
        pytest.skip("what this engine draws depends on more than seed and position")


class EngineTests:
    """The fixtures of tests that drive an engine through the seam."""

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        raise NotImplementedError

    @pytest.fixture
    def driver(self, make_engine: MakeEngine) -> Iterator[Driver]:
        """An engine that must hold nothing at the end of the test."""
        driver = Driver(make_engine())
        yield driver
        driver.finish()
        load = driver.engine.poll(0.0).load
        assert (load.kv_blocks_free, load.kv_blocks_held) == (driver.engine.limits.kv_blocks, 0)
        assert (load.running, load.waiting, load.queued_tokens) == (0, 0, 0)


class EngineConformance(EngineTests):
    def test_a_whole_request_begins_chunks_and_streams_to_its_length(self, driver):
        key = driver.submit(request(1, prompt(70), max_tokens=5))
        driver.finish(key)
        chunks = [32, 64] if driver.engine.capabilities.chunk_events else []
        kinds = [type(event) for event in driver.events[key]]
        assert kinds == [PrefillBegan, *[PrefillChunk] * len(chunks), *[Tokens] * 5]
        assert [event.ready_tokens for event in driver.of(key, PrefillChunk)] == chunks
        assert [event.finish for event in driver.of(key, Tokens)] == [None] * 4 + ["length"]
        assert driver.of(key, Tokens)[0].first_index == 0

    def test_a_context_only_request_is_held_until_it_is_released(self, driver):
        key = (1, 1)
        done = driver.prefill(request(1, prompt(70), kind=CONTEXT_ONLY))
        assert (done.first_index, done.finish) == (0, None)
        report = driver.step()
        assert report.events == ()
        assert report.load.kv_blocks_held == 3
        driver.engine.release(key)
        driver.finish(key)
        assert isinstance(driver.events[key][-1], Drained)

    def shift_blocks(self, sink: Driver) -> None:
        """So that source and sink have a prompt in different blocks."""

    @BOTH
    def test_handing_the_kv_over_changes_no_token(self, make_engine, driver, sampling):
        source, sink = Driver(make_engine()), Driver(make_engine())
        skip_unless_resumed(driver, sampling)
        self.shift_blocks(sink)
        for number, tokens in enumerate((1, 31, 32, 33, 100), start=1):
            what = request(number, prompt(tokens), sampling=sampling)
            assert hand_over(source, sink, what) == driver.run(what)

    @BOTH
    def test_a_batch_answers_as_each_would_alone(self, driver, sampling):
        requests = [request(n, prompt(tokens, n), sampling=sampling) for n, tokens in enumerate((5, 40, 64, 33))]
        alone = [driver.run(what) for what in requests]
        keys = [driver.submit(replace(what, attempt=2)) for what in requests]
        driver.finish(*keys)
        assert [driver.output(key) for key in keys] == alone

    @BOTH
    def test_an_answer_goes_on_from_its_journal(self, driver, sampling):
        skip_unless_resumed(driver, sampling)
        what = request(1, prompt(40), sampling=sampling)
        expected = driver.run(what)
        journal = tuple(expected[:5])
        resumed = request(2, (*what.prompt_ids, *journal), sampling=sampling, first_index=5)
        assert driver.run(resumed) == expected[5:]
        assert driver.of((2, 1), Tokens)[0].first_index == 5

    def test_different_seeds_give_different_answers(self, driver):
        answers = {
            tuple(driver.run(request(n, prompt(20), sampling=Sampling(temperature=1.0, seed=n)))) for n in range(1, 5)
        }
        assert len(answers) == 4

    def test_an_end_token_is_emitted_and_stops_the_answer(self, driver):
        expected = driver.run(request(1, prompt(30)))
        end = expected[4]
        cut = expected[: expected.index(end) + 1]
        assert driver.run(request(2, prompt(30), sampling=Sampling(end_ids=(end,)))) == cut
        assert driver.of((2, 1), Tokens)[-1].finish == "stop"

    def test_a_first_token_that_ends_the_answer_says_so_and_is_still_held(self, driver):
        first = driver.run(request(1, prompt(30)))[0]
        stop = driver.prefill(request(2, prompt(30), kind=CONTEXT_ONLY, sampling=Sampling(end_ids=(first,))))
        length = driver.prefill(request(3, prompt(30), kind=CONTEXT_ONLY, max_tokens=1))
        assert (stop.finish, length.finish) == ("stop", "length")
        assert driver.step().load.kv_blocks_held == (2 if driver.engine.capabilities.release else 1)
        for key in ((2, 1), (3, 1)):
            driver.engine.release(key)

    def test_the_longest_sequence_ends_with_length(self, driver):
        longest = driver.engine.limits.max_seq_tokens
        output = driver.run(request(1, prompt(longest - 3), max_tokens=50))
        assert len(output) == 3
        assert driver.of((1, 1), Tokens)[-1].finish == "length"

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 34])
    def test_an_answer_has_as_many_tokens_as_asked_for(self, driver, max_tokens):
        assert len(driver.run(request(1, prompt(31), max_tokens=max_tokens))) == max_tokens

    def test_log_probabilities_come_when_asked_for(self, driver):
        driver.run(request(1, prompt(10), sampling=Sampling(log_probs=True)))
        driver.run(request(2, prompt(10)))
        assert all(len(event.log_probs) == 1 and event.log_probs[0] <= 0 for event in driver.of((1, 1), Tokens))
        assert all(event.log_probs == () for event in driver.of((2, 1), Tokens))
        done = driver.prefill(request(3, prompt(10), kind=CONTEXT_ONLY, sampling=Sampling(log_probs=True)))
        assert done.log_prob == driver.of((1, 1), Tokens)[0].log_probs[0]
        driver.engine.release((3, 1))

    def test_cancel_frees_at_every_stage(self, driver):
        first = [driver.submit(request(n, prompt(60, n), max_tokens=190)) for n in range(1, 5)]
        waiting = driver.submit(request(9, prompt(60)))
        driver.step()  # admitted
        driver.engine.cancel(waiting)
        driver.engine.cancel(first[0])
        driver.step()  # half prefilled
        driver.engine.cancel(first[1])
        driver.until(lambda: len(driver.of(first[2], Tokens)) > 2)  # decoding
        driver.engine.cancel(first[2])
        driver.engine.cancel(first[3])
        driver.prefill(request(5, prompt(60), kind=CONTEXT_ONLY))  # held
        driver.engine.cancel((5, 1))
        driver.finish()
        for key in (*first, waiting, (5, 1)):
            assert isinstance(driver.events[key][-1], Drained)
            assert len(driver.of(key, Drained)) == 1

    def test_unknown_keys_are_ignored(self, driver):
        driver.engine.cancel((99, 1))
        driver.engine.release((99, 1))
        assert driver.step().events == ()

    def test_release_does_not_stop_what_is_not_held(self, driver):
        key = driver.submit(request(1, prompt(20)))
        driver.step()
        driver.engine.release(key)
        driver.finish(key)
        assert len(driver.output(key)) == 12

    @pytest.mark.parametrize(
        "wrong",
        [
            request(1, ()),
            request(1, (5, 199)),
            request(1, (-1,)),
            request(1, prompt(256)),
            request(1, prompt(9), max_tokens=0),
            request(1, prompt(9), max_tokens=-3),
            request(1, prompt(9), max_tokens=4, first_index=4),
            request(1, prompt(9), first_index=9),
            request(1, prompt(9), first_index=-1),
            request(1, prompt(9), first_token=4),
            request(1, prompt(9), sampling=Sampling(temperature=-0.1)),
            request(1, prompt(9), sampling=Sampling(temperature=float("nan"))),
            request(1, prompt(9), sampling=Sampling(top_p=0.0)),
            request(1, prompt(9), sampling=Sampling(top_k=-1)),
            request(1, prompt(9), kind=GENERATION_ONLY),
            request(1, prompt(9), kind=GENERATION_ONLY, first_token=4),
        ],
        ids=lambda what: f"{what.kind}-{len(what.prompt_ids)}-{what.max_tokens}-{what.first_index}",
    )
    def test_a_request_that_can_never_run_is_refused_and_leaves_nothing(self, driver, wrong):
        with pytest.raises(RequestError, match=f"request {wrong.request_id}"):
            driver.engine.submit(wrong)
        assert driver.step().events == ()

    def test_an_attempt_is_taken_once(self, driver):
        driver.submit(request(1, prompt(9)))
        with pytest.raises(RequestError, match="attempt 1"):
            driver.engine.submit(request(1, prompt(9)))

    def test_a_request_larger_than_the_pool_is_refused(self, make_engine):
        driver = Driver(make_engine(kv_blocks=3))
        with pytest.raises(RequestError, match="4 KV blocks, the pool has 3"):
            driver.engine.submit(request(1, prompt(90), max_tokens=30))
        assert len(driver.run(request(2, prompt(90), max_tokens=7))) == 7

    def test_wake_ends_a_wait(self, driver):
        threading.Timer(0.05, driver.engine.wake).start()
        assert driver.engine.poll(60.0).events == ()

    def test_shutdown_ends_the_engine(self, make_engine):
        driver = Driver(make_engine())
        driver.submit(request(1, prompt(60)))
        driver.step()
        driver.engine.shutdown()
        driver.engine.shutdown()
        driver.engine.check_integrity()
        for call in (lambda: driver.engine.poll(0.0), lambda: driver.engine.submit(request(2, prompt(5)))):
            with pytest.raises(EngineError, match="shut down"):
                call()

    @pytest.mark.parametrize("seed", range(3))
    def test_random_traffic_with_cancels_ends_clean_and_right(self, driver, seed):
        rng = random.Random(seed)
        requests = [
            request(
                n, prompt(rng.randint(1, 90), n), max_tokens=rng.randint(1, 12), sampling=rng.choice([GREEDY, SEEDED])
            )
            for n in range(12)
        ]
        expected = {what.key: driver.run(replace(what, attempt=7)) for what in requests}
        cancelled = set()
        for what in requests:
            driver.submit(what)
            for _ in range(rng.randint(0, 4)):
                driver.step()
            if rng.random() < 0.3:
                victim = rng.choice(requests[: what.request_id + 1]).key
                driver.engine.cancel(victim)
                cancelled.add(victim)
        driver.finish()
        for key, output in expected.items():
            got = driver.output(key)
            assert got == output[: len(got)]
            assert key in cancelled or got == output
