"""One executor over the parts that ranks compute, and what the ranks other than the first do.

Alone or in a group the same Part computes; a group tells it the step and gathers what all parts found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError, TrtpdError
from trtpd.kv_transfer.pool import PoolAddress, SharedPool
from trtpd.runtime.engine.batching import StepLimits
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.ranks import Array, Ranks
from trtpd.runtime.engine.sampling import Draw
from trtpd.runtime.engine.shell import ScheduledEngine
from trtpd.runtime.engine.steps import Step, StepWire


class Part(Protocol):
    """What one rank computes of every step."""

    def compute(self, step: Step) -> Array:
        """Computes the step and writes its KV: `[rows, width]`, a row for each piece that draws, in order, or one row
        that nobody asked for: gathering it shows that this rank is through. Raises EngineError if it can't."""

    def close(self) -> None:
        """Lets go of the KV pool's memory and everything else. Idempotent."""


DrawFrom = Callable[[list[Array], Sequence[DrawAt]], list[Draw]]
"""From every rank's rows to a draw for each that was asked for. Raises EngineError for rows that can't be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One rank of an engine, loaded. It owns `pool`. `widths` are those of every rank's rows."""

    part: Part
    pool: SharedPool
    draw_from: DrawFrom
    widths: Sequence[int]


class StepExecutor:
    """Executor by a part of this process and, in a group, those of the other ranks.

    In a group nothing may fail half: a part that can't compute a step ends the group. Results that were found but
    can't be used fail the step alone, as they do without a group.
    """

    def __init__(self, loaded: Loaded, *, ranks: Ranks | None = None, wire: StepWire | None = None) -> None:
        self._loaded = loaded
        self._ranks = ranks
        self._wire = wire

    def run(self, pieces: Sequence[Piece]) -> list[Draw | None]:
        """See Executor."""
        epochs = self._loaded.pool.epochs_of([piece.blocks[0] for piece in pieces])
        rows = self._compute(Step(pieces, epochs))
        asked = [piece.draw for piece in pieces if piece.draw is not None]
        draws = iter(self._loaded.draw_from(rows, asked))
        return [None if piece.draw is None else next(draws) for piece in pieces]

    def close(self) -> None:
        """See Executor. The other ranks end as well."""
        if self._ranks is not None:
            self._ranks.dismiss()
        self._loaded.part.close()

    def _compute(self, step: Step) -> list[Array]:
        if self._ranks is None or self._wire is None:
            return [self._loaded.part.compute(step)]
        self._ranks.tell(self._wire.pack(step), tokens=step.tokens)
        try:
            part = self._loaded.part.compute(step)
        except TrtpdError as error:
            self._ranks.abort(str(error))
        rows = self._ranks.gather(part, self._loaded.widths)
        assert rows is not None, "rank 0 gathers"
        return rows


class Follower:
    """A rank other than the first: computes what it is told until it is dismissed."""

    def __init__(self, loaded: Loaded, ranks: Ranks, wire: StepWire) -> None:
        self._loaded = loaded
        self._ranks = ranks
        self._wire = wire

    def run(self) -> None:
        """Returns when rank 0 dismisses this rank. Raises EngineError for a step it can't compute: then the group
        must end."""
        while (length := self._ranks.told(self._wire.buffer)) is not None:
            self._ranks.gather(self._loaded.part.compute(self._wire.unpack(length)), self._loaded.widths)

    def close(self) -> None:
        """Lets go of everything. Idempotent."""
        self._loaded.part.close()
        self._loaded.pool.close()


def alone(config: EngineConfig, loaded: Loaded, *, clock: Callable[[], float] = time.monotonic) -> ScheduledEngine:
    """An engine of one rank. On failure the pool is closed."""
    try:
        return ScheduledEngine(config, loaded.pool, StepExecutor(loaded), clock=clock)
    except BaseException:
        loaded.pool.close()
        raise


def lead(config: EngineConfig, loaded: Loaded, ranks: Ranks) -> ScheduledEngine:
    """The engine of a group, on rank 0; the others call `follow`. On failure the pool is closed."""
    try:
        addresses = _exchange(loaded.pool, ranks)
        executor = StepExecutor(loaded, ranks=ranks, wire=_wire(config))
        return ScheduledEngine(config, loaded.pool, executor, others=addresses[1:])
    except BaseException:
        loaded.pool.close()
        raise


def follow(config: EngineConfig, loaded: Loaded, ranks: Ranks) -> Follower:
    """See `lead`."""
    try:
        _exchange(loaded.pool, ranks)
        return Follower(loaded, ranks, _wire(config))
    except BaseException:
        loaded.pool.close()
        raise


def rank_threads(config: EngineConfig) -> int:
    """Compute threads of one rank: its share of the instance's."""
    return max(1, config.profile.threads // config.tp)


def check_group(config: EngineConfig, ranks: Ranks | None) -> None:
    """Raises EngineError unless there are as many ranks as the engine was built for."""
    size = 1 if ranks is None else ranks.size
    if (config.layout.tp, config.layout.pp) != (config.tp, 1):
        raise EngineError(
            f"config.json contradicts itself: tp is {config.tp}, its KV layout is of tp {config.layout.tp} and pp "
            f"{config.layout.pp} (engines here have no pipeline stages); build this role again"
        )
    if size != config.processes:
        raise EngineError(
            f"the {config.role} engine of {config.model} was built for tp {config.tp} and is started with {size} "
            f"rank{'' if size == 1 else 's'}: start it as `mpirun -n {config.processes} python -m mpi4py -m "
            "trtpd.runtime.worker ...`, as `trtpd serve` does"
        )


def _exchange(pool: SharedPool, ranks: Ranks) -> list[PoolAddress]:
    everyone = ranks.exchange(msgspec.msgpack.encode(pool.address))
    return [msgspec.msgpack.decode(address, type=PoolAddress) for address in everyone]


def _wire(config: EngineConfig) -> StepWire:
    profile = config.profile
    limits = StepLimits(
        max_step_tokens=profile.max_step_tokens, chunk_tokens=profile.chunk_tokens, max_batch=profile.max_batch
    )
    return StepWire(config.layout, limits, max_seq_tokens=config.max_seq_tokens)
