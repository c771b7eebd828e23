"""Elastic pools against every fixed split, on the virtual clock: `python -m trtpd.perf.elastic [--json]`.

Six instances; the load turns from long prompts with short answers to chats with long ones, and back. The same router,
requests, seeds and targets in every arm; only in the elastic one may instances take the other role, which costs what it
costs live: a drain, then `--switch-s` without the instance.

With `--live` one elastic run of shorter phases goes through Triton on emulated engines instead, and says what became of
its requests and how the pools followed (perf/elastic_live.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from trtpd.errors import TrtpdError
from trtpd.perf.outcome import Summary
from trtpd.perf.scenario import SimRequest
from trtpd.perf.simulate import Node, Simulation
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.cost import LinearStepTime, StepTimeModel
from trtpd.runtime.core.events import Command, Drain, Event, Hello, Lost, Role, SwitchRole
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.serve.switches import Switches
from trtpd.runtime.worker.roles import DRAIN_S

INSTANCES = 6
TTFT_S, TPOT_S = 3.0, 0.12
TIMEOUT_S = 120.0
LOOK_S = 0.1

MODEL = LinearStepTime(
    fixed_s=0.012, prefill_token_s=2e-4, prefill_pair_s=0.0, decode_sequence_s=1.6e-3, decode_kv_token_s=4e-7
)
PREFILL_TOKENS_PER_S = 4_500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A kind of load: `rate` requests a second, lengths drawn evenly from (least, most)."""

    name: str
    rate: float
    prompt: tuple[int, int]
    output: tuple[int, int]


PROMPTS = Phase(name="prompts", rate=5.5, prompt=(2000, 4000), output=(16, 48))
CHATS = Phase(name="chats", rate=6.5, prompt=(50, 150), output=(200, 400))
TURNS = (PROMPTS, CHATS, PROMPTS)


def load(rng: random.Random, phases: Sequence[Phase], phase_s: float) -> list[SimRequest]:
    """Poisson arrivals, phase after phase."""
    made: list[SimRequest] = []
    for number, phase in enumerate(phases):
        at_s, end_s = number * phase_s, (number + 1) * phase_s
        while (at_s := at_s + rng.expovariate(phase.rate)) < end_s:
            output = rng.randint(*phase.output)
            made.append(
                SimRequest(
                    at_s=at_s,
                    prompt_tokens=rng.randint(*phase.prompt),
                    max_tokens=output,
                    output_tokens=output,
                    timeout_s=TIMEOUT_S,
                    ttft_s=TTFT_S,
                    tpot_s=TPOT_S,
                )
            )
    return made


def worker(name: str, role: Role) -> WorkerSpec:
    """An instance as it is in a role: steps of many prompt tokens, or of few beside a batch."""
    prefills = role == "prefill"
    return WorkerSpec(
        name=name,
        role=role,
        kv_blocks=2048,
        max_batch=8 if prefills else 56,
        max_step_tokens=2048 if prefills else 512,
        chunk_tokens=1024 if prefills else 256,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
    )


class _Heard:
    """A RouterCore whose role switches somebody hears of: the simulation has no launcher."""

    def __init__(self, core: RouterCore, simulation: ElasticSimulation) -> None:
        self._core = core
        self._simulation = simulation

    def handle(self, now_s: float, event: Event) -> list[Command]:
        if isinstance(event, Hello):
            self._simulation.switches.note(event, now_s)
        commands = self._core.handle(now_s, event)
        for command in commands:
            if isinstance(command, SwitchRole):
                self._simulation.switch(command)
        return commands


