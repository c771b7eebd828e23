"""What happens when something breaks: a test for each row of the design's table, and for those between."""

from __future__ import annotations

import pytest
from trtpd_testing.router_rig import (
    Rig,
    begun,
    chunk,
    decode,
    done,
    drained,
    failed,
    mixed,
    offered,
    only,
    prefill,
    rejected,
    sealed,
    to_decoding,
    to_sealed,
    tokens,
)

from trtpd.runtime.core.events import (
    Cancel,
    Capabilities,
    Drain,
    Emit,
    Finish,
    LinkDown,
    Pull,
    Quarantine,
    Submit,
    Tick,
    Withdraw,
)
from trtpd.runtime.core.policy import Policy


def test_a_prefill_that_dies_before_the_seal_is_replaced_by_another() -> None:
    rig = Rig(prefill("p0"), prefill("p1"), decode())
    first = only(rig.arrive(), Submit).instance
    rig.step(first, offered())
    said = rig.lost(first)
    assert only(said, Cancel).instance == "d0"
    again = only(said, Submit)
    assert (again.instance, again.attempt) == ({"p0": "p1", "p1": "p0"}[first], 2)


def test_a_prefill_that_dies_in_mid_transfer_costs_a_new_attempt_with_the_first_token_kept() -> None:
    rig = Rig(prefill("p0"), prefill("p1"), decode())
    first = only(rig.arrive(), Submit).instance
    rig.step(first, offered(), sealed())
    rig.step("d0", begun())
    assert only(rig.lost(first), Submit).journal == (1000,)


def test_a_prefill_that_dies_after_the_transfer_is_not_missed() -> None:
    rig = Rig(prefill(), decode())
    to_sealed(rig)
    rig.step("d0", begun(), done())
    assert rig.lost("p0") == []
    assert only(rig.step("d0", tokens(1)), Emit).ids == (1001,)


def test_a_failed_transfer_is_pulled_again_whole_and_from_another_decode_instance() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    rig.arrive(prompt=400)
    sink = only(rig.step("p0", offered(), chunk(200)), Pull).instance
    rig.step("p0", chunk(400), sealed())
    pull = only(rig.step(sink, begun(), failed()), Pull)
    assert pull.instance == {"d0": "d1", "d1": "d0"}[sink]
    assert (pull.offer, pull.chunks, pull.seal) == (b"offer1", (b"chunk200", b"chunk400"), b"seal1")
    assert pull.attempt == 1


def test_a_failed_transfer_is_pulled_again_by_the_only_decode_instance() -> None:
    rig = Rig(prefill(), decode())
    to_sealed(rig)
    assert only(rig.step("d0", begun(), failed()), Pull).instance == "d0"


def test_a_transfer_that_fails_twice_is_prefilled_again() -> None:
    rig = Rig(prefill(), decode())
    to_sealed(rig)
    rig.step("d0", failed())
    said = rig.step("d0", failed())
    assert only(said, Withdraw).instance == "p0"
    again = only(said, Submit)
    assert (again.attempt, again.journal) == (2, (1000,))


def test_after_two_failed_transfers_a_request_runs_where_nothing_moves() -> None:
    rig = Rig(prefill(), decode())
    to_sealed(rig)
    rig.step("d0", failed())
    again = only(rig.step("d0", failed()), Submit)
    assert (again.instance, again.kind) == ("d0", "context_and_generation")
    timeline = rig.core.timeline(1)
    assert timeline is not None
    assert "2 transfers of it failed" in timeline.attempts[-1].why


@pytest.mark.parametrize(("capabilities", "retryable"), [(Capabilities(repull=False), True), (Capabilities(), False)])
def test_an_offer_that_cannot_be_pulled_twice_is_prefilled_again(capabilities: Capabilities, retryable: bool) -> None:
    rig = Rig(prefill(capabilities=capabilities), decode())
    to_sealed(rig)
    assert only(rig.step("d0", begun(), failed(retryable=retryable)), Submit).attempt == 2


def test_a_transfer_that_stalls_is_stopped_and_pulled_elsewhere() -> None:
    policy = Policy(transfer_patience_s=10.0, transfer_floor_bytes_per_s=1e6)
    rig = Rig(prefill(bytes_per_token=10_000), decode("d0"), decode("d1"), policy=policy)
    rig.arrive()
    sink = only(rig.step("p0", offered()), Pull).instance
    rig.step("p0", sealed())
    rig.now_s += 10.9
    assert rig.tell(Tick()) == []
    rig.now_s += 0.2
    said = rig.tell(Tick())
    assert only(said, Cancel).instance == sink
    assert only(said, Pull).instance == {"d0": "d1", "d1": "d0"}[sink]


