from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.fake_servers import ScriptedTransport, bursty, fixed, stalled
from trtpd_testing.virtual_loop import VirtualLoop, run_virtually

from trtpd.perf.arrivals import parse
from trtpd.perf.client import Client, ClientOptions, Run
from trtpd.perf.client_health import LATE_FLOOR_S, BottleneckError, ClientHealth, Monitor, refuse_if_bottleneck
from trtpd.perf.goodput import account
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.slo import FixedSlo
from trtpd.perf.transport import Ending
from trtpd.perf.workload import Workload

SLO = FixedSlo(ttft_s=1.0, tpot_s=0.1)


def even(requests: int, rate: float, *, name: str = "chat", **more) -> Workload:
    return make(Wanted(name=name, requests=requests, rate=rate, arrivals=parse("even"), **more))


def drive(workload: Workload, transport: ScriptedTransport, *, interrupt_s: float | None = None, **options) -> Run:
    async def run() -> Run:
        client = Client(workload, transport, ClientOptions(**options))
        if interrupt_s is not None:
            asyncio.get_running_loop().call_later(interrupt_s, client.interrupt)
        return await client.run()

    return run_virtually(run())


def test_a_server_of_fixed_latencies_gives_exactly_those():
    run = drive(even(200, 20.0), ScriptedTransport(fixed(0.3, 0.05, 11)))
    figures = account(run.records, SLO, until_s=run.info.offered_until_s)
    for found, known_s in [(figures.ttft, 0.3), (figures.tpot, 0.05), (figures.itl, 0.05), (figures.total, 0.8)]:
        for interval in (found.p50, found.p90, found.p99):
            assert interval.low == pytest.approx(known_s)
            assert interval.high is None or interval.high == pytest.approx(known_s)
    assert figures.goodput["trtpd"].attainment.value == 1.0
    assert figures.goodput["trtpd"].per_s.value == pytest.approx(20.0, rel=0.01)
    assert run.health.late_largest_s == pytest.approx(0.0, abs=1e-9)


def test_a_stalled_server_shows_in_every_request_that_was_due_meanwhile():
    workload = even(300, 10.0)
    run = drive(workload, ScriptedTransport(stalled(fixed(0.2, 0.01, 3), 5.03, 15.03)))
    due = [ask.at_s for ask in workload.asks]
    known = [max(0.2, 15.03 - at_s) if 5.03 <= at_s + 0.2 < 15.03 else 0.2 for at_s in due]
    assert [record.ttft_s for record in run.records] == pytest.approx(known)
    figures = account(run.records, SLO, until_s=run.info.offered_until_s, warm_up_s=0.0)
    for percent, interval in ((50, figures.ttft.p50), (90, figures.ttft.p90), (99, figures.ttft.p99)):
        assert interval.value == pytest.approx(np.percentile(known, percent))


def test_a_client_that_waits_for_answers_would_have_hidden_the_stall():
    script = stalled(fixed(0.1, 0.01, 1), 5.03, 15.03)
    open_loop = drive(even(300, 10.0), ScriptedTransport(script))
    closed = drive(make(Wanted(name="chat", requests=300, concurrency=1)), ScriptedTransport(script))
    slow = [sum(record.ttft_s > 1.0 for record in run.records) for run in (open_loop, closed)]
    assert slow[0] == 91  # due from 5.0 s to 14.0 s
    assert slow[1] == 1


def test_tokens_that_come_in_bursts_keep_their_gaps():
    run = drive(even(50, 5.0), ScriptedTransport(bursty(0.2, 4, 0.4, 13)))
    assert run.records[0].gaps_s() == pytest.approx([0, 0, 0, 0.4] * 3)
    figures = account(run.records, SLO, until_s=run.info.offered_until_s)
    assert figures.itl.p50.value == 0.0
    assert figures.itl.p90.value == pytest.approx(0.4)
    assert figures.response_gap.p50.value == pytest.approx(0.4)
    assert figures.tpot.p50.value == pytest.approx(0.1)


def test_every_request_is_sent_once_with_its_own_prompt_at_its_own_instant():
    workload = make(Wanted(name="rag", requests=80, rate=7.0))
    transport = ScriptedTransport(fixed(0.5, 0.02, 4))
    run = drive(workload, transport)
    assert [record.number for record in run.records] == list(range(80))
    assert [record.sent_s for record in run.records] == pytest.approx([ask.at_s for ask in workload.asks])
    assert sorted(transport.sent) == sorted(question.prompt.encode() for question in transport.asked)
    assert transport.closed


