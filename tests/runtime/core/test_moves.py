"""Sessions that leave an instance because it goes or is hot, and offers that give their KV back."""

from __future__ import annotations

from trtpd_testing.router_rig import Rig, begun, decode, done, drained, offered, only, prefill, sealed, tokens

from trtpd.runtime.core.events import Cancel, Command, Drain, Emit, Load, Pull, Step, Submit, Tick, Withdraw
from trtpd.runtime.core.policy import Policy


def decoding(rig: Rig, request_id: int, *, out: int = 200) -> str:
    """Brings a request to decode and says where."""
    rig.arrive(request_id, out=out)
    sink = only(rig.step("p0", offered(request_id)), Pull).instance
    rig.step("p0", sealed(request_id))
    rig.step(sink, begun(request_id), done(request_id))
    rig.step("p0", drained(request_id))
    return sink


def look(rig: Rig) -> list[Command]:
    rig.now_s += 0.26
    return rig.tell(Tick())


def test_sessions_of_an_instance_that_drains_move_one_after_the_other_without_a_seam() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    home = decoding(rig, 1)
    rig.step(home, tokens(1, 4))
    away = {"d0": "d1", "d1": "d0"}[home]
    rig.tell(Drain(instance=home, move=True))
    said = look(rig)
    assert only(said, Cancel).instance == home
    again = only(said, Submit)
    assert (again.attempt, again.journal) == (2, (1000, 1001, 1002, 1003, 1004))
    assert rig.step(home, tokens(5)) == [], "what it still computes is not wanted"
    rig.step("p0", offered(attempt=2))
    assert only(rig.step("p0", sealed(attempt=2, first_index=5)), Emit).first_index == 5
    rig.step(away, begun(attempt=2), done(attempt=2))
    assert only(rig.step(away, tokens(6, attempt=2)), Emit).first_index == 6
    assert rig.core.snapshot()["moves"] == {"drain": 1}


def test_moves_are_paced() -> None:
    rig = Rig(prefill(), decode("d0"), policy=Policy(moves_per_prefiller=1))
    for request_id in range(1, 4):
        decoding(rig, request_id)
    rig.specs["d1"] = decode("d1")
    rig.hello("d1")
    rig.tell(Drain(instance="d0", move=True))
    assert sum(isinstance(command, Submit) for command in look(rig)) == 1
    assert not any(isinstance(command, Submit) for command in look(rig))


def test_a_drain_without_a_move_lets_what_runs_finish() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    rig.tell(Drain(instance=decoding(rig, 1)))
    assert look(rig) == []


def test_an_instance_says_itself_that_it_drains() -> None:
    rig = Rig(prefill(), decode("d0"), decode("d1"))
    load = Load(kv_blocks_free=1024, draining=True)
    rig.tell(Step(instance="d0", generation="1", events=(), load=load))
    states = {view["name"]: view["state"] for view in rig.core.snapshot()["instances"]}
    assert states["d0"] == "draining"
    assert decoding(rig, 1) == "d1"


def test_past_the_watermark_the_oldest_offer_without_a_sink_is_withdrawn_and_queued_again() -> None:
    rig = Rig(prefill(kv_blocks=16), decode("d0", kv_blocks=16), policy=Policy(held_watermark=0.4))
    for request_id in (1, 2):
        rig.arrive(request_id, prompt=120)
        rig.step("p0", offered(request_id), sealed(request_id))
    rig.specs["d1"] = decode("d1", kv_blocks=16)
    rig.hello("d1")
    rig.step("d1", free=0)
    assert rig.lost("d0") == []
    said = look(rig)
    assert only(said, Withdraw).request_id == 1
    assert rig.core.snapshot()["retries"]["held_kv"] == 1
    assert rig.core.snapshot()["requests"] == {"queued": 1, "transferring": 1}
