"""A prefill, decode or mixed instance without an engine: RouterCore's commands in, the events of a real one out.

It plans its steps as the engines do and has no clock. A driver asks what the next step would compute (`begin`), lets
its time pass, and has it done (`finish`); it also says when a pull has ended. So the simulator and the property tests
share it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import nsmallest
from typing import Literal

from trtpd.errors import InternalError
from trtpd.perf.worker_spec import Truth, WorkerSpec, true_token
from trtpd.runtime.core.events import (
    Cancel,
    ChunkReady,
    Drained,
    InstanceEvent,
    Load,
    Offered,
    Pull,
    Rejected,
    Sealed,
    Submit,
    Tokens,
    TransferBegun,
    TransferDone,
    TransferFailed,
    Withdraw,
)
from trtpd.runtime.core.instance import blocks_for
from trtpd.runtime.engine.batching import PlanState, Prefilling, StepLimits, StepPlan, Waiting, due, plan_step

Key = tuple[int, int]
Phase = Literal["waiting", "prefilling", "held", "pulling", "joining", "decoding"]
PHASES: tuple[Phase, ...] = ("waiting", "prefilling", "held", "pulling", "joining", "decoding")
STEPPING = frozenset({"waiting", "prefilling", "joining", "decoding"})
"""Phases in which a step can do something for a sequence; the plan of one follows from these alone."""


@dataclass(slots=True, eq=False)
class Running:
    """One attempt on this instance. `next_index` is the output index of the next token it computes; `due`: see
    batching.due."""

    key: Key
    truth: Truth
    kind: Literal["context_only", "local", "pulled"]
    context_tokens: int
    next_index: int
    phase: Phase
    blocks: int
    due: int = 0
    done_tokens: int = 0
    kv_tokens: int = 0
    ready_tokens: int = 0
    sealed: bool = False
    source: str = ""

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens to compute here."""
        return 0 if self.kind == "pulled" else self.context_tokens - self.done_tokens