def test_a_sessions_next_turn_is_due_when_its_user_has_thought_about_the_last_answer():
    workload = make(Wanted(name="agent", requests=40, rate=2.0))
    run = drive(workload, ScriptedTransport(fixed(0.3, 0.1, 5)))
    assert len(run.records) == 40
    for record, ask in zip(run.records, workload.asks, strict=True):
        if ask.after is not None:
            assert record.scheduled_s == pytest.approx(run.records[ask.after].ended_s + ask.think_s)


def test_a_turn_is_offered_also_after_one_that_was_refused():
    ends = {number: Ending(state="refused", reason="saturated") for number in range(40)}
    run = drive(make(Wanted(name="agent", requests=40, rate=2.0)), ScriptedTransport(fixed(0.1, 0.1, 1), ends=ends))
    assert [record.state for record in run.records] == ["refused"] * 40


@pytest.mark.parametrize("name", ["chat", "agent"])
def test_a_closed_loop_never_has_more_under_way_than_its_users(name):
    workload = make(Wanted(name=name, requests=60, concurrency=4))
    run = drive(workload, ScriptedTransport(fixed(0.3, 0.1, 5)))
    assert len(run.records) == 60
    changes = sorted([(r.sent_s, 1) for r in run.records] + [(r.ended_s, -1) for r in run.records])
    assert max(np.cumsum([change for _, change in changes])) == 4


def test_a_request_that_does_not_end_is_given_up_as_failed():
    run = drive(even(5, 1.0), ScriptedTransport(fixed(0.5, 9.0, 3)), timeout_s=2.0)
    assert {(r.state, r.reason, len(r.at_s)) for r in run.records} == {("failed", "client_timeout", 1)}


def test_an_interrupted_run_reports_what_was_offered_so_far():
    transport = ScriptedTransport(fixed(0.5, 1.0, 4))
    run = drive(even(100, 10.0), transport, interrupt_s=5.02)
    assert run.info.interrupted
    assert run.info.offered_until_s == pytest.approx(5.02)
    assert len(run.records) == 51
    assert {record.state for record in run.records} == {"finished", "unmeasured"}
    assert transport.cancelled == sum(record.state == "unmeasured" for record in run.records)
    figures = account(run.records, SLO, until_s=run.info.offered_until_s, warm_up_s=0.0)
    assert figures.verdicts["unmeasured:interrupted"] == transport.cancelled
    assert figures.completion.value < 1.0


def test_an_answer_of_which_no_token_came_is_unmeasured():
    run = drive(even(3, 1.0), ScriptedTransport(lambda number, now_s: []))
    assert {(record.state, record.reason) for record in run.records} == {("unmeasured", "no_token")}


def test_tokens_the_server_counted_beyond_the_events_are_spread_over_them():
    ends = {0: Ending(state="finished", output_tokens=8)}
    run = drive(even(1, 1.0), ScriptedTransport(fixed(0.1, 0.1, 3), ends=ends))
    assert run.records[0].tokens == (2, 3, 3)


def test_an_unexpected_fault_is_the_failure_of_its_request_alone():
    def broken(number: int, now_s: float) -> list[float]:
        if number == 2:
            raise RuntimeError("script")
        return [0.1]

    run = drive(even(5, 1.0), ScriptedTransport(broken))
    assert [record.state for record in run.records] == ["finished"] * 2 + ["failed"] + ["finished"] * 2
    assert (run.records[2].reason, run.records[2].message) == ("RuntimeError", "unexpected: RuntimeError: script")


def test_a_time_out_of_another_kind_is_not_said_to_be_the_clients_patience():
    def broken(number: int, now_s: float) -> list[float]:
        raise TimeoutError("the network's")

    run = drive(even(2, 1.0), ScriptedTransport(broken))
    assert {(record.reason, record.message) for record in run.records} == {
        ("TimeoutError", "unexpected: TimeoutError: the network's")
    }


def test_a_session_and_a_closed_loop_go_on_behind_an_unexpected_fault():
    def broken(number: int, now_s: float) -> list[float]:
        raise RuntimeError("script")

    run = drive(make(Wanted(name="agent", requests=20, concurrency=2)), ScriptedTransport(broken))
    assert [record.reason for record in run.records] == ["RuntimeError"] * 20


def test_a_fault_of_the_books_themselves_ends_the_run_with_it():
    def broken(stage: str, done: int, total: int) -> None:
        if stage == "requests":
            raise RuntimeError("books")

    async def run() -> Run:
        return await Client(even(5, 1.0), ScriptedTransport(fixed(0.1, 0.1, 1)), progress=broken).run()

    with pytest.raises(RuntimeError, match="books"):
        run_virtually(run())


