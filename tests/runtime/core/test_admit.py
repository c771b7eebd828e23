"""What is refused, with which code, and what the message says."""

from __future__ import annotations

import pytest
from trtpd_testing.router_rig import Rig, decode, mixed, only, prefill

from trtpd.runtime.core.events import Drain, Finish, Refuse, Submit, Tick
from trtpd.runtime.core.policy import Policy


@pytest.mark.parametrize(
    ("prompt", "out", "text"), [(0, 5, "prompt is empty"), (5, 0, "max_tokens is 0"), (5, -3, "max_tokens is -3")]
)
def test_a_malformed_request_is_refused(prompt: int, out: int, text: str) -> None:
    refuse = only(Rig(mixed()).arrive(prompt=prompt, out=out), Refuse)
    assert refuse.code == "invalid_argument"
    assert text in refuse.message


@pytest.mark.parametrize(
    ("spec", "most"),
    [(mixed(max_seq_tokens=128), 128), (mixed(kv_blocks=3, tokens_per_block=32), 96)],
    ids=["sequence", "blocks"],
)
def test_what_can_never_fit_is_refused_with_numbers_and_what_just_fits_is_not(spec, most) -> None:
    rig = Rig(spec)
    refuse = only(rig.arrive(prompt=most - 9, out=10), Refuse)
    assert refuse.code == "invalid_argument"
    assert f"= {most + 1}; at most {most} fit here" in refuse.message
    assert only(rig.arrive(2, prompt=most - 10, out=10), Submit).instance == "m0"


def test_the_largest_instance_counts_even_while_it_is_away() -> None:
    rig = Rig(mixed("m0", max_seq_tokens=64), mixed("m1", max_seq_tokens=1024))
    rig.lost("m1")
    assert rig.arrive(prompt=500) == []
    assert only(rig.hello("m1", "2"), Submit).instance == "m1"


def test_without_any_instance_requests_are_refused_at_once() -> None:
    assert only(Rig().arrive(), Refuse).code == "no_instance"


def test_after_the_last_instance_went_requests_queue_for_a_while_and_are_served_if_one_comes_back() -> None:
    rig = Rig(mixed(), policy=Policy(no_instance_grace_s=10.0))
    rig.now_s += 1000.0
    rig.lost("m0")
    rig.now_s += 9.0
    assert rig.arrive(1) == []
    assert only(rig.hello("m0", "2"), Submit).request_id == 1


def test_after_the_grace_what_waits_and_what_comes_is_told_that_nothing_serves_it() -> None:
    rig = Rig(mixed(), policy=Policy(no_instance_grace_s=10.0))
    rig.arrive(1)
    rig.lost("m0")
    rig.now_s += 10.2
    finish = only(rig.tell(Tick()), Finish)
    assert (finish.request_id, finish.state, finish.reason) == (1, "failed", "no_instance")
    assert only(rig.arrive(2), Refuse).code == "no_instance"


def test_a_deployment_that_drains_takes_nothing_new_after_the_grace() -> None:
    rig = Rig(mixed())
    rig.tell(Drain(instance="m0"))
    rig.now_s += 11.0
    assert only(rig.arrive(), Refuse).code == "no_instance"


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    rig = Rig(mixed(kv_blocks=8, prefill_tokens_per_s=50.0), policy=Policy(queue_limit=2))
    for request_id in (1, 2, 3):
        rig.arrive(request_id, prompt=200)
    refuse = only(rig.arrive(4), Refuse)
    assert refuse.code == "saturated"
    assert refuse.retry_after_s == 12.0


def test_a_first_token_that_would_come_after_the_deadline_is_refused_early() -> None:
    rig = Rig(mixed(prefill_tokens_per_s=100.0))
    refuse = only(rig.arrive(prompt=600, deadline_s=rig.now_s + 5.0), Refuse)
    assert refuse.code == "saturated"
    assert "expected in 6.0 s" in refuse.message
    assert only(rig.arrive(2, prompt=400, deadline_s=rig.now_s + 5.0), Submit).request_id == 2


def test_with_several_models_a_request_must_name_one() -> None:
    rig = Rig(mixed("m0", model="a"), mixed("m1", model="b"))
    assert "name one of: a, b" in only(rig.arrive(1), Refuse).message
    assert only(rig.arrive(2, model="b"), Submit).instance == "m1"
    assert only(rig.arrive(3, model="c"), Refuse).code == "no_instance"


def test_a_model_that_is_away_does_not_hold_up_another() -> None:
    rig = Rig(mixed("m0", model="a"), mixed("m1", model="b"))
    rig.lost("m0")
    assert rig.arrive(1, model="a") == []
    assert only(rig.arrive(2, model="b"), Submit).instance == "m1"


def test_a_refused_request_leaves_nothing_behind() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive(prompt=100_000)
    assert rig.core.snapshot()["requests"] == {}
    assert rig.core.timeline(1) is None
    assert not any(isinstance(command, Finish) for command in rig.said)
