"""The TensorRT-LLM engine over an executor that does what a test tells it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.runtime.engine import tiny
from tests.runtime.engine.driver import CONTEXT_ONLY, GENERATION_ONLY, WHOLE, prompt, request
from trtpd_testing import tensorrt

from trtpd.errors import EngineError, RequestError, TransferError
from trtpd.runtime.core.events import Drained, Rejected, Tokens
from trtpd.runtime.engine.base import EngineEvent, KVArrived, PrefillBegan, PrefillDone, RequestKind, Sampling
from trtpd.runtime.engine.tensorrt_llm.backend import Answer, Iteration, Start, Use
from trtpd.runtime.engine.tensorrt_llm.engine import STUCK_S, TensorRTEngine
from trtpd.runtime.engine.tensorrt_llm.hand_off import HandOff, encode

VERSION = "1.2.1"


class ScriptedBackend:
    """Gives out what was put into `say`. `cancels_held` as the executor a test stands for."""

    ids_in_statistics = True

    def __init__(self) -> None:
        self.cancels_held = self.cancels_fetching = False
        self.started: dict[int, Start] = {}
        self.cancelled: list[int] = []
        self.forgotten: list[int] = []
        self.closed = False
        self.refusal: Exception | None = None
        self._said: deque[Answer | Iteration | Exception] = deque()

    def start(self, start: Start) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.started[len(self.started) + 1] = start
        return len(self.started)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)

    def say(self, *what: Answer | Iteration | Exception) -> None:
        self._said.extend(what)

    def answers(self, timeout_s: float) -> list[Answer]:
        if not self._said or isinstance(self._said[0], Iteration):
            time.sleep(0.001)
            return []
        found = self._said.popleft()
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Answer)
        return [found]

    def iterations(self) -> list[Iteration]:
        found = []
        while self._said and isinstance(self._said[0], Iteration):
            item = self._said.popleft()
            assert isinstance(item, Iteration)
            found.append(item)
        return found

    def close(self) -> None:
        self.closed = True

    @property
    def quiet(self) -> bool:
        return not self._said


class Bench:
    """An engine, its backend, and a clock that stands still."""

    def __init__(self, **trt: Any) -> None:
        self.now_s = 100.0
        self.backend = ScriptedBackend()
        config = tensorrt.engine_config(tiny.architecture(), tiny.PROFILE, tensorrt.settings(**trt))
        self.engine = TensorRTEngine(config, self.backend, version=VERSION, clock=lambda: self.now_s)

    def say(self, *what: Answer | Iteration) -> list[Any]:
        """What the engine tells once it has heard it."""
        self.backend.say(*what)
        events: list[EngineEvent] = []
        until_s = time.monotonic() + 5
        while not self.backend.quiet and time.monotonic() < until_s:
            events += self.engine.poll(0.001).events
        time.sleep(0.01)  # the reader hands over what it took last
        events += self.engine.poll(0.0).events
        self.engine.check_integrity()
        return events

    def wait(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return list(self.engine.poll(0.0).events)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.engine.shutdown()
    assert made.backend.closed


def hand_off(token: int = 7, **changes: object) -> HandOff:
    made = HandOff(version=VERSION, first_gen_tokens=(token,), req_id=1, opaque_state=b"state")
    return msgspec.structs.replace(made, **changes)


def generation(number: int = 1, *, tokens: int = 40, max_tokens: int = 5, first_token: int = 7, **changes: object):
    made = request(number, prompt(tokens), kind=GENERATION_ONLY, max_tokens=max_tokens, first_token=first_token)
    return msgspec.structs.replace(made, **({"hand_off": encode(hand_off(first_token))} | changes))


def iteration(used: int, **uses: Use) -> Iteration:
    """`uses` by _ID."""
    named = {int(name[1:]): use for name, use in uses.items()}
    return Iteration(used_blocks=used, pool_blocks=24, seconds=0.01, tokens=9, uses=named)


def active(blocks: int, context_tokens: int = 40) -> Use:
    return Use(stage="active", context_tokens=context_tokens, tokens=context_tokens, blocks=blocks)


COMPLETE = Use(stage="complete", context_tokens=70, tokens=71, blocks=3)


def held(bench: Bench, number: int = 1) -> list[Any]:
    """A context request of 70 tokens that is held, as executor's request `number`."""
    bench.engine.submit(request(number, prompt(70), kind=CONTEXT_ONLY))
    return bench.say(
        iteration(3 * number, **{f"_{number}": COMPLETE}),
        Answer(id=number, final=True, ids=(7,), hand_off=hand_off(req_id=number)),
    )


