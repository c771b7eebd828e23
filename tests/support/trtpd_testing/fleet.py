"""RouterCore against simulated workers with every message in hand: each may be late, repeated or lost with its peer."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from trtpd.perf.outcome import Outcome
from trtpd.perf.simulated_worker import Running, SimulatedWorker
from trtpd.perf.worker_spec import Truth, WorkerSpec, true_token
from trtpd.runtime.core.events import (
    Arrived,
    Cancel,
    Emit,
    Event,
    Finish,
    InstanceEvent,
    Lost,
    Pull,
    Refuse,
    Rejected,
    Step,
    Submit,
    Tick,
    WakeAt,
    Withdraw,
)
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore
from trtpd_testing.order import check_order


class Peer:
    """One instance: its present life (None while dead) and the messages under way in both directions."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.worker: SimulatedWorker | None = None
        self.lives = 0
        self.known_up = False
        self.to_worker: deque[Submit | Pull | Withdraw | Cancel] = deque()
        self.to_router: deque[Step] = deque()


class Fleet:
    """Moves nothing by itself. Checks every invariant of the router after each event, who was served before whom, and
    every token. `reached` counts events, answers and commands by their kind."""

    def __init__(self, specs: Sequence[WorkerSpec], *, policy: Policy | None = None, seed: int = 0) -> None:
        self.core = RouterCore(policy, seed=seed)
        self.now_s = 0.0
        self.reached: Counter[str] = Counter()
        self.peers = {spec.name: Peer(spec) for spec in specs}
        self.truths: dict[int, Truth] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.stopped: set[int] = set()
        self.past: list[Step] = []
        self.wakes: list[float] = []
        self.slowness: dict[str, float] = {}
        for name in self.peers:
            self.start(name)

    def tell(self, event: Event) -> None:
        commands = self.core.handle(self.now_s, event)
        self.core.check_integrity()
        check_order(self.core._books, commands)
        self.reached["events"] += 1
        answers = event.events if isinstance(event, Step) else ()
        self.reached.update(type(one).__name__ for one in (event, *answers, *commands))
        for command in commands:
            if isinstance(command, Submit | Pull | Withdraw | Cancel):
                peer = self.peers[command.instance]
                assert peer.known_up, f"{command} goes to an instance that is lost"
                if peer.worker is not None:
                    peer.to_worker.append(command)
            elif isinstance(command, Emit):
                assert command.ids == tuple(
                    true_token(command.request_id, command.first_index + offset) for offset in range(len(command.ids))
                )
                self.outcomes[command.request_id].emitted(command, self.now_s)
            elif isinstance(command, Finish | Refuse):
                self.outcomes[command.request_id].end(command, self.now_s)
            elif isinstance(command, WakeAt):
                assert command.at_s >= self.now_s
                self.wakes.append(command.at_s)

    def arrive(self, prompt_tokens: int, max_tokens: int, output_tokens: int, *, timeout_s: float, **more: Any) -> None:
        request_id = len(self.truths)
        self.truths[request_id] = Truth(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            output_tokens=min(output_tokens, max_tokens),
        )
        self.outcomes[request_id] = Outcome(request_id=request_id, arrived_s=self.now_s)
        self.tell(
            Arrived(
                request_id=request_id,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                deadline_s=self.now_s + timeout_s,
                **more,
            )
        )

    def pass_time(self, seconds: float) -> None:
        """Wake-ups that were asked for come in time; then a Tick at the end."""
        end_s = self.now_s + seconds
        while self.wakes and min(self.wakes) <= end_s:
            self.now_s = max(self.now_s, min(self.wakes))
            self.wakes.remove(min(self.wakes))
            self.tell(Tick())
        self.now_s = end_s
        self.tell(Tick())

    def start(self, name: str) -> None:
        """A new life, registered at once. The router need not have noticed the end of the former one."""
        peer = self.peers[name]
        self.kill(name)
        peer.lives += 1
        peer.worker = SimulatedWorker(peer.spec, f"{name}#{peer.lives}", self.truths)
        peer.known_up = True
        self.tell(peer.spec.hello(peer.worker.generation))

    def kill(self, name: str) -> None:
        """What it sent may still be under way; what was sent to it is gone."""
        peer = self.peers[name]
        peer.worker = None
        peer.to_worker.clear()

    def notice(self, name: str) -> None:
        """The router learns that an instance's last life is over, rightly or not."""
        peer = self.peers[name]
        self.tell(Lost(instance=name, generation=f"{name}#{peer.lives}", reason="silent"))
        peer.known_up = False
        if peer.worker is not None:
            peer.to_worker.clear()
            peer.to_router.clear()

    def greet_again(self, name: str) -> None:
        """A living instance registers again with the same generation, its work untouched."""
        peer = self.peers[name]
        if peer.worker is not None:
            peer.known_up = True
            self.tell(peer.spec.hello(peer.worker.generation))

    def report(self, name: str, events: Sequence[InstanceEvent], *, step_tokens: int = 0) -> None:
        peer = self.peers[name]
        if events and peer.worker is not None:
            step_s = 0.05 * self.slowness.get(name, 1.0) if step_tokens else 0.0
            load = peer.worker.load(step_s=step_s, step_tokens=step_tokens)
            peer.to_router.append(
                Step(instance=name, generation=peer.worker.generation, events=tuple(events), load=load)
            )

    def deliver_command(self, name: str) -> None:
        peer = self.peers[name]
        if peer.worker is not None and peer.to_worker:
            self.report(name, peer.worker.take(peer.to_worker.popleft()))

    def deliver_step(self, name: str, *, twice: bool = False) -> None:
        peer = self.peers[name]
        if peer.to_router:
            step = peer.to_router.popleft()
            self.past.append(step)
            self.tell(step)
            if twice:
                self.tell(step)

    def run_step(self, name: str) -> None:
        worker = self.peers[name].worker
        if worker is None:
            return
        plan, offers = worker.begin()
        self.report(name, offers)
        if plan is not None:
            self.report(name, worker.finish(plan), step_tokens=plan.tokens)

    def pulling(self) -> list[tuple[str, Running]]:
        return self._in_phase("pulling")

    def held(self) -> list[tuple[str, Running]]:
        return self._in_phase("held")

    def _in_phase(self, phase: str) -> list[tuple[str, Running]]:
        return [
            (name, sequence)
            for name, peer in self.peers.items()
            if peer.worker is not None
            for sequence in peer.worker.sequences.values()
            if sequence.phase == phase
        ]

    def end_pull(self, name: str, sequence: Running, *, fail: bool) -> None:
        """A pull succeeds if it may (sealed, and the source still holds it), or fails."""
        worker = self.peers[name].worker
        assert worker is not None
        source_name, generation = sequence.source.split("|")
        source = self.peers[source_name].worker
        held = source is not None and source.generation == generation and sequence.key in source.sequences
        if fail or not held:
            events = worker.fail_pull(sequence.key, code="transfer_failed", reason="cut", retryable=held)
        elif sequence.sealed:
            events = worker.end_pull(sequence.key, seconds=0.1, exposed_s=0.05)
        else:
            return
        self.report(name, events)

    def give_up(self, name: str, pick: int, code: str) -> None:
        """An engine drops one of its sequences."""
        worker = self.peers[name].worker
        if worker is None or not worker.sequences:
            return
        key = list(worker.sequences)[pick % len(worker.sequences)]
        worker.lapse(key)
        self.report(name, [Rejected(request_id=key[0], attempt=key[1], code=code, reason="given up")])

    def settle(self, *, rounds: int = 1000) -> None:
        """Everything comes back up and runs until nothing is left anywhere."""
        for name, peer in self.peers.items():
            if peer.worker is None or not peer.known_up or self._draining(name):
                self.start(name)
        for _ in range(rounds):
            for name in self.peers:
                self.run_step(name)
            for name, sequence in self.pulling():
                self.end_pull(name, sequence, fail=False)
            for name, peer in self.peers.items():
                while peer.to_router:
                    self.deliver_step(name)
                while peer.to_worker:
                    self.deliver_command(name)
            if self.is_empty():
                return
            self.pass_time(0.5)
        raise AssertionError(f"not empty after {rounds} rounds: {self.core.snapshot()}")

    def tallies(self) -> Counter[str]:
        """What was reached, with what the router itself counted."""
        tally, found = self.core._books.tally, Counter(self.reached)
        named = ("finished", "failed", "refused", "retries", "placed", "shed", "moves", "rungs")
        for kind, counts in (("", tally.counts), *((f"{name}:", getattr(tally, name)) for name in named)):
            found.update({f"{kind}{name}": count for name, count in counts.items()})
        return found

    def _draining(self, name: str) -> bool:
        views = self.core.snapshot()["instances"]
        return any(view["name"] == name and view["state"] == "draining" for view in views)

    def is_empty(self) -> bool:
        snapshot = self.core.snapshot()
        quiet = not any(peer.to_worker or peer.to_router for peer in self.peers.values())
        idle = all(peer.worker is not None and not peer.worker.sequences for peer in self.peers.values())
        credits = any(view["in_flight"] + view["closing"] for view in snapshot["instances"])
        return quiet and idle and not credits and not snapshot["requests"]

    def check_ends(self) -> None:
        """Every request ended once, and what is called finished is whole; all KV is free."""
        for request_id, outcome in self.outcomes.items():
            assert outcome.state in ("finished", "failed", "cancelled", "refused"), outcome
            if outcome.state == "finished" and request_id not in self.stopped:
                truth = self.truths[request_id]
                assert len(outcome.tokens) == truth.output_tokens
                assert outcome.reason == truth.finish
        for peer in self.peers.values():
            assert peer.worker is not None
            assert peer.worker.blocks_free == peer.spec.kv_blocks
