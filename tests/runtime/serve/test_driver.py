"""The driver with the real RouterCore, a link in memory, and instances that the test plays."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from trtpd_testing import roles

from trtpd.runtime.core import events as core
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.serve.driver import Driver
from trtpd.runtime.serve.metrics import Metrics
from trtpd.runtime.serve.orders import Prepared
from trtpd.runtime.serve.sinks import CollectSink
from trtpd.runtime.worker.messages import CancelWork, SubmitWork, SwitchWork, WireError

WAIT_S = 20.0
PROMPT = tuple(b"Say it: ")


class MemoryLink:
    """RouterLink without sockets. `tell` plays a leader; what the driver sends is in `sent`."""

    epoch = "e1"

    def __init__(self, wake) -> None:
        self.wake = wake
        self.inbox: deque[core.Event] = deque()
        self.sent: queue.Queue = queue.Queue()
        self.refuse = False

    def start(self) -> None: ...

    def drain(self):
        while self.inbox:
            yield self.inbox.popleft()

    def send(self, instance, message) -> bool:
        if self.refuse:
            raise WireError("a SubmitWork of 99 bytes is longer than a message may have")
        self.sent.put((instance, message))
        return True

    def peers(self):
        return []

    def check(self) -> None: ...

    def close(self) -> None: ...

    def tell(self, event: core.Event) -> None:
        self.inbox.append(event)
        self.wake()

    def expect(self, kind):
        """The next message of this kind and whom it went to."""
        while True:
            instance, message = self.sent.get(timeout=WAIT_S)
            if isinstance(message, kind):
                return instance, message


class Sums:
    """What counters grew by, by name."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def add(self, name, labels, value) -> None:
        self.counters[name] += value

    def observe(self, *_) -> None: ...

    set = observe


class LeavingSink(CollectSink):
    gone = False

    def left(self) -> bool:
        return self.gone


def hello(name: str) -> core.Hello:
    return roles.hello(name, "mixed", f"{name}-g1")


class Bench:
    """A driver with its link, and the mixed instances `a` and `b` at the other end of it."""

    def __init__(self, text) -> None:
        self.fatal: list[BaseException] = []
        self.died = threading.Event()
        self.router = RouterCore(Policy(no_instance_grace_s=0.05))
        self.sums = Sums()
        self.driver = Driver(self.router, self._make_link, text, Metrics(self.sums, "m"), on_fatal=self._on_fatal)

    def _make_link(self, wake):
        self.link = MemoryLink(wake)
        return self.link

    def _on_fatal(self, error):
        self.fatal.append(error)
        self.died.set()

    def submit(self, *, sink=None, **changes):
        sink = sink or CollectSink()
        prepared: dict[str, Any] = {
            "prompt_ids": PROMPT,
            "max_tokens": 64,
            "sampling": Sampling(seed=9),
            "deadline_s": 60.0,
        }
        self.driver.submit(Prepared(**prepared | changes), sink, stream=True)
        return sink

    def say(self, instance: str, work: SubmitWork, text: bytes, *, finish=None, after: int = 0) -> None:
        """Tokens of one step, `after` tokens of this attempt having come before."""
        tokens = core.Tokens(
            request_id=work.request.request_id,
            attempt=work.request.attempt,
            first_index=work.request.first_index + after,
            ids=tuple(text),
            finish=finish,
        )
        load = core.Load(kv_blocks_free=60)
        self.link.tell(core.Step(instance=instance, generation=f"{instance}-g1", events=(tokens,), load=load))


@pytest.fixture
def bench(bytewise):
    made = Bench(bytewise)
    made.driver.start()
    made.link.tell(hello("a"))
    made.driver.wait_for(["a"], WAIT_S)
    yield made
    made.driver.stop()


def ended(sink):
    outcome = sink.wait(WAIT_S)
    assert outcome is not None, "the client never got its last response"
    return outcome


def test_an_answer_comes_as_text_with_its_end_and_timeline(bench):
    sink = bench.submit()
    instance, work = bench.link.expect(SubmitWork)
    assert (instance, work.request.prompt_ids, work.request.sampling.seed) == ("a", PROMPT, 9)
    bench.say("a", work, "héllo".encode(), finish="stop")
    outcome = ended(sink)
    assert (outcome.text, outcome.end.finish_reason) == ("héllo", "stop")
    assert '"prefill":"a"' in outcome.end.timeline


def test_a_prompt_that_is_to_come_back_stands_before_the_answer(bench):
    sink = bench.submit(echo=True)
    _, work = bench.link.expect(SubmitWork)
    bench.say("a", work, b"x", finish="length")
    assert ended(sink).text == "Say it: x"


def test_the_token_that_ends_an_answer_is_not_printed(bench):
    sink = bench.submit(sampling=Sampling(end_ids=(ord("."),)))
    _, work = bench.link.expect(SubmitWork)
    bench.say("a", work, b"done.", finish="stop")
    outcome = ended(sink)
    assert (outcome.text, bytes(outcome.ids)) == ("done", b"done.")