def test_a_context_request_asks_for_one_token_and_no_end(bench):
    bench.engine.submit(request(1, prompt(70), kind=CONTEXT_ONLY, sampling=Sampling(end_ids=(3,))))
    start = bench.backend.started[1]
    assert (start.kind, start.max_tokens, start.hand_off) == (CONTEXT_ONLY, 1, None)


def test_an_offer_comes_with_the_first_token(bench):
    began, done = held(bench)
    assert (began, done.token) == (PrefillBegan(request_id=1, attempt=1, blocks=()), 7)
    assert bench.engine.hand_off_of((1, 1)) == encode(hand_off())
    assert bench.engine.poll(0.0).load.kv_blocks_held == 3


def test_the_first_token_is_neither_told_twice_nor_held_back(bench):
    bench.engine.submit(generation())
    assert bench.backend.started[1].max_tokens == 5
    (arrived,) = bench.say(Answer(id=1, final=False, ids=(7,)))
    assert isinstance(arrived, KVArrived)
    (told,) = bench.say(Answer(id=1, final=False, ids=(8,)))
    assert (told.first_index, told.ids) == (1, (8,))


def test_a_first_token_that_comes_along_with_the_second_is_cut_off(bench):
    bench.engine.submit(generation(sampling=Sampling(log_probs=True)))
    arrived, told = bench.say(Answer(id=1, final=False, ids=(7, 8), log_probs=(-1.0, -2.0)))
    assert isinstance(arrived, KVArrived)
    assert (told.first_index, told.ids, told.log_probs) == (1, (8,), (-2.0,))


def test_an_executor_that_goes_on_from_another_token_is_not_believed(bench):
    bench.engine.submit(generation())
    (rejected,) = bench.say(Answer(id=1, final=False, ids=(9,)))
    assert (rejected.code, bench.backend.cancelled) == ("engine_failed", [1])
    assert "from token 9 where 7" in rejected.reason
    assert bench.engine.poll(0.0).load.kv_blocks_free < 24
    assert bench.say(Answer(id=1, final=True, finish="cancelled")) == []
    assert bench.engine.poll(0.0).load.kv_blocks_free == 24


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"hand_off": b""}, RequestError, "hand_off is missing"),
        ({"hand_off": b"\x81nonsense"}, TransferError, "can't be read"),
        ({"hand_off": encode(hand_off(version="1.0"))}, TransferError, "never crosses"),
        ({"hand_off": encode(hand_off(opaque_state=None))}, TransferError, "no KV behind it"),
        ({"first_token": 9}, RequestError, "is 9, the hand-off says 7"),
    ],
    ids=["missing", "nonsense", "version", "stateless", "token"],
)
def test_a_hand_off_that_is_none_starts_nothing(bench, changes, error, said):
    changed = generation()
    with pytest.raises(error, match=said):
        bench.engine.submit(msgspec.structs.replace(changed, **changes))
    assert bench.backend.started == {}


def test_an_answer_of_one_token_holds_nothing(bench):
    bench.engine.submit(request(1, prompt(70), kind=CONTEXT_ONLY, max_tokens=1))
    assert bench.backend.started[1].kind is WHOLE
    began, done = bench.say(Answer(id=1, final=True, ids=(7,), finish="length"))
    assert (type(began), done.finish) == (PrefillBegan, "length")
    assert bench.engine.poll(0.0).load.kv_blocks_held == 0
    bench.engine.release((1, 1))
    assert bench.wait(0.0) == [Drained(request_id=1, attempt=1)]


def test_held_kv_counts_until_the_executor_shows_that_it_is_gone(bench):
    held(bench)
    bench.engine.release((1, 1))
    assert bench.say(iteration(3)) == []
    assert bench.engine.poll(0.0).load.kv_blocks_held == 3
    assert bench.say(iteration(0)) == [Drained(request_id=1, attempt=1)]
    assert bench.engine.poll(0.0).load.kv_blocks_held == 0


def test_blocks_of_active_requests_are_not_taken_for_held_ones(bench):
    held(bench, 1)
    bench.engine.submit(request(2, prompt(90), max_tokens=5))
    bench.engine.release((1, 1))
    assert bench.say(iteration(6, _2=active(3, 90))) == []
    assert bench.say(iteration(3, _2=active(3, 90))) == [Drained(request_id=1, attempt=1)]


