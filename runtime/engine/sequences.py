"""SequenceTable: the requests an engine has, what stage each is in, and the blocks that go with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from trtpd.errors import InternalError
from trtpd.runtime.core.events import FinishReason, Load
from trtpd.runtime.engine.base import EngineRequest, Key, RequestKind
from trtpd.runtime.engine.batching import PlanState, Prefilling, Waiting
from trtpd.runtime.engine.paging import EngineKV


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
    """One request. `ids` are the prompt and what followed; the KV of the first `done_tokens` of them is
    there."""

    request: EngineRequest
    ids: list[int]
    done_tokens: int
    peak_tokens: int

    @property
    def key(self) -> Key:
        return self.request.key

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def next_index(self) -> int:
        """Output index of the next token to be drawn."""
        return self.request.first_index + len(self.ids) - self.prompt_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return max(self.prompt_tokens - self.done_tokens, 0)

    def append(self, token: int, *, max_seq_tokens: int) -> FinishReason | None:
        """Takes a drawn token; says whether and why it ends the answer."""
        self.ids.append(token)
        if token in self.request.sampling.end_ids:
            return "stop"
        full = len(self.ids) >= max_seq_tokens
        return "length" if full or self.next_index >= self.request.max_tokens else None


class SequenceTable:
    """Every accepted request is in exactly one stage; from admission on it has blocks in `kv`."""

    def __init__(self, kv: EngineKV) -> None:
        self._kv = kv
        self._stages: dict[Stage, dict[Key, Running]] = {stage: {} for stage in Stage}
        self._queued_tokens = 0

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
        sequence = Running(request, list(request.prompt_ids), 0, peak_tokens)
        if request.kind is not RequestKind.GENERATION_ONLY:
            self._stages[Stage.WAITING][request.key] = sequence
            self._queued_tokens += sequence.prompt_tokens
            return
        assert request.first_token is not None, "check_request lets no generation_only pass without"
        self._kv.claim(request.key, tokens=sequence.prompt_tokens, peak_tokens=peak_tokens)
        sequence.ids.append(request.first_token)
        sequence.done_tokens = sequence.prompt_tokens
        self._stages[Stage.JOINING][request.key] = sequence

    def admit(self, key: Key) -> tuple[int, ...]:
        """Gives a waiting request its blocks: those of its prompt are returned, the rest is promised."""
        sequence = self._stages[Stage.WAITING][key]
        blocks = self._kv.admit(key, tokens=sequence.prompt_tokens, peak_tokens=sequence.peak_tokens)
        self.move(key, Stage.WAITING, Stage.PREFILLING)
        return blocks

    def move(self, key: Key, old: Stage, new: Stage) -> None:
        self._stages[new][key] = self._stages[old].pop(key)

    def computed(self, sequence: Running, tokens: int) -> None:
        """The KV of `tokens` more tokens is there."""
        before = sequence.uncomputed_tokens
        sequence.done_tokens += tokens
        self._queued_tokens -= before - sequence.uncomputed_tokens

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

    def plan_state(self, *, waiting_at_most: int) -> PlanState:
        prefilling = self._stages[Stage.PREFILLING].values()
        waiting = islice(self._stages[Stage.WAITING].values(), waiting_at_most)
        blocks_for = self._kv.layout.blocks_for
        return PlanState(
            decoding=tuple(self._stages[Stage.DECODING]),
            joining=tuple(self._stages[Stage.JOINING]),
            prefilling=[
                Prefilling(key=s.key, prompt_tokens=s.prompt_tokens, done_tokens=s.done_tokens) for s in prefilling
            ],
            waiting=[
                Waiting(key=s.key, prompt_tokens=s.prompt_tokens, peak_blocks=blocks_for(s.peak_tokens))
                for s in waiting
            ],
            available_blocks=self._kv.available_blocks,
        )

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
