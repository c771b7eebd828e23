"""What is in each step of an engine, and what it takes: cells measured in the terms of StepTimeModel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trtpd.perf.engine_runs import DECODE_STEPS, EngineRuns, key_of
from trtpd.perf.measured import Cell, Measured, TimedStep
from trtpd.runtime.core.events import Tokens
from trtpd.runtime.engine.base import Engine, Key, PrefillBegan, PrefillChunk, PrefillDone, StepReport


@dataclass(slots=True)
class _Prompts:
    """Prompts under way: how long each is, and how much of it is there."""

    lengths: dict[Key, int]
    done: dict[Key, int] = field(default_factory=dict)

    @property
    def computed(self) -> bool:
        return all(self.done.get(key) == length for key, length in self.lengths.items())

    def take(self, report: StepReport) -> list[tuple[int, int]]:
        """(where it began, its tokens) of each chunk that the report's step computed."""
        chunks = []
        for event in report.events:
            key = key_of(event)
            if key not in self.lengths:
                continue
            if isinstance(event, PrefillBegan):
                self.done[key] = event.cached_tokens
            elif isinstance(event, PrefillChunk | PrefillDone):
                start = self.done.get(key, 0)
                ready = event.ready_tokens if isinstance(event, PrefillChunk) else self.lengths[key]
                if ready > start:
                    chunks.append((start, ready - start))
                    self.done[key] = ready
        return chunks