def test_each_request_carries_the_targets_of_its_length():
    transport = ScriptedTransport(fixed(0.1, 0.1, 1))
    drive(even(2, 1.0), transport, targets=SLO, timeout_s=9.0)
    assert {(q.ttft_s, q.tpot_s, q.timeout_s) for q in transport.asked} == {(1.0, 0.1, 9.0)}


def health(**changed: float) -> ClientHealth:
    calm = {name: 0.001 for name in ("late_p50_s", "late_p99_s", "late_largest_s", "lag_p99_s", "lag_largest_s")}
    values: dict[str, Any] = calm | {"cpu_share": 0.2, "loop_cpu_share": 0.1, "wall_s": 10.0, "responses": 5} | changed
    return ClientHealth(**values)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"late_p99_s": 0.1}, "left 100.0 ms late"),
        ({"lag_p99_s": 0.1}, "seen up to 100.0 ms late"),
        ({"loop_cpu_share": 0.95}, "busy 95%"),
    ],
)
def test_a_client_that_was_the_bottleneck_refuses_to_report(changed, fault):
    run = drive(even(20, 5.0), ScriptedTransport(fixed(0.3, 0.05, 4)))
    refuse_if_bottleneck(health(), run.records)
    with pytest.raises(BottleneckError, match=fault):
        refuse_if_bottleneck(health(**changed), run.records)


def watched(stall_s: float, every_s: float, lasts_s: float) -> ClientHealth:
    """What the monitor says of a loop that is blocked for `stall_s` in every `every_s`."""

    async def run() -> ClientHealth:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        monitor = Monitor()
        monitor.start()
        while loop.time() < lasts_s:
            await asyncio.sleep(every_s - stall_s)
            loop.block(stall_s)
        await monitor.stop()
        return monitor.health([], 0)

    return run_virtually(run())


@settings(max_examples=10, deadline=None)
@given(stall_s=st.floats(0.05, 1.0), idle_s=st.floats(0.5, 4.0))
def test_the_loops_lag_is_over_time_so_that_a_stall_counts_by_its_length(stall_s, idle_s):
    every_s = stall_s + idle_s
    found = watched(stall_s, every_s, 40 * every_s)
    # of all instants one in a hundred waits longer than this: the stall's, as long as they lie near its begin
    known_s = stall_s - 0.01 * every_s
    assert found.lag_p99_s == pytest.approx(max(0.0, known_s), abs=0.02)


def test_a_loop_that_is_blocked_a_tenth_of_the_time_is_a_bottleneck_and_short_work_is_none():
    assert watched(0.25, 2.75, 60.0).lag_p99_s > LATE_FLOOR_S
    assert watched(0.25, 60.0, 300.0).lag_p99_s < LATE_FLOOR_S, "less than a hundredth of the time"
    assert watched(0.002, 0.02, 30.0).lag_p99_s < LATE_FLOOR_S


def test_a_stall_that_lasts_to_the_end_of_the_run_counts_too():
    assert watched(2.0, 2.5, 2.0).lag_largest_s == pytest.approx(2.0, abs=0.02)


class _SlowToOpen(ScriptedTransport):
    async def open(self) -> None:
        await asyncio.sleep(5.0)
        await super().open()


@pytest.mark.parametrize("load", [{"rate": 10.0}, {"concurrency": 3}])
def test_interrupted_while_it_connects_nothing_was_offered(load):
    async def run() -> tuple[Run, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(60_000.0)  # the loop's clock is the host's, which has run for long
        client = Client(make(Wanted(name="chat", requests=20, **load)), transport)
        loop.call_later(2.0, client.interrupt)
        return await client.run(), loop.time()

    transport = _SlowToOpen(fixed(0.1, 0.1, 1))
    found, ended_s = run_virtually(run())
    assert (found.records, found.info.offered_until_s, found.info.interrupted) == ((), 0.0, True)
    assert (transport.sent, transport.closed) == ([], True)
    assert ended_s < 60_005.0, "it did not wait for the connection"
    assert found.health.faults(LATE_FLOOR_S) == []


def test_interrupted_while_it_makes_the_requests_nothing_was_offered():
    async def run() -> Run:
        client = Client(even(20, 10.0), transport, progress=lambda stage, done, total: stop[stage]())
        stop = {"prompts": client.interrupt}
        return await client.run()

    transport = ScriptedTransport(fixed(0.1, 0.1, 1))
    found = run_virtually(run())
    assert (found.records, found.info.offered_until_s, found.info.interrupted) == ((), 0.0, True)
    assert len(transport.asked) == 1