def test_a_stalled_pull_is_not_given_to_the_same_instance_while_it_may_still_answer_for_it() -> None:
    rig = Rig(prefill(), decode())
    to_sealed(rig)
    rig.now_s += 11.0
    rig.tell(Tick())
    assert rig.step("d0", drained()) == []
    assert rig.core.snapshot()["undelivered"] == 1


def test_a_decode_instance_that_dies_while_pulling_is_replaced_without_a_second_prefill() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    rig.arrive()
    sink = only(rig.step("p0", offered()), Pull).instance
    rig.step("p0", sealed())
    rig.step(sink, begun())
    pull = only(rig.lost(sink), Pull)
    assert (pull.instance, pull.attempt, pull.seal) == ({"d0": "d1", "d1": "d0"}[sink], 1, b"seal1")


def test_a_decode_instance_that_dies_in_mid_stream_loses_no_position_and_doubles_none() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    rig.arrive()
    sink = only(rig.step("p0", offered()), Pull).instance
    other = {"d0": "d1", "d1": "d0"}[sink]
    rig.step("p0", sealed())
    rig.step(sink, begun(), done(), tokens(1, 3))
    again = only(rig.lost(sink), Submit)
    assert (again.attempt, again.journal) == (2, (1000, 1001, 1002, 1003))
    pull = only(rig.step("p0", offered(attempt=2)), Pull)
    assert (pull.instance, pull.journal) == (other, (1000, 1001, 1002, 1003))
    assert only(rig.step("p0", sealed(attempt=2, first_index=4)), Emit).first_index == 4
    rig.step(other, begun(attempt=2), done(attempt=2))
    assert only(rig.step(other, tokens(5, 5, attempt=2, finish="length")), Finish).reason == "length"


def test_a_peer_that_restarts_gets_nothing_of_its_past_and_its_old_answers_count_for_nothing() -> None:
    rig = Rig(prefill(), decode())
    to_decoding(rig)
    again = only(rig.hello("d0", "2"), Submit)
    assert again.journal == (1000,)
    assert rig.step("d0", tokens(1, 3), generation="1") == []
    assert rig.core.snapshot()["counters"]["stale_answers"] == 1


def test_answers_of_an_old_attempt_count_for_nothing_and_stop_its_work() -> None:
    rig = Rig(prefill("p0"), prefill("p1"), decode())
    first = only(rig.arrive(), Submit).instance
    rig.lost(first)
    rig.hello(first, "2")
    assert rig.step(first, sealed(attempt=1)) == [Cancel(instance=first, request_id=1, attempt=1)]
    assert rig.core.snapshot()["requests"] == {"prefilling": 1}


def test_an_instance_wrongly_taken_for_lost_is_told_to_drop_what_it_still_runs() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    rig.arrive()
    sink = only(rig.step("p0", offered()), Pull).instance
    rig.step("p0", sealed())
    rig.step(sink, begun(), done())
    rig.lost(sink)
    assert rig.hello(sink, rig.generations[sink]) == [Cancel(instance=sink, request_id=1, attempt=1)]
    assert rig.step(sink, tokens(1)) == []
    rig.step(sink, drained())
    assert sink not in rig.holds()


def test_a_draining_instance_finishes_what_it_has_and_gets_nothing_new() -> None:
    rig = Rig(prefill(), decode("d0"))
    to_decoding(rig)
    rig.tell(Drain(instance="d0"))
    assert only(rig.arrive(2), Submit).kind == "context_and_generation"
    assert only(rig.step("d0", tokens(1, 9, finish="length")), Finish).state == "finished"


def test_a_decode_instance_that_drains_before_the_pull_is_chosen_again() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    rig.arrive(prompt=2000)
    timeline = rig.core.timeline(1)
    assert timeline is not None
    chosen = timeline.attempts[0].decode
    rig.tell(Drain(instance=str(chosen)))
    assert only(rig.step("p0", offered(), chunk(1900)), Pull).instance == {"d0": "d1", "d1": "d0"}[str(chosen)]


def test_without_prefill_decode_serves_alone_and_says_so() -> None:
    rig = Rig(prefill(), decode())
    rig.lost("p0")
    submit = only(rig.arrive(), Submit)
    assert (submit.instance, submit.kind) == ("d0", "context_and_generation")
    timeline = rig.core.timeline(1)
    assert timeline is not None
    assert "no prefill instance" in timeline.attempts[0].why


def test_without_decode_prefill_serves_alone_and_says_so() -> None:
    rig = Rig(prefill(), decode())
    rig.lost("d0")
    submit = only(rig.arrive(), Submit)
    assert (submit.instance, submit.kind) == ("p0", "context_and_generation")
    timeline = rig.core.timeline(1)
    assert timeline is not None
    assert "no decode instance" in timeline.attempts[0].why


