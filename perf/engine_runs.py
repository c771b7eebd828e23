"""Requests of one's own on an engine that nobody else uses: begun, followed step by step, and ended without a trace."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from trtpd.errors import CapacityError, EngineError
from trtpd.perf.measured import Cell
from trtpd.runtime.core.events import Drained, Rejected
from trtpd.runtime.engine.base import (
    Engine,
    EngineEvent,
    EngineRequest,
    Key,
    RequestKind,
    Sampling,
    StepReport,
)

DECODE_STEPS = 12
"""Steps a decode is measured over."""

SPARE_TOKENS = 4
GROWTH_TOKENS = DECODE_STEPS + SPARE_TOKENS
GIVE_UP_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a cell takes of an engine: KV blocks in all, and the tokens of its longest sequence."""

    kv_blocks: int
    seq_tokens: int

    def fit(self, *, kv_blocks: int, max_seq_tokens: int) -> bool:
        return self.kv_blocks <= kv_blocks and self.seq_tokens <= max_seq_tokens


def needs_of(cell: Cell, tokens_per_block: int) -> Needs:
    """With what is written behind the cell's prompts and contexts while it is measured."""
    own, beside = cell.prefix_tokens + cell.tokens + GROWTH_TOKENS, cell.context_tokens + GROWTH_TOKENS
    blocks = cell.batch * -(-own // tokens_per_block) + cell.beside * -(-beside // tokens_per_block)
    return Needs(kv_blocks=blocks, seq_tokens=max(own, beside))


class EngineRuns:
    """Prompts are random and never repeat, so that no prefix is reused unless it is given."""

    def __init__(self, engine: Engine, *, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine = engine
        self.clock = clock
        self._rng = np.random.default_rng(seed)
        self._ids = itertools.count()

    def check(self, cell: Cell) -> None:
        """Raises CapacityError if the engine can't hold the cell."""
        limits = self.engine.limits
        needs = needs_of(cell, limits.tokens_per_block)
        if not needs.fit(kv_blocks=limits.kv_blocks, max_seq_tokens=limits.max_seq_tokens):
            raise CapacityError(
                f"{cell.name} needs {needs.kv_blocks} KV blocks and sequences of {needs.seq_tokens} tokens; this "
                f"engine has {limits.kv_blocks} and {limits.max_seq_tokens}: measure less, or build with more kv_tokens"
            )

    def tokens(self, count: int) -> tuple[int, ...]:
        """Of a prompt that was never asked before."""
        return tuple(self._rng.integers(0, self.engine.limits.vocab_size, count).tolist())

    def prefill(self, prompt: tuple[int, ...]) -> Key:
        """Begins a prefill."""
        return self._submit(prompt, RequestKind.CONTEXT_ONLY, max_tokens=1)

    def decode(self, context_tokens: int) -> Key:
        """Begins to decode DECODE_STEPS tokens and a few more behind so many that were never computed."""
        return self._submit(self.tokens(context_tokens), RequestKind.GENERATION_ONLY, max_tokens=GROWTH_TOKENS)

    def generate(self, prompt_tokens: int) -> Key:
        """As `decode`, the prompt being computed first."""
        return self._submit(self.tokens(prompt_tokens), RequestKind.CONTEXT_AND_GENERATION, max_tokens=GROWTH_TOKENS)

    def _submit(self, prompt: tuple[int, ...], kind: RequestKind, *, max_tokens: int) -> Key:
        decodes = kind is RequestKind.GENERATION_ONLY
        key = (next(self._ids), 1)
        if decodes and self.engine.kv is not None:
            self.engine.kv.reserve(key, len(prompt), peak_tokens=len(prompt) + max_tokens)
        self.engine.submit(
            EngineRequest(
                request_id=key[0],
                attempt=key[1],
                kind=kind,
                prompt_ids=prompt,
                max_tokens=max_tokens,
                sampling=Sampling(),
                first_token=prompt[0] if decodes else None,
                reuse=not decodes,
            )
        )
        return key

    def poll(self, began_s: float) -> StepReport:
        """The engine's next step. Raises EngineError if it failed, or nothing has ended since `began_s` for long."""
        if self.clock() - began_s > GIVE_UP_S:
            raise EngineError(f"the engine did not finish within {GIVE_UP_S:g} s: measure less")
        report = self.engine.poll(1.0)
        for event in report.events:
            if isinstance(event, Rejected):
                raise EngineError(f"a step failed while it was measured: {event.reason}")
        return report

    def end(self, keys: Iterable[Key]) -> None:
        """Ends them; the engine holds nothing of them afterwards. For keys that have not ended."""
        left, began_s = set(keys), self.clock()
        for key in left:
            self.engine.cancel(key)
        while left:
            for event in self.poll(began_s).events:
                if isinstance(event, Drained):
                    left.discard(key_of(event))


def key_of(event: EngineEvent) -> Key:
    return (event.request_id, event.attempt)
