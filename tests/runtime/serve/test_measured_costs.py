"""What the router makes of a profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from trtpd_testing.emulated_build import write_build
from trtpd_testing.profiles import profile_data

from trtpd.build.cost_profile import CostProfile
from trtpd.build.manifest import read_manifest
from trtpd.commands import _profile_line
from trtpd.perf.scenario import SimRequest
from trtpd.perf.simulate import Simulation
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.events import Arrived
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.serve.measured_costs import MeasuredCosts, step_times

PREFILL = WorkerSpec(name="p", role="prefill", model="toy", fingerprint="toy", prefill_tokens_per_s=50.0)
DECODE = replace(PREFILL, name="d", role="decode")


@pytest.fixture
def costs(tmp_path: Path) -> MeasuredCosts:
    build = write_build(tmp_path / "build", "prefill", "decode")
    (build / "profile.json").write_text(json.dumps(profile_data()))
    return MeasuredCosts.of_build(build, read_manifest(build))


def router(costs: MeasuredCosts) -> RouterCore:
    return RouterCore(
        step_times=costs.step_times, fingerprint=costs.fingerprint, near_bytes_per_s=costs.near_bytes_per_s
    )


def why_placed(core: RouterCore, prefill: WorkerSpec) -> str:
    """How a router explains where it puts a prompt of 200 tokens."""
    for spec in (prefill, replace(prefill, name="d", role="decode")):
        core.handle(0.0, spec.hello("1"))
    core.handle(0.1, Arrived(request_id=1, prompt_tokens=200, max_tokens=20, deadline_s=60.0, model="toy"))
    (request,) = core._books.requests.values()
    assert request.attempt is not None
    return request.attempt.record.why


def test_a_router_with_a_profile_predicts_by_it(costs: MeasuredCosts) -> None:
    assert "first token in about 0.2 s" in why_placed(router(costs), PREFILL)
    assert "then one each 0.011 s" in why_placed(router(costs), PREFILL)
    assert "first token in about 4 s" in why_placed(RouterCore(), PREFILL)


def test_instances_of_another_build_are_not_predicted_by_it(costs: MeasuredCosts) -> None:
    assert "first token in about 4 s" in why_placed(router(costs), replace(PREFILL, fingerprint="another"))


def test_status_says_which_profile_and_how_far_off_it_is(costs: MeasuredCosts, tmp_path: Path) -> None:
    line = _profile_line(costs.status)
    assert str(tmp_path / "build" / "profile.json") in line
    assert "prefill 1% / 5%, decode 1% / 5%; hand-offs: 2.00 GB/s" in line
    build = write_build(tmp_path / "bare", "mixed")
    assert "learned while serving" in _profile_line(MeasuredCosts.of_build(build, read_manifest(build)).status)


def test_the_path_of_transfers_is_the_one_the_build_uses(tmp_path: Path) -> None:
    for path, rate in (("auto", 2e9), ("shm", 2e9), ("tcp", None)):
        build = write_build(tmp_path / path, "prefill", "decode", path=path)
        (build / "profile.json").write_text(json.dumps(profile_data()))
        assert MeasuredCosts.of_build(build, read_manifest(build)).near_bytes_per_s == rate


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"digest_every": 0}, "no digests, this build has digests over one block in 1"),
        ({"digest_every": None}, "digests or without, which was not kept"),
        ({"source_cores": [3, 4]}, "CPUs 3,4, in this build it is on all CPUs"),
        ({"sink_cores": [7]}, "CPUs 7"),
    ],
)
def test_a_transfer_that_was_measured_otherwise_is_not_used_and_that_is_said(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    build = write_build(tmp_path / "build", "prefill", "decode")
    data = profile_data()
    data["transfers"]["shm"] |= changed
    (build / "profile.json").write_text(json.dumps(data))
    costs = MeasuredCosts.of_build(build, read_manifest(build))
    assert costs.near_bytes_per_s is None
    assert costs.step_times.keys() == {"prefill", "decode"}
    (remark,) = [one for one in costs.status["remarks"] if "transfer over shm" in one]
    assert said in remark
    assert "learned while it serves" in remark
    assert "trtpd profile" in remark
    assert "hand-offs: learned while serving" in _profile_line(costs.status)


def test_a_simulator_takes_the_same_profile(costs: MeasuredCosts) -> None:
    simulation = Simulation(
        core=router(costs),
        workers=[PREFILL, DECODE],
        model=step_times(CostProfile.model_validate(profile_data())),
        requests=[SimRequest(at_s=0.0, prompt_tokens=200, max_tokens=11, output_tokens=11)],
    )
    simulation.run()
    (outcome,) = simulation.outcomes
    assert outcome.first_s == pytest.approx(0.2, abs=0.01)
