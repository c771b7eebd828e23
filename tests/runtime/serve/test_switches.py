"""Which role switches the driver carries out, and how it tells that they have ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trtpd_testing.roles import hello

from trtpd.runtime.core.events import Lost, SwitchRole
from trtpd.runtime.serve.switches import GIVE_UP_S, NOT_AGAIN_S, Switches

A, B = hello("decode_0", "decode"), hello("decode_1", "decode")
TO_PREFILL = SwitchRole(instance="decode_0", role="prefill")


@pytest.fixture
def switches() -> Switches:
    made = Switches()
    made.note(A, 0.0)
    made.note(B, 0.0)
    return made


def test_one_switch_at_a_time(switches: Switches) -> None:
    assert switches.begin(TO_PREFILL, 1.0)
    assert not switches.begin(TO_PREFILL, 2.0)
    assert not switches.begin(SwitchRole(instance="decode_1", role="prefill"), 2.0)
    assert switches.under_way == {"decode_0": "prefill"}


def test_a_switch_ends_with_the_next_generation_in_the_new_role(switches: Switches) -> None:
    switches.begin(TO_PREFILL, 1.0)
    assert switches.note(A, 2.0) is None
    assert switches.note(Lost(instance="decode_0", generation="g1", reason="stopped"), 3.0) is None
    assert switches.note(replace(A, generation="g2", role="prefill"), 4.0) == ("decode_0", "prefill", "done")
    assert switches.under_way == {}
    assert switches.ended == {("prefill", "done"): 1}


def test_one_that_comes_back_as_it_was_has_failed_and_is_left_alone_for_a_while(switches: Switches) -> None:
    switches.begin(TO_PREFILL, 1.0)
    assert switches.note(replace(A, generation="g2"), 4.0) == ("decode_0", "prefill", "failed")
    assert not switches.begin(TO_PREFILL, 5.0)
    assert switches.begin(SwitchRole(instance="decode_1", role="prefill"), 5.0)
    switches.note(replace(B, generation="g2", role="prefill"), 6.0)
    assert switches.begin(TO_PREFILL, 4.0 + NOT_AGAIN_S)


def test_one_that_never_comes_back_does_not_keep_the_others(switches: Switches) -> None:
    switches.begin(TO_PREFILL, 1.0)
    assert switches.begin(SwitchRole(instance="decode_1", role="prefill"), 1.0 + GIVE_UP_S)


def test_a_role_it_has_and_an_instance_nobody_knows_are_no_switch(switches: Switches) -> None:
    assert not switches.begin(SwitchRole(instance="decode_0", role="decode"), 1.0)
    assert not switches.begin(SwitchRole(instance="decode_9", role="prefill"), 1.0)
