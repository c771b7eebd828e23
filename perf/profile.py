"""Measures a loaded engine through its seam: seconds of a prefill and of a decode step.

    python -m trtpd.perf.profile SETUP        (started by engine_bench, `trtpd build --tune` and `trtpd profile`)

`trtpd build --tune` is handed `engine_measure`, which does so in a process of its own for each engine it tries.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from trtpd.build.manifest import EngineConfig
from trtpd.build.roles import split_cores
from trtpd.build.search import Trial
from trtpd.perf.engine_runs import DECODE_STEPS, EngineRuns, key_of
from trtpd.perf.measured import Cell, Measure, Side, answer
from trtpd.perf.step_meter import StepMeter
from trtpd.runtime.engine.base import Engine, PrefillDone
from trtpd.runtime.engine.factory import join_engine, load_engine
from trtpd.runtime.engine.ranks import Ranks
from trtpd.runtime.worker.group import GroupFolder, Member, join_group
from trtpd.runtime.worker.mpirun import Hosts, find_mpi, group_command, group_environment


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """An engine directory to load, and the CPUs to keep to (empty: the engine's own). `by_step`: each step is told.
    `group`: the folder of the group that this process is a rank of, whose first rank reads cells from `asks`."""

    directory: str
    cores: tuple[int, ...] = ()
    seed: int = 0
    by_step: bool = False
    group: str = ""
    asks: str = ""


_MODULE = "trtpd.perf.profile"
_GENERATION = "measure"


class EngineMeter:
    """Measures cells on `engine`, which nobody else uses."""

    def __init__(self, engine: Engine, *, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runs = EngineRuns(engine, seed=seed, clock=clock)

    def __call__(self, cell: Cell) -> float:
        """See Measure. Raises CapacityError if the engine can't hold the cell, EngineError if a step failed."""
        self._runs.check(cell)
        return self._prefill_s(cell) if cell.kind == "prefill" else self._decode_step_s(cell)

    def _prefill_s(self, cell: Cell) -> float:
        runs = self._runs
        keys = [runs.prefill(runs.tokens(cell.tokens)) for _ in range(cell.batch)]
        began_s = runs.clock()
        left = set(keys)
        while left:
            left -= {key_of(event) for event in runs.poll(began_s).events if isinstance(event, PrefillDone)}
        seconds = runs.clock() - began_s
        runs.end(keys)
        return seconds

    def _decode_step_s(self, cell: Cell) -> float:
        """The median over some steps, the first of which isn't counted: it admits the sequences."""
        runs = self._runs
        keys = [runs.decode(cell.tokens) for _ in range(cell.batch)]
        began_s = runs.clock()
        steps: list[float] = []
        while len(steps) <= DECODE_STEPS:
            before_s = runs.clock()
            if runs.poll(began_s).events:
                steps.append(runs.clock() - before_s)
        runs.end(keys)
        return float(np.median(steps[1:]))


@contextmanager
def measured_engine(directory: Path, *, cores: tuple[int, ...] = ()) -> Iterator[Side]:
    """The engine in `directory`, loaded in a process of its own."""
    with Side(_MODULE, EngineSetup(directory=str(directory), cores=cores)) as side:
        yield side


@contextmanager
def steps_of(
    directory: Path, config: EngineConfig, *, cores: tuple[int, ...] = (), hosts: Hosts = None
) -> Iterator[Side]:
    """As `measured_engine`, and each step is told. An engine of several ranks is loaded as a group of processes.
    Raises EngineError, ServeError where a group can't be started."""
    setup = EngineSetup(directory=str(directory), cores=cores, by_step=True)
    if config.processes == 1:
        with Side(_MODULE, setup) as side:
            yield side
        return
    folder = GroupFolder.make("measure", config.tp)
    try:
        asks = folder.path / "asks"
        os.mkfifo(asks, 0o600)
        setup = msgspec.structs.replace(setup, group=str(folder.path), asks=str(asks))
        environment = group_environment(os.environ, folder.path, hosts=hosts)
        command = group_command(
            find_mpi(sys.executable, environment),
            sys.executable,
            ["-m", _MODULE, msgspec.json.encode(setup).decode()],
            ranks=config.tp,
            folder=folder.path,
            environment=environment,
            hosts=hosts,
        )
        with Side(_MODULE, setup, environment, command=command, asks=asks) as side:
            yield side
    finally:
        folder.kill()
        folder.remove()


def engine_measure(directory: Path, trial: Trial) -> float:
    """Measures one trial of `trtpd build --tune`: see MeasureEngine."""
    cell = Cell(kind=trial.kind, tokens=trial.tokens, batch=trial.batch)
    with measured_engine(directory) as side:
        side.measure(cell)
        return min(side.measure(cell) for _ in range(2))


def _serve(setup: EngineSetup, member: Member | None) -> int:
    """Answers until there are no more cells: as the only process of the engine, or as its first rank."""
    engines: list[Engine] = []
    ranks = None if member is None else member.ranks

    def load() -> Measure:
        name, directory = f"trtpd-measure-{os.getpid()}", Path(setup.directory)
        engine = load_engine(directory, pool_name=name, generation=_GENERATION, ranks=ranks)
        engines.append(engine)
        if member is not None:
            member.serve(True)
        return StepMeter(engine, seed=setup.seed) if setup.by_step else EngineMeter(engine, seed=setup.seed)

    try:
        return answer(load, _cores(setup, ranks), asks=Path(setup.asks) if setup.asks else None)
    finally:
        if member is not None:
            member.serve(False)
        for engine in engines:
            engine.shutdown()


def _follow(setup: EngineSetup, member: Member) -> int:
    """Computes what the first rank tells."""
    if cores := _cores(setup, member.ranks):
        os.sched_setaffinity(0, cores)
    name, directory = f"trtpd-measure-{os.getpid()}", Path(setup.directory)
    follower = join_engine(directory, pool_name=name, generation=_GENERATION, ranks=member.ranks)
    try:
        member.serve(True)
        follower.run()
    finally:
        member.serve(False)
        follower.close()
    return 0


def _cores(setup: EngineSetup, ranks: Ranks | None) -> tuple[int, ...]:
    """Of this process."""
    return setup.cores if ranks is None or not setup.cores else split_cores(setup.cores, ranks.size)[ranks.rank]


def main() -> int:
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    if not setup.group:
        return _serve(setup, None)
    member = join_group(Path(setup.group))
    status = _follow(setup, member) if member.ranks.rank else _serve(setup, member)
    if status:
        member.ranks.abort("the engine could not be measured")
    member.leave()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