def test_a_stop_string_ends_the_answer_and_the_work_for_it(bench):
    sink = bench.submit(stops=("END",))
    _, work = bench.link.expect(SubmitWork)
    bench.say("a", work, b"text E")
    bench.say("a", work, b"ND and more", after=6)
    outcome = ended(sink)
    assert (outcome.text, outcome.end.finish_reason) == ("text ", "stop")
    assert bytes(outcome.ids) == b"text END"
    assert bench.link.expect(CancelWork)[1].request_id == work.request.request_id


def test_further_answers_begin_with_the_first_token_of_the_first_and_go_their_own_ways(bench):
    sinks = [CollectSink() for _ in range(3)]
    prepared = [
        Prepared(
            prompt_ids=PROMPT,
            max_tokens=8,
            sampling=Sampling(seed=seed),
            deadline_s=60.0,
            block_hashes=(1, 2),
            reuse=True,
        )
        for seed in (1, 2, 3)
    ]
    bench.driver.submit_all(prepared, sinks, stream=True)
    _, first = bench.link.expect(SubmitWork)
    assert bench.driver.status()["requests_in_flight"] == 1
    bench.say("a", first, b"a")
    others = [bench.link.expect(SubmitWork)[1] for _ in range(2)]
    assert [work.request.sampling.seed for work in (first, *others)] == [1, 2, 3]
    assert all(work.request.reuse and work.deadline_in_s <= 60.0 for work in (first, *others))
    bench.say("a", others[0], b"bbb", finish="stop")
    bench.say("a", first, b"a", after=1, finish="stop")
    bench.say("a", others[1], b"c", finish="stop")
    assert [ended(sink).text for sink in sinks] == ["aa", "bbb", "c"]


def test_if_the_first_answer_fails_the_others_end_with_it(bench):
    bench.link.refuse = True
    sinks = [CollectSink() for _ in range(2)]
    prepared = Prepared(prompt_ids=PROMPT, max_tokens=8, sampling=Sampling(), deadline_s=60.0)
    bench.driver.submit_all([prepared] * 2, sinks, stream=True)
    first, second = map(ended, sinks)
    assert first.end.failure.status == "INVALID_ARG"
    assert second.end.cancelled


def test_a_stop_string_is_not_looked_for_before_the_least_number_of_tokens(bench):
    sink = bench.submit(stops=("END",), sampling=Sampling(min_tokens=9))
    _, work = bench.link.expect(SubmitWork)
    bench.say("a", work, b"text END and END or not")
    outcome = ended(sink)
    assert (outcome.text, bytes(outcome.ids)) == ("text END and ", b"text END and END")


def test_the_likeliest_tokens_go_out_with_theirs_and_cached_tokens_with_the_end(bench):
    sink = bench.submit()
    _, work = bench.link.expect(SubmitWork)
    event = core.Tokens(
        request_id=work.request.request_id,
        attempt=work.request.attempt,
        first_index=0,
        ids=(65, 66),
        top_log_probs=(((65, -0.1), (66, -0.9)), ((66, -0.2), (65, -2.0))),
        cached_tokens=5,
        finish="stop",
    )
    preempted = core.Preempted(request_id=work.request.request_id, attempt=work.request.attempt)
    load = core.Load(kv_blocks_free=60)
    bench.link.tell(core.Step(instance="a", generation="a-g1", events=(preempted, event), load=load))
    outcome = ended(sink)
    assert outcome.top_log_probs == [((65, -0.1), (66, -0.9)), ((66, -0.2), (65, -2.0))]
    assert outcome.end.cached_tokens == 5
    assert '"cached_tokens":5,"preemptions":1' in outcome.end.timeline


def test_a_stop_string_in_the_last_token_allowed_ends_the_answer_as_a_stop(bench):
    sink = bench.submit(stops=("END",), max_tokens=8)
    _, work = bench.link.expect(SubmitWork)
    bench.say("a", work, b"text END", finish="length")
    outcome = ended(sink)
    assert (outcome.text, outcome.end.finish_reason) == ("text ", "stop")
    assert '"finish":"stop"' in outcome.end.timeline


def test_after_a_loss_the_next_instance_continues_from_what_the_client_has(bench):
    sink = bench.submit()
    _, work = bench.link.expect(SubmitWork)
    bench.link.tell(hello("b"))
    bench.say("a", work, b"one ")
    bench.link.tell(core.Lost(instance="a", generation="a-g1", reason="killed"))
    instance, again = bench.link.expect(SubmitWork)
    assert (instance, again.request.first_index) == ("b", 4)
    assert again.request.prompt_ids == (*PROMPT, *b"one ")
    bench.say("b", again, b"two", finish="stop")
    outcome = ended(sink)
    assert outcome.text == "one two"
    assert bytes(outcome.ids) == b"one two"


def test_without_an_instance_the_client_is_told_so_for_machines_to_read(bench):
    bench.link.tell(core.Lost(instance="a", generation="a-g1", reason="killed"))
    time.sleep(0.1)  # longer than the policy's grace
    outcome = ended(bench.submit())
    assert outcome.end.failure.status == "UNAVAILABLE"
    assert outcome.end.failure.message.startswith("code=no_instance ")