def test_an_offer_whose_last_decode_instance_is_gone_is_finished_where_there_is_one_left() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive(prompt=2000)
    rig.step("p0", offered())
    rig.lost("d0")
    said = rig.step("p0", chunk(2000), sealed())
    assert only(said, Withdraw).instance == "p0"
    again = only(said, Submit)
    assert (again.instance, again.kind, again.journal) == ("p0", "context_and_generation", (1000,))


def test_while_nothing_is_up_requests_wait_for_a_restart() -> None:
    rig = Rig(mixed())
    rig.arrive()
    assert rig.lost("m0") == []
    rig.now_s += 3.0
    assert rig.arrive(2) == []
    said = rig.hello("m0", "2")
    assert sorted(command.request_id for command in said if isinstance(command, Submit)) == [1, 2]


def test_a_link_that_is_down_is_avoided_for_a_while() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"), policy=Policy(link_avoid_s=5.0))
    rig.tell(LinkDown(source="p0", sink="d0"))
    rig.arrive()
    assert only(rig.step("p0", offered()), Pull).instance == "d1"
    rig.tell(LinkDown(source="p0", sink="d1"))
    assert only(rig.arrive(2), Submit).kind == "context_and_generation"
    rig.now_s += 6.0
    assert only(rig.arrive(3), Submit).kind == "context_only"


def test_an_instance_lost_again_and_again_is_quarantined_longer_each_time() -> None:
    rig = Rig(mixed(), mixed("m1"), policy=Policy(flap_losses=3, flap_window_s=60.0, quarantine_s=15.0))
    pauses = []
    for life in range(2, 8):
        said = rig.lost("m0")
        pauses += [command.until_s - rig.now_s for command in said if isinstance(command, Quarantine)]
        rig.now_s += 1.0
        rig.hello("m0", str(life))
    assert pauses == [15.0, 30.0]
    assert {only(rig.arrive(n), Submit).instance for n in range(1, 5)} == {"m1"}
    rig.now_s += 30.0
    assert only(rig.arrive(5), Submit).instance == "m0"


def test_a_flapping_instance_serves_while_it_is_the_last_of_its_role() -> None:
    rig = Rig(mixed(), mixed("m1"), policy=Policy(flap_losses=2, flap_window_s=60.0, quarantine_s=15.0))
    for life in range(2, 4):
        rig.lost("m0")
        rig.hello("m0", str(life))
    rig.lost("m1")
    assert only(rig.arrive(), Submit).instance == "m0"
    rig.lost("m0")
    assert only(rig.hello("m0", "9"), Submit).instance == "m0"


def test_a_prefill_lost_before_it_began_a_request_costs_the_request_nothing() -> None:
    rig = Rig(prefill(), decode(), policy=Policy(retry_budget=0, loss_budget=0))
    rig.arrive()
    again = only(rig.lost("p0"), Submit)
    assert (again.instance, again.attempt) == ("d0", 2)


def test_a_request_that_outlives_too_many_instances_ends() -> None:
    rig = Rig(mixed(), policy=Policy(retry_budget=0, loss_budget=2, flap_losses=99))
    rig.arrive()
    for life in range(2, 4):
        rig.lost("m0")
        assert only(rig.hello("m0", str(life)), Submit).attempt == life
    finish = only(rig.lost("m0"), Finish)
    assert (finish.state, finish.reason) == ("failed", "engine_failed")
    assert "m0 was lost" in finish.message


def test_losses_far_apart_or_planned_put_nobody_in_quarantine() -> None:
    rig = Rig(mixed(), policy=Policy(flap_losses=2, flap_window_s=60.0))
    for life in range(2, 6):
        assert rig.lost("m0") == []
        rig.hello("m0", str(life))
        rig.now_s += 61.0
    for life in range(6, 9):
        rig.tell(Drain(instance="m0"))
        assert rig.lost("m0") == []
        rig.hello("m0", str(life))


def test_a_rejected_request_goes_elsewhere_and_comes_back_later_at_no_cost() -> None:
    rig = Rig(mixed("m0"), policy=Policy(retry_budget=0, reject_pause_s=0.5))
    rig.arrive()
    assert rig.step("m0", rejected()) == []
    rig.now_s += 0.4
    assert rig.tell(Tick()) == []
    rig.now_s += 0.2
    again = only(rig.tell(Tick()), Submit)
    assert (again.instance, again.attempt) == ("m0", 2)
    assert rig.core.snapshot()["retries"] == {"rejected": 1}


