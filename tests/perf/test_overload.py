"""Overload on the virtual clock, and the measurements' own arithmetic; the live ones are slow."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from trtpd.perf import overload
from trtpd.perf.elastic import ElasticSimulation, worker
from trtpd.perf.elastic_live import split_of
from trtpd.perf.live_load import LivePhase, Sample, workload
from trtpd.perf.scenario import SimRequest
from trtpd.perf.simulate import Simulation
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.cost import LinearStepTime
from trtpd.runtime.core.events import SwitchRole
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore

MODEL = LinearStepTime(
    fixed_s=0.04, prefill_token_s=5e-5, prefill_pair_s=0.0, decode_sequence_s=0.0015, decode_kv_token_s=0.0
)


class Emulated:
    """Step times as the emulated engines of perf/overload.py take them."""

    def step_s(
        self, *, n_prefill: int, prefill_tokens: int, prefill_kv_tokens: int, n_decode: int, decode_kv_tokens: int
    ) -> float:
        del n_prefill, prefill_kv_tokens, decode_kv_tokens
        decode_s = (overload.STEP_MS - 2.0 + overload.SEQUENCE_MS * n_decode) / 1e3 if n_decode else 0.0
        return 0.002 + prefill_tokens / 4000.0 + decode_s


def simulated(
    rate: float, seconds: float, *, lengths: tuple[int, int] = (20, 60), at_once: int = 0
) -> list[SimRequest]:
    rng, at_s, made = random.Random(1), 0.0, [0.0] * at_once
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        made.append(at_s)
    return [
        SimRequest(at_s=at_s, prompt_tokens=300, max_tokens=output, output_tokens=output, ttft_s=2.0, tpot_s=0.1)
        for at_s, output in ((at_s, rng.randint(*lengths)) for at_s in made)
    ]


@pytest.mark.parametrize("at_once", [0, 200])
@pytest.mark.parametrize("lengths", [(20, 60), (40, 40)], ids=["spread", "equal"])
def test_a_router_that_starts_into_three_times_its_capacity_serves_in_time_what_it_admits(
    lengths: tuple[int, int], at_once: int
) -> None:
    workers = [
        WorkerSpec(name=f"{role}_{number}", role=role, kv_blocks=2048, max_batch=16, prefill_tokens_per_s=4000.0)
        for role in ("prefill", "decode")
        for number in range(2)
    ]
    requests = simulated(3.0 * overload.capacity_per_s(), 30.0, lengths=lengths, at_once=at_once)
    found = Simulation(core=RouterCore(Policy()), workers=workers, model=Emulated(), requests=requests).run()
    assert set(found.kinds) <= {"good", "late", "refused:saturated"}
    assert found.kinds["good"] >= 0.85 * overload.capacity_per_s() * 30.0
    assert found.kinds["good"] >= 5 * found.kinds.get("late", 0)


def test_an_instance_of_the_simulation_drains_goes_and_comes_back_in_the_other_role() -> None:
    workers = [worker("prefill_0", "prefill"), worker("decode_0", "decode"), worker("decode_1", "decode")]
    requests = simulated(2.0, 20.0)
    simulation = ElasticSimulation(
        switch_s=2.0, core=RouterCore(Policy()), workers=workers, model=MODEL, requests=requests
    )
    simulation._at(5.0, lambda: simulation.switch(SwitchRole(instance="decode_1", role="prefill")))
    found = simulation.run()
    assert found.kinds == {"good": len(requests)}
    assert simulation.switches.ended == {("prefill", "done"): 1}
    assert simulation.nodes["decode_1"].spec.role == "prefill"
    assert simulation.split[-1][1] == 2


def test_the_same_seed_makes_the_same_load() -> None:
    phases = [LivePhase(name="a", seconds=5.0, rate=3.0, prompt=(5, 9), output=(2, 4))]
    assert workload("x", phases, 1) == workload("x", phases, 1)
    assert all(0.0 <= (ask.at_s or 0.0) < 5.0 and ask.max_tokens in (2, 3, 4) for ask in workload("x", phases, 1).asks)


@pytest.mark.parametrize(("rungs", "count"), [([0, 1, 2, 1, 0], 1), ([0, 1, 0, 2, 0], 2), ([0], 0)])
def test_a_climb_begins_on_the_lowest_rung(rungs: list[int], count: int) -> None:
    assert overload.climbs(rungs) == count


def test_a_split_is_noted_when_it_changes() -> None:
    def at(at_s: float, prefill: int, decode: int) -> Sample:
        return Sample(at_s=at_s, rung=0, roles={"prefill": prefill, "decode": decode}, rss_bytes={})

    assert split_of([at(1.0, 3, 3), at(2.0, 3, 3), at(3.0, 3, 2), at(4.0, 4, 2)]) == [
        (1.0, "3:3"),
        (3.0, "3:2"),
        (4.0, "4:2"),
    ]


@dataclass(frozen=True)
class Ended:
    state: str
    sent_s: float | None
    ended_s: float | None


def test_only_refusals_count_as_such() -> None:
    records = [Ended("refused", 1.0, 1.01), Ended("refused", 2.0, 2.2), Ended("finished", 1.0, 9.0)]
    found = overload.refusals(records)  # type: ignore[arg-type]
    assert (found.count, found.within) == (2, 0.5)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_live_overload_is_measured(capsys: pytest.CaptureFixture[str], smollm2: Path) -> None:
    arguments = ["--json", "--once-s", "8", "--thrice-s", "12", "--calm-s", "4", "--model", str(smollm2)]
    assert overload.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lost"] == {}
    assert found["refusals"]["count"] > 0
    assert {"router", "Triton", "decode_0"} <= found["memory_mib"].keys()
