"""Requests that end before their answer does: clients that leave, deadlines; and the wake-ups that time needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trtpd_testing.router_rig import (
    Rig,
    begun,
    decode,
    drained,
    mixed,
    offered,
    only,
    prefill,
    rejected,
    to_decoding,
    to_sealed,
    tokens,
)

from trtpd.errors import InternalError
from trtpd.runtime.core.events import Cancel, ClientGone, Command, Finish, TextStopped, Tick, WakeAt, Withdraw
from trtpd.runtime.core.policy import Policy


def _queued(rig: Rig) -> None:
    rig.lost("p0")
    rig.lost("d0")
    rig.arrive()


def _prefilling(rig: Rig) -> None:
    rig.arrive(prompt=2000)


def _pulling(rig: Rig) -> None:
    rig.arrive()
    rig.step("p0", offered())


def _transferring(rig: Rig) -> None:
    to_sealed(rig)
    rig.step("d0", begun())


def _undelivered(rig: Rig) -> None:
    to_sealed(rig)
    rig.step("d0", rejected())


def _decoding(rig: Rig) -> None:
    to_decoding(rig)
    rig.step("d0", tokens(1, 3))


STAGES: list[tuple[Callable[[Rig], None], list[Command]]] = [
    (_queued, []),
    (_prefilling, [Cancel(instance="p0", request_id=1, attempt=1)]),
    (
        _pulling,
        [Cancel(instance="d0", request_id=1, attempt=1), Cancel(instance="p0", request_id=1, attempt=1)],
    ),
    (
        _transferring,
        [Cancel(instance="d0", request_id=1, attempt=1), Withdraw(instance="p0", request_id=1, attempt=1)],
    ),
    (_undelivered, [Withdraw(instance="p0", request_id=1, attempt=1)]),
    (_decoding, [Cancel(instance="d0", request_id=1, attempt=1)]),
]


@pytest.mark.parametrize(("reach", "told"), STAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_client_that_leaves_has_everyone_told_and_credits_kept_until_drained(
    reach: Callable[[Rig], None], told: list[Command]
) -> None:
    rig = Rig(prefill(), decode())
    reach(rig)
    said = rig.tell(ClientGone(request_id=1))
    assert said[:-1] == told
    finish = only(said[-1:], Finish)
    assert (finish.state, finish.reason) == ("cancelled", "cancelled")
    asked = [command for command in told if isinstance(command, Cancel | Withdraw)]
    assert rig.holds() == {command.instance: 1 for command in asked}
    for command in asked:
        rig.step(command.instance, drained())
    assert rig.holds() == {}
    assert rig.tell(ClientGone(request_id=1)) == []


@pytest.mark.parametrize(("reach", "told"), STAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_nothing_outlives_its_deadline(reach: Callable[[Rig], None], told: list[Command]) -> None:
    rig = Rig(prefill(), decode(), policy=Policy(no_instance_grace_s=1000.0))
    reach(rig)
    rig.now_s = 161.0
    said = rig.tell(Tick())
    assert [command for command in said if command in told] == told
    finish = only(said, Finish)
    assert (finish.state, finish.reason) == ("failed", "deadline")
    assert "allow more time" in finish.message


def test_a_request_that_comes_after_its_deadline_fails_at_once() -> None:
    rig = Rig(mixed())
    assert only(rig.arrive(deadline_s=rig.now_s), Finish).reason == "deadline"


def test_a_deadline_counts_before_the_event_that_came_too_late() -> None:
    rig = Rig(mixed())
    rig.arrive(deadline_s=rig.now_s + 1.0)
    rig.now_s += 1.0
    said = rig.step("m0", tokens(0, 10, finish="length"))
    assert [type(command) for command in said] == [Cancel, Finish]
    assert rig.holds() == {}


def test_one_wake_up_is_asked_for_however_many_requests_have_deadlines() -> None:
    rig = Rig(mixed(kv_blocks=100_000, max_batch=1000))
    wakes = []
    for request_id in range(1, 101):
        rig.arrive(request_id, deadline_s=200.0 + request_id)
        wakes += [command.at_s for command in rig.said if isinstance(command, WakeAt)]
    assert wakes == [100.25]
    rig.now_s = 201.0
    rig.tell(Tick())
    assert [command.at_s for command in rig.said if isinstance(command, WakeAt)] == [201.25]


def test_a_tick_that_comes_a_hair_early_is_asked_for_again() -> None:
    rig = Rig(mixed())
    rig.arrive(deadline_s=200.0)
    rig.now_s = 199.9999
    assert rig.tell(Tick()) == []
    assert rig.said == [WakeAt(at_s=200.0)]


def test_a_clock_that_runs_backwards_stands_still() -> None:
    rig = Rig(mixed())
    rig.arrive(deadline_s=150.0)
    rig.now_s = 50.0
    assert rig.tell(Tick()) == []
    assert rig.core.snapshot()["now_s"] == 100.0


def test_a_stop_that_comes_while_a_request_waits_for_a_new_attempt_ends_it() -> None:
    rig = Rig(prefill(), decode())
    to_decoding(rig)
    rig.lost("p0")
    assert rig.lost("d0") == []
    finish = only(rig.tell(TextStopped(request_id=1, index=0)), Finish)
    assert (finish.state, finish.reason) == ("finished", "stop")


def test_a_request_id_in_flight_cannot_be_used_again() -> None:
    rig = Rig(mixed())
    rig.arrive()
    with pytest.raises(InternalError, match="request id 1"):
        rig.arrive()


def test_timelines_of_ended_requests_are_kept_up_to_a_number() -> None:
    rig = Rig(mixed(), policy=Policy(timelines_kept=2))
    for request_id in (1, 2, 3):
        rig.arrive(request_id)
        rig.tell(ClientGone(request_id=request_id))
    assert [rig.core.timeline(request_id) is not None for request_id in (1, 2, 3)] == [False, True, True]
