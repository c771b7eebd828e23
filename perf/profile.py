"""Measures a loaded engine through its seam: seconds of a prefill and of a decode step.

    python -m trtpd.perf.profile SETUP        (started by engine_bench and role_gain)

`trtpd build --tune` is handed `engine_measure`, which does so in a process of its own for each engine it tries.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from trtpd.build.search import Trial
from trtpd.errors import CapacityError, EngineError
from trtpd.perf.measured import Cell, Measure, Side, answer
from trtpd.runtime.core.events import Drained, Rejected
from trtpd.runtime.engine.base import Engine, EngineRequest, Key, PrefillDone, RequestKind, Sampling
from trtpd.runtime.engine.factory import load_engine

DECODE_STEPS = 12
GIVE_UP_S = 600.0


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """An engine directory to load, and the CPUs to keep to (empty: the engine's own)."""

    directory: str
    cores: tuple[int, ...] = ()
    seed: int = 0


class EngineMeter:
    """Drives `engine`, which nobody else uses. Prompts are random and never repeat, so that no prefix is reused."""

    def __init__(self, engine: Engine, *, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._ids = itertools.count()

    def __call__(self, cell: Cell) -> float:
        """See Measure. Raises CapacityError if the engine can't hold the cell, EngineError if a step failed."""
        limits = self._engine.limits
        needed = cell.batch * -(-(cell.tokens + DECODE_STEPS + 4) // limits.tokens_per_block)
        if needed > limits.kv_blocks or cell.tokens + DECODE_STEPS + 4 > limits.max_seq_tokens:
            raise CapacityError(
                f"{cell.name} needs {needed} KV blocks and sequences of {cell.tokens + DECODE_STEPS + 4} tokens; this "
                f"engine has {limits.kv_blocks} and {limits.max_seq_tokens}: measure less, or build with more kv_tokens"
            )
        return self._prefill_s(cell) if cell.kind == "prefill" else self._decode_step_s(cell)

    def _prefill_s(self, cell: Cell) -> float:
        keys = [self._submit(cell, RequestKind.CONTEXT_ONLY) for _ in range(cell.batch)]
        began_s = self._clock()
        left = set(keys)
        while left:
            for event in self._poll(began_s):
                if isinstance(event, PrefillDone):
                    left.discard((event.request_id, event.attempt))
        seconds = self._clock() - began_s
        self._end(keys)
        return seconds

    def _decode_step_s(self, cell: Cell) -> float:
        """The median over some steps, the first of which isn't counted: it admits the sequences."""
        keys = [self._submit(cell, RequestKind.GENERATION_ONLY) for _ in range(cell.batch)]
        began_s = self._clock()
        steps: list[float] = []
        while len(steps) <= DECODE_STEPS:
            before_s = self._clock()
            if self._poll(began_s):
                steps.append(self._clock() - before_s)
        self._end(keys)
        return float(np.median(steps[1:]))

    def _submit(self, cell: Cell, kind: RequestKind) -> Key:
        prompt = tuple(self._rng.integers(0, self._engine.limits.vocab_size, cell.tokens).tolist())
        decodes = kind is RequestKind.GENERATION_ONLY
        key = (next(self._ids), 1)
        if decodes and self._engine.kv is not None:
            self._engine.kv.reserve(key, cell.tokens, peak_tokens=cell.tokens + DECODE_STEPS + 4)
        request = EngineRequest(
            request_id=key[0],
            attempt=key[1],
            kind=kind,
            prompt_ids=prompt,
            max_tokens=DECODE_STEPS + 4 if decodes else 1,
            sampling=Sampling(),
            first_token=prompt[0] if decodes else None,
        )
        self._engine.submit(request)
        return key

    def _poll(self, began_s: float) -> tuple[object, ...]:
        if self._clock() - began_s > GIVE_UP_S:
            raise EngineError(f"the engine did not finish within {GIVE_UP_S:g} s: measure less")
        events = self._engine.poll(1.0).events
        for event in events:
            if isinstance(event, Rejected):
                raise EngineError(f"a step failed while it was measured: {event.reason}")
        return events

    def _end(self, keys: list[Key]) -> None:
        for key in keys:
            self._engine.cancel(key)
        left, began_s = set(keys), self._clock()
        while left:
            for event in self._poll(began_s):
                if isinstance(event, Drained):
                    left.discard((event.request_id, event.attempt))


@contextmanager
def measured_engine(directory: Path, *, cores: tuple[int, ...] = ()) -> Iterator[Side]:
    """The engine in `directory`, loaded in a process of its own."""
    with Side("trtpd.perf.profile", EngineSetup(directory=str(directory), cores=cores)) as side:
        yield side


def engine_measure(directory: Path, trial: Trial) -> float:
    """Measures one trial of `trtpd build --tune`: see MeasureEngine."""
    cell = Cell(kind=trial.kind, tokens=trial.tokens, batch=trial.batch)
    with measured_engine(directory) as side:
        side.measure(cell)
        return min(side.measure(cell) for _ in range(2))


def main() -> int:
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    engines: list[Engine] = []

    def load() -> Measure:
        engine = load_engine(Path(setup.directory), pool_name=f"trtpd-measure-{os.getpid()}", generation="measure")
        engines.append(engine)
        return EngineMeter(engine, seed=setup.seed)

    try:
        return answer(load, setup.cores)
    finally:
        for engine in engines:
            engine.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