class SimulatedWorker:
    """One life of one instance: a restart is a new object. `truths` is shared with the driver, which fills
    it."""

    def __init__(
        self,
        spec: WorkerSpec,
        generation: str,
        truths: dict[int, Truth],
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.sequences: dict[Key, Running] = {}
        self.blocks_free = spec.kv_blocks
        self._truths = truths
        self._in: dict[Phase, dict[Key, Running]] = {phase: {} for phase in PHASES}
        self._held_blocks = 0
        self._queued_tokens = 0
        self._computed_tokens = 0
        self._decode_kv_tokens = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._set_aside_blocks = 0
        self._last_plan: StepPlan | None = None
        self._limits = StepLimits(
            max_step_tokens=spec.max_step_tokens, chunk_tokens=spec.chunk_tokens, max_batch=spec.max_batch
        )

    def _enter(self, sequence: Running) -> None:
        self.sequences[sequence.key] = sequence
        if sequence.phase in STEPPING:
            self._last_plan = None
        self._in[sequence.phase][sequence.key] = sequence
        self._queued_tokens += sequence.uncomputed_tokens

    def _move(self, sequence: Running, phase: Phase) -> None:
        """To another phase; the sums follow."""
        self._leave_phase(sequence)
        sequence.phase = phase
        if phase in STEPPING:
            self._last_plan = None
        self._in[phase][sequence.key] = sequence
        self._held_blocks += sequence.blocks if phase == "held" else 0
        self._decode_kv_tokens += sequence.kv_tokens if phase == "decoding" else 0

    def _leave_phase(self, sequence: Running) -> None:
        if sequence.phase in STEPPING:
            self._last_plan = None
        del self._in[sequence.phase][sequence.key]
        self._held_blocks -= sequence.blocks if sequence.phase == "held" else 0
        self._decode_kv_tokens -= sequence.kv_tokens if sequence.phase == "decoding" else 0

    def take(self, command: Submit | Pull | Withdraw | Cancel) -> list[InstanceEvent]:
        """Carries out a command as far as it needs no step."""
        if isinstance(command, Submit):
            return self._submit(command)
        if isinstance(command, Pull):
            return self._pull(command)
        key = (command.request_id, command.attempt)
        if key in self.sequences:
            self._free(key)
        return [Drained(request_id=command.request_id, attempt=command.attempt)]

    def _submit(self, command: Submit) -> list[InstanceEvent]:
        truth = self._truths[command.request_id]
        local = command.kind == "context_and_generation"
        context = truth.prompt_tokens + len(command.journal)
        total = truth.prompt_tokens + truth.max_tokens if local else context
        if total > min(self.spec.max_seq_tokens, self.spec.kv_blocks * self.spec.tokens_per_block):
            return [self._rejected(command, "invalid_argument", f"{total} tokens are too many", permanent=True)]
        key = (command.request_id, command.attempt)
        if key in self.sequences:
            raise InternalError(f"{self.spec.name} is given {key} twice")
        self._enter(
            Running(
                key=key,
                truth=truth,
                kind="local" if local else "context_only",
                context_tokens=context,
                next_index=len(command.journal),
                phase="waiting",
                due=due(self._computed_tokens, context),
                blocks=blocks_for(total, self.spec.tokens_per_block),
                done_tokens=self._cached_tokens(truth),
            )
        )
        return []

    def _cached_tokens(self, truth: Truth) -> int:
        """Of the prompt, and remembers it from now on: the blocks used last."""
        hits = 0
        while hits < len(truth.block_hashes) and truth.block_hashes[hits] in self._cache:
            hits += 1
        if self.spec.cache_blocks:
            for block in reversed(truth.block_hashes):
                self._cache[block] = None
                self._cache.move_to_end(block)
            while len(self._cache) > self.spec.cache_blocks:
                self._cache.popitem(last=False)
        return min(hits * self.spec.tokens_per_block, truth.prompt_tokens - 1)

    def _pull(self, command: Pull) -> list[InstanceEvent]:
        key = (command.request_id, command.attempt)
        sequence = self.sequences.get(key)
        events: list[InstanceEvent] = []
        if command.offer is not None:
            if sequence is not None:
                raise InternalError(f"{self.spec.name} is told to pull {key} twice")
            truth = self._truths[command.request_id]
            blocks = blocks_for(truth.prompt_tokens + truth.max_tokens, self.spec.tokens_per_block)
            if blocks > self.blocks_free - self._set_aside_blocks:
                reason = f"{blocks} blocks are needed, {self.blocks_free} are free"
                return [self._rejected(command, "capacity", reason)]
            self.blocks_free -= blocks
            sequence = Running(
                key=key,
                truth=truth,
                kind="pulled",
                context_tokens=truth.prompt_tokens + len(command.journal),
                next_index=len(command.journal) + 1,
                phase="pulling",
                blocks=blocks,
                source=command.offer.decode(),
            )
            self._enter(sequence)
            events.append(TransferBegun(request_id=command.request_id, attempt=command.attempt))
        if sequence is not None and sequence.phase == "pulling":
            for chunk in command.chunks:
                sequence.ready_tokens = int(chunk)
            if command.seal is not None:
                sequence.ready_tokens, sequence.sealed = sequence.context_tokens, True
        return events

    def end_pull(self, key: Key, *, seconds: float, exposed_s: float) -> list[InstanceEvent]:
        """The copy is complete: the sequence joins the batch as soon as there is a place."""
        sequence = self.sequences[key]
        sequence.kv_tokens = sequence.context_tokens
        self._move(sequence, "joining")
        return [
            TransferDone(
                request_id=key[0],
                attempt=key[1],
                bytes_moved=sequence.context_tokens * self.spec.bytes_per_token,
                chunks=-(-sequence.context_tokens // self.spec.chunk_tokens),
                seconds=seconds,
                exposed_s=exposed_s,
                path="sim",
            )
        ]

    def fail_pull(self, key: Key, *, code: str, reason: str, retryable: bool) -> list[InstanceEvent]:
        self._free(key)
        return [TransferFailed(request_id=key[0], attempt=key[1], code=code, reason=reason, retryable=retryable)]

    def lapse(self, key: Key) -> list[InstanceEvent]:
        """The lease of a held offer ends."""
        self._free(key)
        return [Drained(request_id=key[0], attempt=key[1])]

    def begin(self) -> tuple[StepPlan | None, list[InstanceEvent]]:
        """What the next step computes (None if there is nothing to do) and the offers made by starting it."""
        inside = self._in
        if self._last_plan is not None:
            return self._last_plan, []
        if not (inside["decoding"] or inside["prefilling"] or inside["waiting"] or inside["joining"]):
            self._set_aside_blocks = 0
            return None, []
        plan = plan_step(self._plan_state(), self._limits)
        self._set_aside_blocks = plan.short_blocks
        for key in plan.joined:
            self._move(self.sequences[key], "decoding")
        offers: list[InstanceEvent] = []
        for key in plan.admitted:
            sequence = self.sequences[key]
            self.blocks_free -= sequence.blocks
            self._move(sequence, "prefilling")
            if sequence.kind == "context_only":
                offers.append(self._offered(sequence))
        # Nothing but decodes, and nobody waits: the next step is the same until somebody comes or goes.
        if plan.decodes and not plan.prefills and not inside["waiting"] and not inside["joining"]:
            self._last_plan = plan
        return (plan if plan.tokens else None), offers

    def _plan_state(self) -> PlanState:
        inside = self._in
        return PlanState(
            decoding=tuple(inside["decoding"]),
            joining=tuple(inside["joining"]),
            prefilling=[
                Prefilling(key=s.key, prompt_tokens=s.context_tokens, done_tokens=s.done_tokens, due=s.due)
                for s in inside["prefilling"].values()
            ],
            waiting=[
                Waiting(key=s.key, prompt_tokens=s.context_tokens, peak_blocks=s.blocks, due=s.due)
                for s in nsmallest(self._limits.max_running, inside["waiting"].values(), key=lambda s: s.due)
            ],
            available_blocks=self.blocks_free,
        )

    def finish(self, plan: StepPlan) -> list[InstanceEvent]:
        """Does the step. What was cancelled meanwhile is left out."""
        events: list[InstanceEvent] = []
        sequences = self.sequences
        for key in plan.decodes:
            sequence = sequences.get(key)
            if sequence is None:
                continue
            sequence.kv_tokens += 1
            self._decode_kv_tokens += 1
            index, truth = sequence.next_index, sequence.truth
            if index + 1 >= truth.output_tokens:
                events.append(self._next_token(sequence))
                continue
            sequence.next_index = index + 1
            ids = (true_token(truth.request_id, index),)
            events.append(Tokens(request_id=key[0], attempt=key[1], first_index=index, ids=ids))
        for part in plan.prefills:
            sequence = self.sequences.get(part.key)
            if sequence is not None:
                events += self._prefilled(sequence, part.tokens)
        return events

    def _prefilled(self, sequence: Running, tokens: int) -> list[InstanceEvent]:
        sequence.done_tokens += tokens
        self._queued_tokens -= tokens
        self._computed_tokens += tokens
        request_id, attempt = sequence.key
        events: list[InstanceEvent] = []
        if self.spec.capabilities.chunk_events:
            done = sequence.done_tokens
            events.append(
                ChunkReady(request_id=request_id, attempt=attempt, ready_tokens=done, chunk=str(done).encode())
            )
        if sequence.done_tokens < sequence.context_tokens:
            return events
        sequence.kv_tokens = sequence.context_tokens
        if sequence.kind == "local":
            self._move(sequence, "decoding")
            return [*events, self._next_token(sequence)]
        self._move(sequence, "held")
        truth, index = sequence.truth, sequence.next_index
        sealed = Sealed(
            request_id=request_id,
            attempt=attempt,
            first_index=index,
            token=true_token(request_id, index),
            log_prob=None,
            finish=truth.finish if index + 1 >= truth.output_tokens else None,
            seal=b"seal",
        )
        return [*events, sealed]

    def _next_token(self, sequence: Running) -> Tokens:
        truth, index = sequence.truth, sequence.next_index
        sequence.next_index += 1
        last = index + 1 >= truth.output_tokens
        if last:
            self._free(sequence.key)
        return Tokens(
            request_id=sequence.key[0],
            attempt=sequence.key[1],
            first_index=index,
            ids=(true_token(truth.request_id, index),),
            finish=truth.finish if last else None,
        )

    def _offered(self, sequence: Running) -> Offered:
        return Offered(
            request_id=sequence.key[0],
            attempt=sequence.key[1],
            blocks=sequence.blocks,
            lease_s=30.0,
            offer=f"{self.spec.name}|{self.generation}".encode(),
        )

    def _rejected(self, command: Submit | Pull, code: str, reason: str, *, permanent: bool = False) -> Rejected:
        return Rejected(
            request_id=command.request_id,
            attempt=command.attempt,
            code=code,
            reason=reason,
            permanent=permanent,
        )

    def _free(self, key: Key) -> None:
        sequence = self.sequences.pop(key)
        self._leave_phase(sequence)
        self._queued_tokens -= sequence.uncomputed_tokens
        if sequence.phase != "waiting":
            self.blocks_free += sequence.blocks

    def cost_of(self, plan: StepPlan) -> dict[str, int]:
        """The plan as the arguments of `StepTimeModel.step_s`, before it is done."""
        if not plan.prefills:
            return self._decode_cost(len(plan.decodes))
        parts = [(part.tokens, self.sequences[part.key].done_tokens) for part in plan.prefills]
        return {
            "n_prefill": len(parts),
            "prefill_tokens": sum(tokens for tokens, _ in parts),
            "prefill_kv_tokens": sum(done + tokens // 2 for tokens, done in parts),
            "n_decode": len(plan.decodes),
            "decode_kv_tokens": self._decode_kv_tokens,
        }

    def _decode_cost(self, n_decode: int) -> dict[str, int]:
        return {
            "n_prefill": 0,
            "prefill_tokens": 0,
            "prefill_kv_tokens": 0,
            "n_decode": n_decode,
            "decode_kv_tokens": self._decode_kv_tokens,
        }

    def load(self, *, step_s: float = 0.0, step_tokens: int = 0) -> Load:
        """`step_s` and `step_tokens` are of the step that is reported, if one is."""
        inside = self._in
        return Load(
            kv_blocks_free=self.blocks_free,
            kv_blocks_held=self._held_blocks,
            running=len(inside["prefilling"]) + len(inside["decoding"]),
            waiting=len(inside["waiting"]) + len(inside["joining"]),
            queued_tokens=self._queued_tokens,
            step_s=step_s,
            step_tokens=step_tokens,
            cached_blocks=len(self._cache),
        )
