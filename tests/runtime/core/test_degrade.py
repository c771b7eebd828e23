"""The ladder: up under pressure, down in calm, and what each rung does."""

from __future__ import annotations

from trtpd_testing.router_rig import Rig, decode, mixed, only, prefill

from trtpd.runtime.core.degrade import Ladder, Pressure, Rung
from trtpd.runtime.core.events import Finish, Refuse, Submit, Tick
from trtpd.runtime.core.policy import Policy


def pressed(value: float) -> Pressure:
    return Pressure(value=value, reason="prefill_backlog")


def test_the_ladder_goes_up_one_rung_at_a_time_and_dwells_on_each() -> None:
    ladder = Ladder(dwell_up_s=2.0, dwell_down_s=5.0)
    rungs = []
    for step in range(40):
        ladder.look(step * 0.25, pressed(10.0))
        rungs.append(int(ladder.rung))
    assert rungs == sorted(rungs)
    assert [rungs.index(rung) * 0.25 for rung in range(1, 5)] == [0.0, 2.0, 4.0, 6.0]


def test_a_pressure_that_swings_about_a_threshold_does_not_make_the_ladder_swing() -> None:
    ladder = Ladder(dwell_up_s=2.0, dwell_down_s=5.0)
    for step in range(400):
        ladder.look(step * 0.25, pressed(0.45 if step % 2 else 0.55))
    assert (ladder.rung, ladder.ups, ladder.downs) == (Rung.SHORT_LOCAL, 1, 0)


def test_the_ladder_comes_down_once_when_calm_has_lasted() -> None:
    ladder = Ladder(dwell_up_s=0.5, dwell_down_s=5.0)
    for step in range(40):
        ladder.look(step * 0.25, pressed(10.0))
    for step in range(40, 200):
        ladder.look(step * 0.25, pressed(0.0))
    assert (ladder.rung, ladder.ups, ladder.downs) == (Rung.NORMAL, 4, 4)


def test_a_rung_lasts_from_the_first_instance_on_whatever_the_clock_began_at() -> None:
    rig = Rig(mixed())
    assert rig.core.snapshot()["ladder"]["for_s"] == 0.0
    rig.now_s += 1.5
    rig.hello(next(iter(rig.specs)))
    assert rig.core.snapshot()["ladder"]["for_s"] == 1.5


def test_under_load_low_priority_is_shed_queued_or_new_and_then_everything_is_refused() -> None:
    policy = Policy(patience_s=2.0, dwell_up_s=0.5, refuse_late=False)
    rig = Rig(mixed(kv_blocks=100_000, max_seq_tokens=1000, prefill_tokens_per_s=400.0), policy=policy)
    rig.arrive(1, prompt=400)
    rig.arrive(2, prompt=400, priority=-1)
    ended = []
    for number in range(40):
        said = rig.arrive(1000 + number, prompt=400)
        rig.now_s += 0.25
        ended += [command for command in said + rig.tell(Tick()) if isinstance(command, Finish | Refuse)]
    ladder = rig.core.snapshot()["ladder"]
    assert (ladder["rung"], ladder["reason"]) == (4, "prefill_backlog")
    first = ended[0]
    assert isinstance(first, Finish)
    assert (first.request_id, first.state, first.reason) == (2, "refused", "saturated")
    assert any("overloaded (prefill_backlog)" in command.message for command in ended)
    assert rig.core.snapshot()["shed"]["rung_refuse"] > 0
    snapshot = rig.core.snapshot()
    assert "ladder" in {event["code"] for event in snapshot["events"]}
    assert "ladder" not in {fault["code"] for fault in snapshot["faults"]}


def test_from_the_first_rung_short_prompts_may_stay_on_decode() -> None:
    policy = Policy(patience_s=0.8, short_tokens=128, refuse_late=False, dwell_up_s=60.0)
    rig = Rig(prefill(prefill_tokens_per_s=400.0), decode(kv_blocks=4000), policy=policy)
    for number in range(1, 4):
        rig.arrive(number, prompt=800)
    rig.now_s += 0.3
    rig.tell(Tick())
    assert rig.core.snapshot()["ladder"]["name"] == "short_local"
    submit = only(rig.arrive(9, prompt=100), Submit)
    assert (submit.instance, submit.kind) == ("d0", "context_and_generation")
    timeline = rig.core.timeline(9)
    assert timeline is not None
    assert "moving its KV costs more" in timeline.attempts[0].why


def test_a_pool_that_is_gone_shows_on_the_ladder() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive(1)
    rig.lost("p0")
    rig.now_s += 0.3
    rig.tell(Tick())
    ladder = rig.core.snapshot()["ladder"]
    assert (ladder["rung"], ladder["reason"]) == (1, "pool_gone")
