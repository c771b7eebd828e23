"""One request's way from prefill to decode, when nothing breaks."""

from __future__ import annotations

import json

from trtpd_testing.router_rig import (
    Rig,
    begun,
    chunk,
    decode,
    done,
    drained,
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
    Emit,
    Finish,
    InstanceEvent,
    Pull,
    Submit,
    TextStopped,
    Tick,
    Withdraw,
)
from trtpd.runtime.core.lifecycle import Instant
from trtpd.runtime.core.policy import Policy


def test_a_request_goes_from_prefill_to_decode_and_every_credit_comes_back() -> None:
    rig = Rig(prefill(), decode())
    assert only(rig.arrive(), Submit) == Submit(instance="p0", request_id=1, attempt=1, kind="context_only", journal=())
    pull = only(rig.step("p0", offered()), Pull)
    assert (pull.instance, pull.offer, pull.seal) == ("d0", b"offer1", None)
    emit, update = rig.step("p0", sealed())
    assert emit == Emit(request_id=1, first_index=0, ids=(1000,), log_probs=(-0.5,))
    assert isinstance(update, Pull)
    assert (update.offer, update.seal) == (None, b"seal1")
    assert rig.step("d0", begun(), done()) == [Withdraw(instance="p0", request_id=1, attempt=1)]
    assert rig.holds() == {"p0": 1, "d0": 1}
    rig.step("p0", drained())
    assert rig.holds() == {"d0": 1}
    emit, finish = rig.step("d0", tokens(1, 9, finish="stop"))
    assert emit == Emit(request_id=1, first_index=1, ids=tuple(range(1001, 1010)), log_probs=())
    assert isinstance(finish, Finish)
    assert (finish.state, finish.reason) == ("finished", "stop")
    assert rig.holds() == {}


def test_the_first_token_leaves_before_anything_has_moved() -> None:
    rig = Rig(prefill(), decode())
    assert isinstance(to_sealed(rig)[0], Emit)


def test_an_answer_that_ends_with_its_first_token_moves_nothing() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive()
    rig.step("p0", offered())
    said = rig.step("p0", sealed(finish="stop"))
    assert only(said, Cancel).instance == "d0"
    assert only(said, Withdraw).instance == "p0"
    assert only(said, Finish).reason == "stop"
    rig.step("p0", drained())
    rig.step("d0", drained())
    assert rig.holds() == {}


def test_one_token_asked_for_is_one_token_given_even_if_the_engine_forgets_to_stop() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive(out=1)
    rig.step("p0", offered())
    assert only(rig.step("p0", sealed()), Finish).reason == "length"


def test_tokens_beyond_max_tokens_are_cut_and_their_instance_stopped() -> None:
    rig = Rig(prefill(), decode())
    to_decoding(rig, out=3)
    said = rig.step("d0", tokens(1, 5))
    assert only(said, Emit).ids == (1001, 1002)
    assert only(said, Finish).reason == "length"
    assert only(said, Cancel).instance == "d0"


def test_a_long_prompt_is_pulled_only_when_little_of_it_is_left() -> None:
    rig = Rig(prefill(prefill_tokens_per_s=1000.0), decode())
    rig.arrive(prompt=2000)
    assert rig.step("p0", offered()) == []
    assert rig.step("p0", chunk(512)) == []
    pull = only(rig.step("p0", chunk(1760)), Pull)
    assert (pull.offer, pull.chunks) == (b"offer1", (b"chunk512", b"chunk1760"))
    update = only(rig.step("p0", chunk(2000), sealed())[:1], Pull)
    assert (update.offer, update.chunks, update.seal) == (None, (b"chunk2000",), None)


def test_the_time_to_pull_may_come_between_two_chunks() -> None:
    rig = Rig(prefill(prefill_tokens_per_s=1000.0), decode(), policy=Policy(pull_lead_s=0.25))
    rig.arrive(prompt=2000)
    rig.step("p0", offered())
    rig.now_s += 1.0
    assert rig.step("p0", chunk(500)) == []
    rig.now_s += 1.25
    pull = only(rig.tell(Tick()), Pull)
    assert (pull.offer, pull.chunks, pull.seal) == (b"offer1", (b"chunk500",), None)