def test_numbers_from_before_a_request_began_say_nothing_of_it(bench):
    bench.engine.submit(request(1, prompt(70), kind=CONTEXT_ONLY))
    bench.say(Answer(id=1, final=True, ids=(7,), hand_off=hand_off()))
    bench.engine.release((1, 1))
    assert bench.say(iteration(0)) == []
    assert bench.say(iteration(3, _1=COMPLETE)) == []
    assert bench.say(iteration(0)) == [Drained(request_id=1, attempt=1)]


def test_of_two_holds_the_one_that_was_closed_is_gone_first(bench):
    held(bench, 1)
    bench.engine.submit(request(2, prompt(70), kind=CONTEXT_ONLY))
    bench.say(iteration(6, _2=COMPLETE), Answer(id=2, final=True, ids=(7,), hand_off=hand_off(req_id=2)))
    bench.engine.release((2, 1))
    assert bench.say(iteration(3)) == [Drained(request_id=2, attempt=1)]
    assert bench.say(iteration(0)) == []  # nobody closed it, and its time limit hasn't passed
    bench.now_s += 5.1
    assert bench.say(iteration(0)) == [Drained(request_id=1, attempt=1)]


@pytest.mark.parametrize("reaches", [True, False])
def test_a_held_request_is_cancelled_where_that_reaches_it(bench, reaches):
    bench.backend.cancels_held = reaches
    held(bench)
    bench.engine.cancel((1, 1))
    assert bench.backend.cancelled == ([1] if reaches else [])
    bench.say(iteration(0))


def test_an_idle_executor_is_nudged_until_the_hold_is_gone_and_no_longer(bench):
    held(bench)
    bench.engine.release((1, 1))
    bench.wait(0.0)
    bench.wait(0.05)
    assert [len(start.prompt_ids) for start in bench.backend.started.values()][1:] == [1]
    bench.wait(5.0)
    assert len(bench.backend.started) == 2  # one at a time
    assert bench.say(Answer(id=2, final=True, ids=(3,), finish="length")) == []
    bench.wait(5.0)
    assert len(bench.backend.started) == 3
    assert bench.say(iteration(0), Answer(id=3, final=True, ids=(3,))) == [Drained(request_id=1, attempt=1)]
    bench.wait(5.0)
    bench.wait(5.0)
    assert len(bench.backend.started) == 3


def test_kv_that_does_not_come_in_time_ends_the_request_and_counts_on():
    bench = Bench(kv_transfer_timeout_ms=2000)
    bench.engine.submit(generation())
    assert bench.wait(1.9) == []
    (rejected,) = bench.wait(0.2)
    assert (rejected.code, bench.backend.cancelled) == ("transfer_timeout", [])
    assert bench.engine.poll(0.0).load.kv_blocks_free == 22
    bench.engine.submit(generation())  # its key is free again
    assert bench.say(Answer(id=1, final=False, ids=(7,))) == []
    assert bench.backend.cancelled == [1]
    assert bench.say(Answer(id=1, final=True, finish="cancelled")) == []
    assert bench.engine.poll(0.0).load.kv_blocks_free == 22
    bench.engine.shutdown()


@pytest.mark.parametrize("may", [True, False])
def test_a_fetch_under_way_is_cancelled_at_once_only_where_that_is_safe(bench, may):
    bench.backend.cancels_fetching = may
    bench.engine.submit(generation())
    bench.engine.cancel((1, 1))
    assert bench.backend.cancelled == ([1] if may else [])
    assert bench.say(Answer(id=1, final=False, ids=(7, 8))) == []
    assert bench.say(Answer(id=1, final=True, finish="cancelled")) == [Drained(request_id=1, attempt=1)]


def test_what_was_given_up_is_not_given_up_again(bench):
    bench.engine.submit(generation())
    bench.wait(60.0)
    bench.engine.submit(generation())
    assert bench.say(Answer(id=1, final=False, ids=(9,))) == []
    assert bench.say(Answer(id=1, final=True, error="broken")) == []
    arrived, told = bench.say(Answer(id=2, final=True, ids=(7, 8), finish="length"))
    assert (type(arrived), told.ids) == (KVArrived, (8,))


