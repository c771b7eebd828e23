"""What the router itself costs: placement against a large fleet, an event, and how fast the simulator runs with it.

`python -m trtpd.perf.router_bench` prints one JSON object; times are microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from trtpd.perf.scenario import SimRequest
from trtpd.perf.simulate import Simulation
from trtpd.perf.worker_spec import WorkerSpec, true_token
from trtpd.runtime.core import place
from trtpd.runtime.core.cost import LinearStepTime
from trtpd.runtime.core.events import (
    Arrived,
    Drained,
    Event,
    InstanceEvent,
    Load,
    Offered,
    Pull,
    Role,
    Sealed,
    Step,
    Submit,
    Tokens,
    TransferBegun,
    TransferDone,
    Withdraw,
)
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.core.view import rules_of, work_of

PROMPT_TOKENS, MOST_TOKENS = 512, 400
STEP_S = 0.02
FAR_S = 1e6

GPU = LinearStepTime(
    fixed_s=0.004, prefill_token_s=2e-5, prefill_pair_s=1e-9, decode_sequence_s=2e-4, decode_kv_token_s=1e-7
)


class Fleet:
    """A router with so many instances and active requests, all decoding; answers commands at once."""

    def __init__(self, instances: int, active: int, seed: int = 0) -> None:
        self.core = RouterCore(Policy(queue_limit=1 << 20), seed=seed)
        self.now_s = 1.0
        self.index: dict[int, int] = {}
        self.on: dict[str, list[tuple[int, int]]] = {}
        self._rng = random.Random(seed)
        self._next_id = 0
        for number in range(instances):
            role: Role = "prefill" if number % 2 else "decode"
            self.tell(spec_of(role, number, active, instances).hello("1"))
        for _ in range(active):
            self.to_decoding()

    def tell(self, event: Event) -> list[Any]:
        return self.core.handle(self.now_s, event)

    def arrival(self) -> Arrived:
        self._next_id += 1
        return Arrived(
            request_id=self._next_id,
            prompt_tokens=self._rng.randint(16, 2 * PROMPT_TOKENS),
            max_tokens=MOST_TOKENS,
            deadline_s=FAR_S,
            ttft_s=60.0,
            tpot_s=0.5,
        )

    def answer(self, instance: str, *events: InstanceEvent) -> list[Any]:
        load = Load(kv_blocks_free=1 << 20, step_s=STEP_S, step_tokens=0)
        return self.tell(Step(instance=instance, generation="1", events=events, load=load))

    def to_decoding(self) -> None:
        """One more request, through its whole hand-off."""
        self.now_s += 0.01
        submit = next(c for c in self.tell(self.arrival()) if isinstance(c, Submit))
        key: dict[str, Any] = {"request_id": submit.request_id, "attempt": submit.attempt}
        source = submit.instance
        said = self.answer(source, Offered(**key, blocks=1, lease_s=10.0, offer=b"o"))
        sealed = Sealed(**key, first_index=0, token=1, log_prob=None, finish=None, seal=b"s")
        said += self.answer(source, sealed)
        sink = next(c.instance for c in said if isinstance(c, Pull))
        done = TransferDone(**key, bytes_moved=1 << 20, chunks=2, seconds=0.01, exposed_s=0.0, path="sim")
        said = self.answer(sink, TransferBegun(**key), done)
        if any(isinstance(command, Withdraw) for command in said):
            self.answer(source, Drained(**key))
        self.index[submit.request_id] = 1
        self.on.setdefault(sink, []).append((submit.request_id, submit.attempt))

    def step_of(self, sink: str) -> Step:
        """One decode step of all that run there."""
        events = []
        for request_id, attempt in self.on[sink]:
            index = self.index[request_id]
            self.index[request_id] = index + 1
            token = (true_token(request_id, index),)
            events.append(Tokens(request_id=request_id, attempt=attempt, first_index=index, ids=token))
        load = Load(kv_blocks_free=1 << 20, running=len(events), step_s=STEP_S, step_tokens=len(events))
        return Step(instance=sink, generation="1", events=tuple(events), load=load)


def spec_of(role: Role, number: int, active: int, instances: int) -> WorkerSpec:
    share = max(1, 4 * active // instances)
    return WorkerSpec(
        name=f"{role}_{number}",
        role=role,
        kv_blocks=1 << 20,
        max_batch=share,
        prefill_tokens_per_s=50_000.0,
        host=f"h{number // 8}",
    )


def percentiles_us(samples_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples_s)
    return {
        "p50": round(statistics.median(ordered) * 1e6, 2),
        "p99": round(ordered[int(len(ordered) * 0.99)] * 1e6, 2),
    }


def bench_placement(fleet: Fleet, samples: int) -> dict[str, Any]:
    """`choose`: the decision alone. `arrived`: a whole arrival, admission and dispatch included; each request leaves
    again, and a decode step of some instance comes between two."""
    books = fleet.core._books
    choose_s, arrived_s, step_s, tokens = [], [], [], 0
    sinks = list(fleet.on)
    for number in range(samples):
        fleet.now_s += 1e-3
        step = fleet.step_of(sinks[number % len(sinks)])
        began_s = time.perf_counter()
        fleet.tell(step)
        step_s.append((time.perf_counter() - began_s) / len(step.events))
        tokens += len(step.events)
        request = Request(fleet.arrival(), "m", fleet.now_s)
        began_s = time.perf_counter()
        found = place.choose(request, books.cluster, work=work_of(books, request), rules=rules_of(books, request))
        choose_s.append(time.perf_counter() - began_s)
        assert isinstance(found, place.Choice)
        arrival = fleet.arrival()
        began_s = time.perf_counter()
        said = fleet.tell(arrival)
        arrived_s.append(time.perf_counter() - began_s)
        submit = next(command for command in said if isinstance(command, Submit))
        key: dict[str, Any] = {"request_id": submit.request_id, "attempt": submit.attempt}
        said = fleet.answer(submit.instance, Offered(**key, blocks=1, lease_s=10.0, offer=b"o"))
        ended = Sealed(**key, first_index=0, token=1, log_prob=None, finish="stop", seal=b"s")
        fleet.answer(submit.instance, ended, Drained(**key))
        for pull in (command for command in said if isinstance(command, Pull)):
            fleet.answer(pull.instance, Drained(**key))
    return {
        "choose_us": percentiles_us(choose_s),
        "arrived_us": percentiles_us(arrived_s),
        "token_event_us": percentiles_us(step_s),
        "tokens": tokens,
    }


def workload(requests: int, rate: float, mean_output: int, seed: int) -> list[SimRequest]:
    rng, now_s, made = random.Random(seed), 0.0, []
    for _ in range(requests):
        now_s += rng.expovariate(rate)
        most = 4 * mean_output
        output = max(1, min(most, round(rng.expovariate(1.0 / mean_output))))
        prompt = rng.choice((50, 200, 800))
        made.append(
            SimRequest(at_s=now_s, prompt_tokens=prompt, max_tokens=most, output_tokens=output, ttft_s=2.0, tpot_s=0.1)
        )
    return made


def bench_simulator(requests: int, mean_output: int, *, rate: float = 60.0) -> dict[str, Any]:
    """Two prefill and two decode instances of GPU speed, which are about half idle at 60 requests a second and busy at
    200: a step of a full batch is one event like that of a single sequence."""
    pools = [
        WorkerSpec(name=f"{role}_{n}", role=role, kv_blocks=8192, max_batch=64, prefill_tokens_per_s=40_000.0)
        for role in ("prefill", "decode")
        for n in range(2)
    ]
    simulation = Simulation(
        core=RouterCore(), workers=pools, model=GPU, requests=workload(requests, rate, mean_output, seed=1)
    )
    began_s = time.perf_counter()
    summary = simulation.run()
    seconds = time.perf_counter() - began_s
    return {
        "mean_output": mean_output,
        "offered_per_s": rate,
        "requests_per_s": round(requests / seconds),
        "tokens_per_s": round(summary.output_tokens / seconds),
        "events_per_s": round(simulation.events / seconds),
        "kinds": summary.kinds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--active", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args(argv)
    fleet = Fleet(options.instances, options.active)
    report: dict[str, Any] = {"instances": options.instances, "active": fleet.core.snapshot()["requests"]}
    report["router"] = bench_placement(fleet, options.samples)
    report["simulator"] = [
        bench_simulator(options.requests, output, rate=rate) for output, rate in ((16, 60.0), (16, 200.0), (128, 60.0))
    ]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