def test_a_pull_rejected_for_lack_of_room_goes_to_another_decode_instance() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    rig.arrive()
    sink = only(rig.step("p0", offered()), Pull).instance
    pull = only(rig.step(sink, rejected()), Pull)
    assert (pull.instance, pull.attempt, pull.offer) == ({"d0": "d1", "d1": "d0"}[sink], 1, b"offer1")


def test_a_permanent_reject_ends_the_request() -> None:
    rig = Rig(mixed("m0"), mixed("m1"))
    where = only(rig.arrive(), Submit).instance
    finish = only(rig.step(where, rejected(code="invalid_argument", permanent=True)), Finish)
    assert (finish.state, finish.reason) == ("failed", "invalid_argument")
    assert "full" in finish.message


def test_a_request_that_breaks_every_engine_ends_when_its_retries_are_spent() -> None:
    rig = Rig(mixed("m0"), policy=Policy(retry_budget=2, reject_pause_s=0.1))
    rig.arrive()
    for attempt in (1, 2):
        assert rig.step("m0", rejected(attempt=attempt, code="engine_failed")) == []
        rig.now_s += 1.0
        rig.tell(Tick())
    finish = only(rig.step("m0", rejected(attempt=3, code="engine_failed")), Finish)
    assert (finish.state, finish.reason) == ("failed", "engine_failed")
    assert "gave up after 3 attempts" in finish.message


def test_a_missing_token_ends_the_attempt_and_not_the_answer() -> None:
    rig = Rig(prefill(), decode())
    to_decoding(rig)
    said = rig.step("d0", tokens(2))
    assert only(said, Cancel).instance == "d0"
    assert only(said, Submit).journal == (1000,)
    assert rig.core.snapshot()["faults"][-1]["code"] == "token_gap"


def test_a_lease_that_ends_before_the_pull_costs_a_new_attempt() -> None:
    rig = Rig(prefill(), decode())
    to_sealed(rig)
    rig.step("d0", rejected())
    assert rig.step("p0", drained()) == []
    rig.now_s += 1.0
    assert only(rig.tell(Tick()), Submit).attempt == 2


def test_a_lease_that_ends_under_a_pull_leaves_the_word_to_the_sink() -> None:
    rig = Rig(prefill(), decode())
    to_sealed(rig)
    rig.step("d0", begun())
    assert rig.step("p0", drained()) == []
    assert rig.step("d0", done()) == []
    assert only(rig.step("d0", tokens(1)), Emit).first_index == 1


def test_new_attempts_after_a_loss_are_paced() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"), policy=Policy(reprefills_per_instance=2))
    for request_id in range(1, 9):
        rig.arrive(request_id)
        sink = only(rig.step("p0", offered(request_id)), Pull).instance
        rig.step("p0", sealed(request_id))
        rig.step(sink, begun(request_id), done(request_id))
        rig.step("p0", drained(request_id))
    said = rig.lost("d0")
    again = [command.request_id for command in said if isinstance(command, Submit)]
    assert len(again) == 2
    assert rig.core.snapshot()["queued"] == 2
    said = rig.step("p0", offered(again[0], 2), sealed(again[0], 2, first_index=1))
    assert len([command for command in said if isinstance(command, Submit)]) == 1


def test_an_unanswered_cancel_is_repeated_and_at_last_given_up() -> None:
    rig = Rig(mixed(), policy=Policy(drain_patience_s=10.0, drain_reminders=2))
    rig.arrive(deadline_s=rig.now_s + 5.0)
    rig.now_s += 5.0
    assert only(rig.tell(Tick()), Cancel).instance == "m0"
    for _ in range(2):
        rig.now_s += 10.0
        assert rig.tell(Tick()) == [Cancel(instance="m0", request_id=1, attempt=1)]
    rig.now_s += 10.0
    assert rig.tell(Tick()) == []
    assert rig.holds() == {}
    assert rig.core.snapshot()["faults"][-1]["code"] == "drain_overdue"


def test_a_registration_that_cannot_be_is_ignored_and_noted() -> None:
    rig = Rig(mixed("m0"), mixed("m1", kv_blocks=0))
    assert [view["name"] for view in rig.core.snapshot()["instances"]] == ["m0"]
    rig.specs["m0"] = decode("m0")
    rig.hello("m0", "1")
    assert [view["role"] for view in rig.core.snapshot()["instances"]] == ["mixed"]
    assert {fault["code"] for fault in rig.core.snapshot()["faults"]} == {"bad_hello"}


def test_an_answer_that_makes_no_sense_is_noted_and_ignored() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive()
    assert rig.step("p0", tokens(0)) == []
    assert rig.core.snapshot()["faults"][-1]["code"] == "protocol"