def test_a_client_that_leaves_has_its_work_cancelled(bench):
    sink = LeavingSink()
    bench.submit(sink=sink)
    bench.link.expect(SubmitWork)
    sink.gone = True
    _, work = bench.link.expect(CancelWork)
    assert work.request_id == 1
    assert ended(sink).end.cancelled


def test_a_request_too_long_for_the_wire_is_refused_alone(bench):
    bench.link.refuse = True
    outcome = ended(bench.submit())
    assert outcome.end.failure.status == "INVALID_ARG"
    assert "longer than" in outcome.end.failure.message
    assert not bench.fatal


def test_a_broken_router_tells_every_client_and_ends(bench, monkeypatch):
    first = bench.submit()
    bench.link.expect(SubmitWork)
    monkeypatch.setattr(bench.router, "handle", lambda *_: 1 / 0)
    second = bench.submit()
    assert bench.died.wait(WAIT_S)
    assert isinstance(bench.fatal[0], ZeroDivisionError)
    for sink in (first, second, bench.submit()):
        assert ended(sink).end.failure.status in ("INTERNAL", "UNAVAILABLE")


def test_draining_refuses_new_requests_and_cuts_what_runs_at_its_end(bench):
    running = bench.submit()
    _, work = bench.link.expect(SubmitWork)
    bench.driver.drain(time.monotonic() + 1e6)
    assert "shutting_down" in ended(bench.submit()).end.failure.message
    bench.driver.drain(time.monotonic() - 1.0)
    assert "shutting_down" in ended(running).end.failure.message
    assert bench.link.expect(CancelWork)[1].request_id == work.request.request_id


def test_stopping_leaves_no_client_without_an_end(bench):
    sink = bench.submit()
    bench.link.expect(SubmitWork)
    bench.driver.stop()
    assert ended(sink).end.failure.status == "UNAVAILABLE"


def answered(bench):
    sink = bench.submit()
    _, work = bench.link.expect(SubmitWork)
    bench.say("a", work, b"abc", finish="stop")
    ended(sink)


def test_what_is_asked_to_try_the_instances_is_counted_by_neither_status_nor_metrics(bench):
    with bench.driver.uncounted():
        answered(bench)
    counters = bench.driver.status()["counters"]
    assert not any(counters[name] for name in ("arrived", "finished", "finished_stop", "placed_mixed", "output_tokens"))
    answered(bench)
    counters = bench.driver.status()["counters"]
    assert (counters["arrived"], counters["finished_stop"], counters["placed_mixed"]) == (1, 1, 1)
    assert counters["output_tokens"] == 3
    end_s = time.monotonic() + WAIT_S
    while not bench.sums.counters["trtpd_placements_total"]:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    bench.driver.stop()
    assert bench.sums.counters["trtpd_placements_total"] == 1
    assert bench.sums.counters["trtpd_requests_total"] == 1
    assert bench.sums.counters["trtpd_output_tokens_total"] == 3


def test_status_says_who_is_there_and_what_runs(bench):
    bench.submit()
    bench.link.expect(SubmitWork)
    status = bench.driver.status()
    assert status["requests_in_flight"] == 1
    assert status["instances"]["a"]["state"] == "ready"
    assert status["instances"]["a"]["requests"] == 1
    assert status["epoch"] == "e1"


class Proposing:
    """The real core, and once a role switch that it did not think of."""

    def __init__(self, router: RouterCore, switch: core.SwitchRole) -> None:
        self._router = router
        self._switch: core.SwitchRole | None = switch
        self.events: list[core.Event] = []

    def handle(self, now_s, event):
        self.events.append(event)
        commands = self._router.handle(now_s, event)
        if isinstance(event, core.Hello) and event.instance == "b" and self._switch is not None:
            commands, self._switch = [*commands, self._switch], None
        return commands

    def snapshot(self):
        return self._router.snapshot()


def test_a_role_switch_is_passed_on_and_shown_until_the_instance_is_back(bytewise):
    made = Bench(bytewise)
    proposing = Proposing(made.router, core.SwitchRole(instance="b", role="prefill"))
    made.driver._core = proposing
    made.driver.start()
    try:
        made.link.tell(replace(hello("a"), role="decode"))
        made.link.tell(replace(hello("b"), role="decode"))
        assert made.link.expect(SwitchWork) == ("b", SwitchWork(role="prefill"))
        status = made.driver.status()
        assert (status["instances"]["b"]["state"], status["instances"]["b"]["becoming"]) == ("draining", "prefill")
        assert status["instances"]["a"]["becoming"] is None
        made.link.tell(replace(hello("b"), role="prefill", generation="b-g2"))
        status = made.driver.status()
        back = status["instances"]["b"]
        assert (back["role"], back["state"], back["becoming"]) == ("prefill", "ready", None)
        assert status["counters"]["switched_prefill_done"] == 1
    finally:
        made.driver.stop()