def test_an_offer_that_finds_no_room_at_its_time_is_pulled_when_there_is_some() -> None:
    rig = Rig(prefill(prefill_tokens_per_s=1000.0), decode(), policy=Policy(pull_lead_s=0.25, reject_pause_s=0.5))
    rig.arrive(prompt=2000)
    rig.step("p0", offered())
    rig.now_s += 1.75
    assert only(rig.tell(Tick()), Pull).instance == "d0"
    assert rig.step("d0", rejected()) == []
    assert rig.step("p0", chunk(100)) == []
    assert rig.core.snapshot()["undelivered"] == 1
    rig.now_s += 0.6
    assert only(rig.tell(Tick()), Pull).chunks == (b"chunk100",)


def test_an_engine_without_chunk_events_is_pulled_at_its_seal() -> None:
    rig = Rig(prefill(capabilities=Capabilities(chunk_events=False)), decode())
    rig.arrive(prompt=10)
    assert rig.step("p0", offered()) == []
    pull = only(rig.step("p0", sealed()), Pull)
    assert (pull.offer, pull.seal) == (b"offer1", b"seal1")


def test_a_mixed_instance_does_it_all_in_one_place() -> None:
    rig = Rig(mixed())
    assert only(rig.arrive(out=2), Submit).kind == "context_and_generation"
    assert only(rig.step("m0", tokens(0)), Emit).ids == (1000,)
    assert only(rig.step("m0", tokens(1, finish="length")), Finish).state == "finished"
    assert rig.holds() == {}


def test_repeated_answers_change_nothing() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive()
    for answer in (offered(), chunk(100)):
        rig.step("p0", answer)
        assert rig.step("p0", answer) == []
    rig.step("p0", sealed())
    assert rig.step("p0", sealed()) == []
    for later in (begun(), done(), tokens(1, 3)):
        rig.step("d0", later)
        assert rig.step("d0", later) == []


def test_only_the_new_part_of_overlapping_tokens_goes_out() -> None:
    rig = Rig(prefill(), decode())
    to_decoding(rig)
    rig.step("d0", tokens(1, 3))
    emit = only(rig.step("d0", tokens(2, 4, log_probs=(-1.0, -2.0, -3.0, -4.0))), Emit)
    assert (emit.first_index, emit.ids, emit.log_probs) == (4, (1004, 1005), (-3.0, -4.0))


def test_a_stop_string_ends_the_request_and_stops_decode() -> None:
    rig = Rig(prefill(), decode())
    to_decoding(rig)
    rig.step("d0", tokens(1, 4))
    said = rig.tell(TextStopped(request_id=1, index=2))
    assert only(said, Cancel).instance == "d0"
    finish = only(said, Finish)
    assert (finish.state, finish.reason) == ("finished", "stop")
    assert finish.timeline is not None
    assert finish.timeline.output_tokens == 3
    assert rig.step("d0", tokens(5)) == []


def test_the_timeline_says_who_did_what_and_when() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive()
    way: list[tuple[float, str, InstanceEvent]] = [
        (1.0, "p0", offered()),
        (2.0, "p0", sealed()),
        (3.0, "d0", begun()),
        (4.0, "d0", done()),
        (5.0, "d0", tokens(1)),
    ]
    for seconds, name, answer in way:
        rig.now_s = 100.0 + seconds
        rig.step(name, answer)
    rig.now_s = 106.0
    timeline = only(rig.step("d0", tokens(2, finish="stop")), Finish).timeline
    assert timeline is not None
    assert timeline is rig.core.timeline(1)
    assert [timeline.instants[instant] - 100.0 for instant in Instant] == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    attempt = timeline.attempts[0]
    assert (attempt.prefill, attempt.decode, attempt.outcome) == ("p0", "d0", "delivered")
    assert (attempt.bytes_moved, attempt.path, attempt.exposed_s, attempt.pulls) == (4096, "shm", 0.01, 1)
    assert "pair p0→d0" in attempt.why


def test_the_snapshot_is_plain_data_and_counts_what_happened() -> None:
    rig = Rig(prefill(), decode())
    to_decoding(rig)
    rig.arrive(2, prompt=0)
    snapshot = json.loads(json.dumps(rig.core.snapshot()))
    assert [view["state"] for view in snapshot["instances"]] == ["ready", "ready"]
    assert snapshot["requests"] == {"decoding": 1}
    assert snapshot["refused"] == {"invalid_argument": 1}
    assert snapshot["counters"]["transfers"] == 1
