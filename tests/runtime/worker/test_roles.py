"""Files by which an instance comes to the other role of its pair, and the worker's part in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from trtpd_testing.emulated_build import write_build
from trtpd_testing.scripted_engine import ScriptedEngine, ScriptedLink, ScriptedSink, ScriptedSource

from trtpd.build.manifest import read_manifest
from trtpd.errors import InputError, ServeError
from trtpd.runtime.engine.base import EngineRequest, PrefillBegan, RequestKind, Sampling
from trtpd.runtime.worker import roles
from trtpd.runtime.worker.leader import Leader
from trtpd.runtime.worker.messages import CancelWork, SubmitWork, SwitchWork
from trtpd.runtime.worker.roles import DRAIN_S, PATIENCE_S, RoleSwitch


def submit(request_id: int) -> SubmitWork:
    request = EngineRequest(
        request_id=request_id,
        attempt=1,
        kind=RequestKind.CONTEXT_ONLY,
        prompt_ids=(1, 2, 3),
        max_tokens=4,
        sampling=Sampling(),
    )
    return SubmitWork(request=request, deadline_in_s=300.0)


class Bench:
    def __init__(self, run_dir: Path) -> None:
        self.now_s = 10.0
        self.link = ScriptedLink()
        self.engine = ScriptedEngine(16)
        self.leader = Leader(
            self.engine,
            source=ScriptedSource(),
            sink=ScriptedSink(),
            link=self.link,
            role_switch=RoleSwitch(run_dir, "prefill_0"),
            clock=lambda: self.now_s,
        )
        self.turn()

    def turn(self, *commands, script=()):
        self.link.inbox.extend(commands)
        self.engine.script += script
        self.leader.turn(0.0)
        return self.link.events()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_idle_instance_drains_and_wishes_at_once(bench: Bench, tmp_path: Path) -> None:
    bench.turn(SwitchWork(role="decode"))
    assert bench.leader.draining
    assert roles.take_wish(tmp_path, "prefill_0") == "decode"
    assert roles.take_wish(tmp_path, "prefill_0") is None


def test_what_runs_ends_before_the_wish_and_nothing_new_is_taken(bench: Bench, tmp_path: Path) -> None:
    bench.turn(submit(1), script=[PrefillBegan(request_id=1, attempt=1, blocks=(4,))])
    (said,) = bench.turn(SwitchWork(role="decode"), submit(2))
    assert (said.request_id, said.code) == (2, "draining")
    assert roles.take_wish(tmp_path, "prefill_0") is None
    bench.turn(CancelWork(request_id=1, attempt=1))
    bench.turn()
    assert roles.take_wish(tmp_path, "prefill_0") == "decode"


def test_a_drain_that_does_not_end_wishes_all_the_same(bench: Bench, tmp_path: Path) -> None:
    bench.turn(submit(1), SwitchWork(role="decode"))
    bench.now_s += DRAIN_S
    bench.turn()
    assert roles.take_wish(tmp_path, "prefill_0") == "decode"


def test_a_wish_that_nobody_heeds_is_taken_back_and_ends_the_worker(bench: Bench, tmp_path: Path) -> None:
    bench.turn(SwitchWork(role="decode"))
    bench.now_s += PATIENCE_S + 1.0
    with pytest.raises(ServeError, match="the role stays"):
        bench.turn()
    assert roles.take_wish(tmp_path, "prefill_0") is None


def test_an_order_stands_until_it_is_taken_back(tmp_path: Path) -> None:
    roles.order(tmp_path, "decode_1", "prefill")
    assert roles.ordered(tmp_path, "decode_1") == "prefill"
    assert roles.ordered(tmp_path, "decode_0") is None
    roles.order(tmp_path, "decode_1", None)
    roles.order(tmp_path, "decode_1", None)
    assert roles.ordered(tmp_path, "decode_1") is None


def test_an_instance_has_an_engine_for_its_own_role_and_its_pairs(tmp_path: Path) -> None:
    manifest = read_manifest(write_build(tmp_path / "build", "prefill", "decode", "mixed"))
    assert roles.entry_of(manifest, "prefill_0", None).directory == "prefill"
    assert roles.entry_of(manifest, "prefill_0", "decode").directory == "decode"
    for name, role in (("mixed_0", "decode"), ("prefill_0", "mixed"), ("decode_7", None)):
        with pytest.raises(InputError):
            roles.entry_of(manifest, name, role)  # type: ignore[arg-type]
