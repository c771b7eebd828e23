"""RouterCore on a virtual clock: a heap of instants, simulated workers, and faults on request.

One seed, one trace: nothing here reads a clock or shares random state.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from trtpd.perf.outcome import Outcome, Summary, summarise
from trtpd.perf.scenario import Faults, Kill, Network, SimRequest
from trtpd.perf.simulated_worker import Key, Running, SimulatedWorker
from trtpd.perf.worker_spec import Truth, WorkerSpec
from trtpd.runtime.core.cost import StepTimeModel
from trtpd.runtime.core.events import (
    Arrived,
    Cancel,
    ClientGone,
    Emit,
    Event,
    Finish,
    InstanceEvent,
    Lost,
    Pull,
    Refuse,
    Role,
    Step,
    Submit,
    TextStopped,
    Tick,
    WakeAt,
    Withdraw,
)
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.engine.batching import StepPlan

SENT = (Submit, Pull, Withdraw, Cancel)
"""Commands to an instance. Tuples, since a union is made anew each time it is looked at."""

ENDS = (Finish, Refuse)
GIVES_BACK = (Withdraw, Cancel)

COLLECT_EVERY = 100_000
"""Objects made between two searches for rings of garbage. A run makes few rings and very many objects that stay."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """What is there already is not searched for garbage, and the rest once in COLLECT_EVERY new objects."""
    former = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *former[1:])
    try:
        yield
    finally:
        gc.set_threshold(*former)
        gc.unfreeze()


@dataclass(slots=True, eq=False)
class Move:
    """A pull under way at one sink: how much is copied of what could be, as of `at_s`."""

    at_s: float
    begun_s: float
    copied_tokens: float = 0.0
    ready_tokens: int = 0
    ending: bool = False

    def advance(self, now_s: float, tokens_per_s: float) -> None:
        self.copied_tokens = min(self.ready_tokens, self.copied_tokens + (now_s - self.at_s) * tokens_per_s)
        self.at_s = now_s


@dataclass(slots=True, eq=False)
class Node:
    """An instance across its lives; `worker` is None while it is down."""

    spec: WorkerSpec
    worker: SimulatedWorker | None = None
    lives: int = 0
    stepping: bool = False
    step_s: float = 0.0
    last_delivery_s: float = 0.0
    moves: dict[Key, Move] = field(default_factory=dict)


class Simulation:
    """Drives one RouterCore. `trace` gets a line for everything that reaches the router or leaves it. `model` may be
    one for each role, as a profile has them (runtime/serve/measured_costs.py)."""

    def __init__(
        self,
        *,
        core: RouterCore,
        workers: Sequence[WorkerSpec],
        model: StepTimeModel | Mapping[Role, StepTimeModel],
        requests: Sequence[SimRequest],
        faults: Faults | None = None,
        network: Network | None = None,
        seed: int = 0,
        trace: list[str] | None = None,
        check_every_event: bool = False,
    ) -> None:
        self.core = core
        self.now_s = 0.0
        self.events = 0
        self.nodes = {spec.name: Node(spec=spec) for spec in workers}
        self.outcomes = [Outcome(request_id=number, arrived_s=r.at_s) for number, r in enumerate(requests)]
        self._models = model if isinstance(model, Mapping) else dict.fromkeys(get_args(Role), model)
        self._requests = requests
        self._truths: dict[int, Truth] = {}
        self._faults = faults or Faults()
        self._network = network or Network()
        self._rng = random.Random(seed)
        self._trace = trace
        self._check = check_every_event
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0

    def run(self, *, until_s: float = float("inf")) -> Summary:
        """Runs until nothing is left to happen, or until an instant. To be called once."""
        for node in self.nodes.values():
            self._start(node)
        for number, request in enumerate(self._requests):
            self._at(request.at_s, partial(self._arrive, number, request))
        for kill in self._faults.kills:
            self._at(kill.at_s, partial(self._kill, kill))
        heap = self._heap
        with collecting_seldom():
            while heap and heap[0][0] <= until_s:
                self.now_s, _, action = heapq.heappop(heap)
                action()
        return self.summary()

    def summary(self) -> Summary:
        """What became of the requests so far; durations run to the last end."""
        ends_s = [outcome.ended_s for outcome in self.outcomes if outcome.ended_s is not None]
        return summarise(self.outcomes, self._requests, duration_s=max(ends_s, default=0.0))

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at_s, self._pushed, action))

    def _tell_router(self, event: Event) -> None:
        self.events += 1
        commands = self.core.handle(self.now_s, event)
        if self._check:
            self.core.check_integrity()
        if self._trace is not None:
            self._note("in", event)
            for command in commands:
                self._note("out", command)
        for command in commands:
            if isinstance(command, Emit):  # nearly all are
                self._emitted(command)
            elif isinstance(command, SENT):
                self._send(self.nodes[command.instance], command)
            elif isinstance(command, ENDS):
                self.outcomes[command.request_id].end(command, self.now_s)
            elif isinstance(command, WakeAt):
                self._at(command.at_s, lambda: self._tell_router(Tick()))

    def _note(self, direction: str, what: object) -> None:
        if self._trace is not None:
            self._trace.append(f"{self.now_s!r} {direction} {what!r}")

    def _arrive(self, number: int, request: SimRequest) -> None:
        self._truths[number] = Truth(
            request_id=number,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            output_tokens=request.output_tokens,
            block_hashes=request.block_hashes,
        )
        if request.leaves_after_s is not None:
            self._at(self.now_s + request.leaves_after_s, lambda: self._tell_router(ClientGone(request_id=number)))
        self._tell_router(
            Arrived(
                request_id=number,
                prompt_tokens=request.prompt_tokens,
                max_tokens=request.max_tokens,
                deadline_s=self.now_s + request.timeout_s,
                ttft_s=request.ttft_s,
                tpot_s=request.tpot_s,
                priority=request.priority,
                tenant=request.tenant,
                block_hashes=request.block_hashes,
            )
        )

    def _emitted(self, emit: Emit) -> None:
        outcome = self.outcomes[emit.request_id]
        outcome.emitted(emit, self.now_s)
        stop = self._requests[emit.request_id].stops_at_index
        if stop is not None and emit.first_index <= stop < emit.first_index + len(emit.ids):
            self._at(self.now_s, lambda: self._tell_router(TextStopped(request_id=emit.request_id, index=stop)))

    def _start(self, node: Node) -> None:
        node.lives += 1
        node.worker = SimulatedWorker(node.spec, f"{node.spec.name}#{node.lives}", self._truths)
        node.stepping, node.moves = False, {}
        hello = node.spec.hello(node.worker.generation)
        self._at(self.now_s, lambda: self._tell_router(hello))

    def _kill(self, kill: Kill) -> None:
        node = self.nodes[kill.instance]
        if node.worker is None:
            return
        lost = Lost(instance=kill.instance, generation=node.worker.generation, reason="killed")
        node.worker = None
        self._at(self.now_s + self._faults.detect_s, lambda: self._tell_router(lost))
        if kill.back_after_s is not None:
            self._at(self.now_s + kill.back_after_s, lambda: self._start(node))

    def _send(self, node: Node, command: Submit | Pull | Withdraw | Cancel) -> None:
        """A command reaches the life it was meant for, or nobody."""
        worker = node.worker
        if worker is not None:
            self._at(self.now_s + self._network.message_s, lambda: self._receive(node, worker, command))

    def _receive(self, node: Node, worker: SimulatedWorker, command: Submit | Pull | Withdraw | Cancel) -> None:
        if node.worker is not worker:
            return
        self._report(node, worker, worker.take(command))
        if isinstance(command, Pull):
            self._pulled(node, worker, (command.request_id, command.attempt))
        elif isinstance(command, GIVES_BACK):
            node.moves.pop((command.request_id, command.attempt), None)
        self._kick(node, worker)

    def _report(
        self, node: Node, worker: SimulatedWorker, events: Sequence[InstanceEvent], plan: StepPlan | None = None
    ) -> None:
        """One message to the router, behind those sent before it; `plan` if it reports a step."""
        if not events:
            return
        load = worker.load() if plan is None else worker.load(step_s=node.step_s, step_tokens=plan.tokens)
        step = Step(instance=node.spec.name, generation=worker.generation, events=tuple(events), load=load)
        at_s = self.now_s + self._network.message_s
        if self._faults.drop_rate and self._rng.random() < self._faults.drop_rate:
            at_s += self._faults.resend_s
        node.last_delivery_s = max(at_s, node.last_delivery_s)
        self._at(node.last_delivery_s, lambda: self._tell_router(step))

    def _kick(self, node: Node, worker: SimulatedWorker) -> None:
        """Begins the next step unless one runs or there is nothing to do."""
        if node.stepping or node.worker is not worker:
            return
        plan, offers = worker.begin()
        if offers:
            self._report(node, worker, offers)
        if plan is None:
            return
        node.step_s = self._models[node.spec.role].step_s(**worker.cost_of(plan))
        if self._faults.slow:
            node.step_s *= self._slowness(node.spec.name)
        node.stepping = True
        self._at(self.now_s + node.step_s, lambda: self._stepped(node, worker, plan))

    def _slowness(self, instance: str) -> float:
        factor = 1.0
        for slow in self._faults.slow:
            if slow.instance == instance and slow.from_s <= self.now_s < slow.to_s:
                factor *= slow.factor
        return factor

    def _stepped(self, node: Node, worker: SimulatedWorker, plan: StepPlan) -> None:
        if node.worker is not worker:
            return
        node.stepping = False
        self._report(node, worker, worker.finish(plan), plan)
        self._kick(node, worker)

    def _pulled(self, node: Node, worker: SimulatedWorker, key: Key) -> None:
        """A Pull was taken: more can be copied; with the seal, the end of the copy is known."""
        sequence = worker.sequences.get(key)
        if sequence is None or sequence.phase != "pulling":
            return
        move = node.moves.setdefault(key, Move(at_s=self.now_s, begun_s=self.now_s))
        tokens_per_s = self._network.bytes_per_s / node.spec.bytes_per_token / len(node.moves)
        move.advance(self.now_s, tokens_per_s)
        move.ready_tokens = sequence.ready_tokens
        if sequence.sealed and not move.ending:
            move.ending = True
            left_s = (sequence.context_tokens - move.copied_tokens) / tokens_per_s
            exposed_s = left_s + self._network.transfer_fixed_s
            self._at(self.now_s + exposed_s, lambda: self._moved(node, worker, sequence, move, exposed_s))

    def _moved(self, node: Node, worker: SimulatedWorker, sequence: Running, move: Move, exposed_s: float) -> None:
        if node.worker is not worker or node.moves.get(sequence.key) is not move:
            return
        del node.moves[sequence.key]
        name, generation = sequence.source.split("|")
        source = self.nodes[name].worker
        held = source is not None and source.generation == generation and sequence.key in source.sequences
        broken = self._faults.transfer_failure_rate and self._rng.random() < self._faults.transfer_failure_rate
        if not held:
            events = worker.fail_pull(sequence.key, code="lease_lost", reason="no such offer", retryable=False)
        elif broken:
            events = worker.fail_pull(sequence.key, code="transfer_failed", reason="simulated", retryable=True)
        else:
            events = worker.end_pull(sequence.key, seconds=self.now_s - move.begun_s, exposed_s=exposed_s)
        self._report(node, worker, events)
        self._kick(node, worker)