def test_holds_that_never_go_end_the_engine(bench):
    for number in range(1, 6):
        held(bench, number)
        bench.engine.release((number, 1))
    with pytest.raises(EngineError, match="kv_transfer_timeout_ms"):
        bench.wait(STUCK_S + 1)


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        (WHOLE, Answer(id=1, final=True, error="CUDA out of memory"), "CUDA out of memory"),
        (WHOLE, Answer(id=1, final=True, finish="timed_out"), "timed_out"),
        (CONTEXT_ONLY, Answer(id=1, final=True, ids=(7,)), "cache_transceiver_config"),
    ],
)
def test_what_fails_is_rejected_with_the_executors_words(bench, kind, answer, said):
    bench.engine.submit(request(1, prompt(9), kind=kind))
    (rejected,) = bench.say(answer)
    assert isinstance(rejected, Rejected)
    assert said in rejected.reason
    assert bench.backend.forgotten == [1]


def test_an_executor_that_dies_ends_the_engine(bench):
    bench.backend.say(EngineError("TensorRT-LLM: await_responses failed: NCCL"))
    until_s = time.monotonic() + 5
    while not bench.backend.quiet and time.monotonic() < until_s:
        time.sleep(0.001)
    time.sleep(0.01)
    with pytest.raises(EngineError, match="NCCL"):
        bench.engine.poll(0.0)


def test_tokens_past_the_end_are_cut_off(bench):
    bench.engine.submit(request(1, prompt(9), max_tokens=9, sampling=Sampling(end_ids=(5,))))
    _, told = bench.say(Answer(id=1, final=False, ids=(4, 5, 6)))
    assert (told.ids, told.finish) == ((4, 5), "stop")
    assert bench.backend.cancelled == [1]
    assert bench.say(Answer(id=1, final=True, ids=(8,), finish="cancelled")) == []


def test_a_last_answer_without_tokens_still_ends_the_request(bench):
    bench.engine.submit(request(1, prompt(9), max_tokens=9))
    bench.say(Answer(id=1, final=False, ids=(4,)))
    (told,) = bench.say(Answer(id=1, final=True, finish="length"))
    assert told == Tokens(request_id=1, attempt=1, first_index=1, ids=(), finish="length")


@pytest.mark.parametrize(
    ("trt", "kind", "tokens", "said"),
    [
        ({"chunked_context": False}, WHOLE, 65, "at most 64 in one step"),
        ({"transceiver": "NIXL", "max_tokens_in_buffer": 64}, CONTEXT_ONLY, 65, "NIXL's buffer 64"),
    ],
)
def test_what_this_executor_could_never_do_is_refused(
    trt: dict[str, Any], kind: RequestKind, tokens: int, said: str
) -> None:
    bench = Bench(**trt)
    with pytest.raises(RequestError, match=said):
        bench.engine.submit(request(1, prompt(tokens), kind=kind))
    bench.engine.submit(request(1, prompt(64), kind=kind))
    bench.engine.shutdown()


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(logit_bias=((1, 2.0),)), "logit_bias"),
        (Sampling(top_log_probs=2, log_probs=True), "top_log_probs"),
        (Sampling(prompt_ignore_length=3), "prompt_ignore_length"),
        (Sampling(min_tokens=3, end_ids=(2,)), "min_tokens"),
    ],
)
def test_sampling_that_tensorrt_llm_has_not_is_refused_by_name(bench, sampling, named):
    with pytest.raises(RequestError, match=named):
        bench.engine.submit(request(1, prompt(9), sampling=sampling))
    assert bench.backend.started == {}


def test_load_counts_queued_prompts_until_they_are_computed(bench):
    bench.engine.submit(request(1, prompt(90), max_tokens=5))
    bench.engine.submit(request(2, prompt(60), max_tokens=5))
    load = bench.engine.poll(0.0).load
    assert (load.running, load.waiting, load.queued_tokens) == (0, 2, 150)
    queued = Use(stage="queued", context_tokens=0, tokens=0)
    bench.say(iteration(3, _1=active(3, 64), _2=queued))
    load = bench.engine.poll(0.0).load
    assert (load.running, load.waiting, load.queued_tokens) == (1, 1, 86)
    assert (load.step_s, load.step_tokens) == (0.01, 9)


def test_what_the_router_counts_itself_is_not_counted_twice(bench):
    bench.engine.submit(request(1, prompt(90), kind=CONTEXT_ONLY))
    bench.say(iteration(3, _1=active(3, 64)))
    assert bench.engine.poll(0.0).load.kv_blocks_free == 24
    bench.engine.submit(generation(2, tokens=40, max_tokens=30))
    assert bench.engine.poll(0.0).load.kv_blocks_free == 21
    assert not bench.engine.has_room(22 * 32)
    assert bench.engine.has_room(21 * 32)


def test_done_means_done(bench):
    assert isinstance(held(bench)[1], PrefillDone)
    bench.engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        bench.engine.poll(0.0)