class StepMeter:
    """Measures cells on `engine`, which nobody else uses, by its own account of its steps. An engine that doesn't say
    how far a prompt is, is measured by the clock: a prompt counts as one step."""

    def __init__(self, engine: Engine, *, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runs = EngineRuns(engine, seed=seed, clock=clock)
        self._by_step = engine.capabilities.chunk_events
        self._prefixes: dict[int, tuple[int, ...]] = {}

    def __call__(self, cell: Cell) -> Measured:
        """See Measure; with steps. Raises CapacityError if the engine can't hold the cell, EngineError if a step
        failed."""
        self._runs.check(cell)
        if cell.kind == "decode":
            steps = [self._decode(cell) if self._by_step else self._decode_by_clock(cell)]
        else:
            steps = self._prefill(cell) if self._by_step else [self._prefill_by_clock(cell)]
        return Measured(seconds=sum(step.seconds for step in steps), steps=tuple(steps))

    def _prefill(self, cell: Cell) -> list[TimedStep]:
        """Of steps that compute a prefix that is not in a cache nothing is told."""
        decoding = self._decoding(cell.beside, cell.context_tokens)
        prompts = self._begin(cell)
        began_s = self._runs.clock()
        steps: list[TimedStep] = []
        while not prompts.computed:
            report = self._runs.poll(began_s)
            decoded = decoding.take(report)
            chunks = prompts.take(report)
            if report.load.step_tokens and chunks and min(chunks)[0] >= cell.prefix_tokens:
                steps.append(_timed(report.load.step_s, chunks, decoded))
        self._runs.end([*prompts.lengths, *decoding.running])
        return steps

    def _prefill_by_clock(self, cell: Cell) -> TimedStep:
        prompts = self._begin(cell)
        began_s = self._runs.clock()
        while not prompts.computed:
            prompts.take(self._runs.poll(began_s))
        seconds = self._runs.clock() - began_s
        self._runs.end(prompts.lengths)
        return _timed(seconds, [(cell.prefix_tokens, cell.tokens)] * cell.batch, [])

    def _begin(self, cell: Cell) -> _Prompts:
        prefix = self._prefix(cell.prefix_tokens)
        keys = [self._runs.prefill(prefix + self._runs.tokens(cell.tokens)) for _ in range(cell.batch)]
        return _Prompts(dict.fromkeys(keys, cell.prefix_tokens + cell.tokens))

    def _prefix(self, tokens: int) -> tuple[int, ...]:
        """Always the same for one length, and computed once, so that a prefix cache has it."""
        if tokens and tokens not in self._prefixes:
            self._prefixes[tokens] = self._runs.tokens(tokens)
            prompts = _Prompts({self._runs.prefill(self._prefixes[tokens]): tokens})
            began_s = self._runs.clock()
            while not prompts.computed:
                prompts.take(self._runs.poll(began_s))
            self._runs.end(prompts.lengths)
        return self._prefixes.get(tokens, ())

    def _decode(self, cell: Cell) -> TimedStep:
        """The median over some steps. The first is not among them: it takes the sequences in."""
        decoding = self._decoding(cell.batch, cell.tokens)
        began_s = self._runs.clock()
        seconds: list[float] = []
        kv_tokens: list[int] = []
        while len(seconds) < DECODE_STEPS:
            report = self._runs.poll(began_s)
            decoded = decoding.take(report)
            if len(decoded) == cell.batch:
                seconds.append(report.load.step_s)
                kv_tokens.append(sum(decoded))
        self._runs.end(decoding.running)
        return _decode_step(cell, float(np.median(seconds)), float(np.median(kv_tokens)))

    def _decode_by_clock(self, cell: Cell) -> TimedStep:
        """From when all have begun until one has written all it is asked for. Its KV is its own: it can't be filled
        with made-up values where the engine moves it by itself."""
        decoding = _Decoding({self._runs.generate(cell.tokens): 0 for _ in range(cell.batch)}, cell.tokens)
        began_s = self._runs.clock()
        first_s: float | None = None
        before = 0
        while max(decoding.written.values()) < DECODE_STEPS + 2:
            decoding.take(self._runs.poll(began_s))
            if first_s is None and min(decoding.written.values()) > 0:
                first_s, before = self._runs.clock(), sum(decoding.written.values())
        now_s = self._runs.clock()
        steps = max(1.0, (sum(decoding.written.values()) - before) / cell.batch)
        self._runs.end(decoding.running)
        seconds = (now_s - (began_s if first_s is None else first_s)) / steps
        return _decode_step(cell, seconds, cell.batch * (cell.tokens + DECODE_STEPS / 2))

    def _decoding(self, sequences: int, context_tokens: int) -> _Decoding:
        """So many that have begun to decode."""
        decoding = _Decoding({self._runs.decode(context_tokens): 0 for _ in range(sequences)}, context_tokens)
        began_s = self._runs.clock()
        while decoding.written and min(decoding.written.values()) == 0:
            decoding.take(self._runs.poll(began_s))
        return decoding


@dataclass(slots=True)
class _Decoding:
    """Sequences that decode: how many tokens each has written behind its context. `running`: those that write on."""

    written: dict[Key, int]
    context_tokens: int
    running: set[Key] = field(init=False)

    def __post_init__(self) -> None:
        self.running = set(self.written)

    def take(self, report: StepReport) -> list[int]:
        """Of each that the report's step decoded: how many tokens it attended to."""
        attended = []
        for event in report.events:
            key = key_of(event)
            if isinstance(event, Tokens) and key in self.written:
                self.written[key] += len(event.ids)
                if event.finish is not None:
                    self.running.discard(key)
                attended.append(self.context_tokens + self.written[key])
        return attended


def _timed(seconds: float, chunks: list[tuple[int, int]], decoded: list[int]) -> TimedStep:
    return TimedStep(
        n_prefill=len(chunks),
        prefill_tokens=sum(tokens for _, tokens in chunks),
        prefill_kv_tokens=sum(start + tokens // 2 for start, tokens in chunks),
        n_decode=len(decoded),
        decode_kv_tokens=sum(decoded),
        seconds=seconds,
    )


def _decode_step(cell: Cell, seconds: float, kv_tokens: float) -> TimedStep:
    return TimedStep(n_decode=cell.batch, decode_kv_tokens=round(kv_tokens), seconds=seconds)
