"""SequenceTable: the requests an engine has, what stage each is in, and the blocks that go with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import nsmallest

from trtpd.errors import InternalError
from trtpd.runtime.core.events import FinishReason, Load
from trtpd.runtime.engine.base import EngineRequest, Key, RequestKind
from trtpd.runtime.engine.batching import PlanState, Prefilling, Waiting, due
from trtpd.runtime.engine.paging import EngineKV
from trtpd.runtime.engine.penalties import History
from trtpd.runtime.engine.sampling import needs_history


class Stage(Enum):
    """WAITING for blocks and a place · PREFILLING · JOINING: KV is here, waiting for a place · DECODING ·
    HELD after a prefill, until the engine is told to let go."""

    WAITING = auto()
    PREFILLING = auto()
    JOINING = auto()
    DECODING = auto()
    HELD = auto()


@dataclass(slots=True, eq=False)
class Running:
    """One request. `ids` are the prompt and what followed; the KV of the first `done_tokens` of them is there.

    `number` counts requests as they came; `due`: see batching.due. `context_tokens`: so many tokens are computed before
    the next is drawn: the prompt's, and after a preemption all there are. `cached_tokens` of the prompt were found in
    the prefix cache, None before its admission. `hashes` are those of its first full blocks, as far as they were
    needed; of `published` of these others may find the KV.
    """

    request: EngineRequest
    ids: list[int]
    done_tokens: int
    peak_tokens: int
    number: int
    context_tokens: int
    due: int = 0
    cached_tokens: int | None = None
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0
    history: History | None = None

    @property
    def key(self) -> Key:
        return self.request.key

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest one is preempted first: of the lowest priority the youngest."""
        return (self.request.priority, -self.number)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def next_index(self) -> int:
        """Output index of the next token to be drawn."""
        return self.request.first_index + len(self.ids) - self.prompt_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens still to be computed before the next is drawn from a prompt."""
        return max(self.context_tokens - self.done_tokens, 0)

    @property
    def preemptible(self) -> bool:
        """What is prefilled for others is not: it was offered to them as it lies."""
        return self.request.kind is not RequestKind.CONTEXT_ONLY

    def append(self, token: int, *, max_seq_tokens: int) -> FinishReason | None:
        """Takes a drawn token; says whether and why it ends the answer."""
        self.ids.append(token)
        if token in self.request.sampling.end_ids:
            return "stop"
        full = len(self.ids) >= max_seq_tokens
        return "length" if full or self.next_index >= self.request.max_tokens else None


def _running(request: EngineRequest, *, peak_tokens: int, number: int) -> Running:
    ids = list(request.prompt_ids)
    sequence = Running(request, ids, 0, peak_tokens, number, len(ids))
    if needs_history(request.sampling):
        users = len(ids) - request.first_index
        sequence.history = History(ids, prompt_tokens=users, sampling=request.sampling)
    return sequence


class SequenceTable:
    """Every accepted request is in exactly one stage; from admission on it has blocks in `kv`."""

    def __init__(self, kv: EngineKV) -> None:
        self._kv = kv
        self._stages: dict[Stage, dict[Key, Running]] = {stage: {} for stage in Stage}
        self._queued_tokens = 0
        self._computed_tokens = 0
        self._number = 0
        self._preemptions = 0

    def __contains__(self, key: Key) -> bool:
        return any(key in sequences for sequences in self._stages.values())

    def at(self, stage: Stage, key: Key) -> Running:
        return self._stages[stage][key]

    def is_held(self, key: Key) -> bool:
        return key in self._stages[Stage.HELD]

    @property
    def running(self) -> int:
        return len(self._stages[Stage.PREFILLING]) + len(self._stages[Stage.DECODING])

    def add(self, request: EngineRequest, *, peak_tokens: int) -> None:
        """A new request. Raises RequestError, and adds nothing, if it came by transfer to no reserved
        blocks."""
        self._number += 1
        sequence = _running(request, peak_tokens=peak_tokens, number=self._number)
        if request.kind is not RequestKind.GENERATION_ONLY:
            sequence.due = due(self._computed_tokens, sequence.context_tokens)
            self._stages[Stage.WAITING][request.key] = sequence
            self._queued_tokens += sequence.context_tokens
            return
        assert request.first_token is not None, "check_request lets no generation_only pass without"
        self._kv.claim(request.key, tokens=sequence.prompt_tokens, peak_tokens=peak_tokens)
        sequence.ids.append(request.first_token)
        self._stages[Stage.JOINING][request.key] = sequence
        sequence.done_tokens, sequence.cached_tokens = sequence.prompt_tokens, 0
        self._publish(sequence)

    def admit(self, key: Key) -> Running:
        """Gives a waiting request its blocks, those that hold the beginning of its tokens already among them; the
        rest is promised. Its last token is always computed anew, since the next one is drawn from it."""
        sequence = self._stages[Stage.WAITING][key]
        shared = self._cached(sequence)
        tokens = sequence.context_tokens
        self._kv.admit(key, tokens=tokens, peak_tokens=max(tokens, sequence.peak_tokens), shared=shared)
        self.move(key, Stage.WAITING, Stage.PREFILLING)
        sequence.published = len(shared)
        self._advance(sequence, len(shared) * self._kv.layout.tokens_per_block)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.done_tokens
        return sequence

    def _cached(self, sequence: Running) -> list[int]:
        if not (self._kv.caches and sequence.request.reuse):
            return []
        self._kv.hasher.extend(sequence.hashes, sequence.ids, tokens=sequence.context_tokens)
        full = (sequence.context_tokens - 1) // self._kv.layout.tokens_per_block
        return self._kv.cached(sequence.hashes[:full])

    def move(self, key: Key, old: Stage, new: Stage) -> None:
        self._stages[new][key] = self._stages[old].pop(key)

    def computed(self, sequence: Running, tokens: int) -> None:
        """The KV of `tokens` more tokens is there, and final: others may share what full blocks it fills."""
        self._computed_tokens += min(tokens, sequence.uncomputed_tokens)
        self._advance(sequence, tokens)
        self._publish(sequence)

    def _advance(self, sequence: Running, tokens: int) -> None:
        before = sequence.uncomputed_tokens
        sequence.done_tokens += tokens
        self._queued_tokens -= before - sequence.uncomputed_tokens

    def _publish(self, sequence: Running) -> None:
        full = sequence.done_tokens // self._kv.layout.tokens_per_block
        if full > sequence.published and self._kv.caches and sequence.request.reuse:
            self._kv.hasher.extend(sequence.hashes, sequence.ids, tokens=sequence.done_tokens)
            self._kv.publish(sequence.key, sequence.hashes[:full], first=sequence.published)
            sequence.published = full

    def make_room(self) -> list[Running]:
        """Grows the blocks of what decodes for its next token. Where there are none left, those of the lowest rank
        lose theirs and wait for others; they are returned.

        A sequence is preempted only for one of a higher rank or for want of its own next block, so the highest
        always gets on.
        """
        preempted: list[Running] = []
        decoding = self._stages[Stage.DECODING]
        for sequence in list(decoding.values()):
            while sequence.key in decoding and not self._kv.hold(sequence.key, len(sequence.ids)):
                victim = min(self._preemptible(), key=lambda candidate: candidate.rank)
                self._preempt(victim)
                preempted.append(victim)
        return preempted

    def _preemptible(self) -> Iterator[Running]:
        for stage in (Stage.PREFILLING, Stage.JOINING, Stage.DECODING):
            yield from (sequence for sequence in self._stages[stage].values() if sequence.preemptible)

    def _preempt(self, victim: Running) -> None:
        """Its tokens stay, its KV goes; it waits for blocks before all that were never preempted."""
        for stage in (Stage.PREFILLING, Stage.JOINING, Stage.DECODING):
            self._stages[stage].pop(victim.key, None)
        self._kv.release(victim.key)
        self._preemptions += 1
        self._queued_tokens += len(victim.ids) - victim.uncomputed_tokens
        victim.done_tokens = victim.published = 0
        victim.context_tokens, victim.due = len(victim.ids), 0
        self._stages[Stage.WAITING][victim.key] = victim

    def retire(self, key: Key) -> None:
        """Forgets a request and frees what it has."""
        for stage, sequences in self._stages.items():
            sequence = sequences.pop(key, None)
            if sequence is not None:
                self._queued_tokens -= sequence.uncomputed_tokens
                if stage is not Stage.WAITING:
                    self._kv.release(key)

    def clear(self) -> None:
        """Forgets all requests; their blocks go with the pool."""
        self._stages = {stage: {} for stage in Stage}
        self._queued_tokens = 0

    @property
    def growing_blocks(self) -> int:
        """Blocks that what runs may ask for next though they weren't promised: left to it, so that a newcomer isn't
        let in only to be preempted."""
        if not self._kv.may_run_out:
            return 0
        stages = (Stage.PREFILLING, Stage.JOINING, Stage.DECODING)
        running = [sequence for stage in stages for sequence in self._stages[stage].values()]
        return sum(self._kv.outgrows_promise(sequence.key, sequence.peak_tokens) for sequence in running)

    def plan_state(self, *, waiting_at_most: int) -> PlanState:
        prefilling = self._stages[Stage.PREFILLING].values()
        available_blocks = self._kv.available_blocks - self.growing_blocks
        return PlanState(
            decoding=tuple(self._stages[Stage.DECODING]),
            joining=tuple(self._stages[Stage.JOINING]),
            prefilling=[
                Prefilling(key=s.key, prompt_tokens=s.context_tokens, done_tokens=s.done_tokens, due=s.due)
                for s in prefilling
            ],
            waiting=list(self._first_in_line(waiting_at_most, available_blocks)),
            available_blocks=available_blocks,
        )

    def _first_in_line(self, at_most: int, available_blocks: int) -> Iterator[Waiting]:
        """Those that there are blocks for, and the first that there aren't for."""
        waiting = self._stages[Stage.WAITING].values()
        for sequence in nsmallest(at_most, waiting, key=lambda sequence: (sequence.due, sequence.number)):
            tokens = sequence.context_tokens
            peak_tokens, shared = max(tokens, sequence.peak_tokens), self._cached(sequence)
            blocks = self._kv.needed_blocks(tokens=tokens, peak_tokens=peak_tokens, shared=shared)
            yield Waiting(key=sequence.key, prompt_tokens=tokens, peak_blocks=blocks, due=sequence.due)
            available_blocks -= blocks
            if available_blocks < 0:
                return

    def load(self, *, step_s: float, step_tokens: int) -> Load:
        """Free blocks are those neither held nor promised to what runs: what a new request may count on."""
        return Load(
            kv_blocks_free=self._kv.available_blocks,
            kv_blocks_held=sum(len(self._kv.blocks_of(key)) for key in self._stages[Stage.HELD]),
            running=self.running,
            waiting=len(self._stages[Stage.WAITING]) + len(self._stages[Stage.JOINING]),
            queued_tokens=self._queued_tokens,
            step_s=step_s,
            step_tokens=step_tokens,
            preemptions=self._preemptions,
            cached_blocks=self._kv.cached_blocks,
            evicted=self._kv.take_evicted(),
        )

    def check_integrity(self) -> None:
        """Raises InternalError unless stages, blocks and counts agree."""
        keys = [key for sequences in self._stages.values() for key in sequences]
        if len(set(keys)) != len(keys):
            raise InternalError(f"a request is in two stages at once: {sorted(keys)}")
        admitted = [s for stage in Stage if stage is not Stage.WAITING for s in self._stages[stage].values()]
        self._kv.check_integrity(frozenset(s.key for s in admitted))
        for sequence in admitted:
            blocks = len(self._kv.blocks_of(sequence.key))
            if self._kv.layout.blocks_for(sequence.done_tokens) > blocks:
                raise InternalError(f"{sequence.key}: {sequence.done_tokens} tokens in {blocks} blocks")
        self._check_progress(self._stages[Stage.DECODING].values())
        if any(sequence.done_tokens for sequence in self._stages[Stage.WAITING].values()):
            raise InternalError("a request that waits for blocks has KV")
        queued = sum(s.uncomputed_tokens for sequences in self._stages.values() for s in sequences.values())
        if queued != self._queued_tokens:
            raise InternalError(f"{queued} prompt tokens are queued, {self._queued_tokens} were counted")

    @staticmethod
    def _check_progress(decoding: Iterable[Running]) -> None:
        for sequence in decoding:
            if sequence.done_tokens != len(sequence.ids) - 1:
                raise InternalError(
                    f"{sequence.key} decodes with KV of {sequence.done_tokens} of {len(sequence.ids)} tokens"
                )