class ElasticSimulation(Simulation):
    """As its base, and instances take other roles when the router says so. `split` follows the number of prefill
    instances, as (instant, number)."""

    def __init__(self, *, switch_s: float, core: RouterCore, **others: Any) -> None:
        super().__init__(core=core, **others)
        self.core = _Heard(core, self)  # type: ignore[assignment]
        self.switches = Switches()
        self.split: list[tuple[float, int]] = []
        self._switch_s = switch_s

    def switch(self, command: SwitchRole) -> None:
        """As the driver, the worker and its launcher do it."""
        if not self.switches.begin(command, self.now_s):
            return
        self._at(self.now_s, lambda: self._tell_router(Drain(instance=command.instance, move=True)))
        self._look(self.nodes[command.instance], command.role, self.now_s + DRAIN_S)

    def _look(self, node: Node, role: Role, by_s: float) -> None:
        """Whether it has drained."""
        if node.worker is not None and node.worker.sequences and self.now_s < by_s:
            self._at(self.now_s + LOOK_S, partial(self._look, node, role, by_s))
            return
        if node.worker is not None:
            lost = Lost(instance=node.spec.name, generation=node.worker.generation, reason="switching roles")
            node.worker = None
            self._at(self.now_s, lambda: self._tell_router(lost))
        node.spec = worker(node.spec.name, role)
        self._at(self.now_s + self._switch_s, partial(self._start, node))

    def _start(self, node: Node) -> None:
        super()._start(node)
        up = [other.spec.role for other in self.nodes.values() if other.worker is not None]
        self.split.append((self.now_s, up.count("prefill")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm over all seeds. `goodput`: the share of the offered requests that finished within their targets.
    `lost`: requests that failed (a refusal is an answer). `split` as in ElasticSimulation, of the first seed."""

    name: str
    goodput: float
    goodput_per_s: float
    lost: int
    refused: int
    requests: int
    switches: int
    split: list[tuple[float, int]]


def run(
    prefill: int, *, elastic: bool, seed: int, phase_s: float, switch_s: float
) -> tuple[Summary, ElasticSimulation]:
    """One run that begins with so many prefill instances."""
    workers = [worker(f"prefill_{number}", "prefill") for number in range(prefill)]
    workers += [worker(f"decode_{number}", "decode") for number in range(INSTANCES - prefill)]
    step_times: dict[Role, StepTimeModel] = {"prefill": MODEL, "decode": MODEL}
    simulation = ElasticSimulation(
        switch_s=switch_s,
        core=RouterCore(replace(Policy(), elastic=elastic), seed=seed, step_times=step_times),
        workers=workers,
        model=MODEL,
        requests=load(random.Random(seed), TURNS, phase_s),
        seed=seed,
    )
    return simulation.run(), simulation


def arm(prefill: int, *, elastic: bool, seeds: Sequence[int], phase_s: float, switch_s: float) -> Arm:
    found = [run(prefill, elastic=elastic, seed=seed, phase_s=phase_s, switch_s=switch_s) for seed in seeds]
    summaries = [summary for summary, _ in found]
    return Arm(
        name="elastic" if elastic else f"{prefill}:{INSTANCES - prefill}",
        goodput=float(np.mean([s.kinds.get("good", 0) / s.requests for s in summaries])),
        goodput_per_s=float(np.mean([s.goodput_per_s for s in summaries])),
        lost=sum(_ended(s, "failed") + s.kinds.get("unfinished", 0) for s in summaries),
        refused=sum(_ended(s, "refused") for s in summaries),
        requests=sum(s.requests for s in summaries),
        switches=sum(sum(simulation.switches.ended.values()) for _, simulation in found),
        split=[(round(at_s, 1), count) for at_s, count in found[0][1].split[INSTANCES - 1 :]],
    )


def _ended(summary: Summary, state: str) -> int:
    return sum(count for kind, count in summary.kinds.items() if kind.startswith(f"{state}:"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="elastic", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--phase-s", type=float, default=600.0, help="how long a kind of load lasts")
    parser.add_argument("--switch-s", type=float, default=5.0, help="how long an instance is away once drained")
    parser.add_argument("--live", action="store_true", help="one elastic run through Triton")
    options = parser.parse_args(argv)
    if options.seeds < 1 or options.phase_s <= 0.0 or options.switch_s < 0.0:
        parser.error("--seeds must be at least 1, --phase-s above 0, --switch-s at least 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.live:
        from trtpd.perf.elastic_live import measure

        try:
            found = measure(options.phase_s)
        except TrtpdError as error:
            print(f"elastic: {error}", file=sys.stderr)
            return error.exit_code
        print(json.dumps(asdict(found)))
        return 0
    seeds, times = range(options.seeds), {"phase_s": options.phase_s, "switch_s": options.switch_s}
    fixed = [arm(prefill, elastic=False, seeds=seeds, **times) for prefill in range(1, INSTANCES)]
    elastic = arm(INSTANCES // 2, elastic=True, seeds=seeds, **times)
    for one in [*fixed, elastic]:
        if options.json:
            print(json.dumps(asdict(one)))
        else:
            print(
                f"{one.name:>8}  goodput {one.goodput:6.1%} ({one.goodput_per_s:.2f}/s)  "
                f"refused {one.refused:5}  lost {one.lost}  switches {one.switches}"
            )
    best = max(one.goodput for one in fixed)
    print(f"elastic over the best fixed split: {elastic.goodput / best:.2f} x; prefill instances: {elastic.split}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
