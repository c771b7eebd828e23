"""`trtpd profile`: measures a build's engines and transfer paths cell by cell, and keeps each point at once.

What was measured before is not measured again, so a run may be cut off at any time and goes on where it stopped. One
engine is loaded at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtpd import __version__
from trtpd.build.cost_profile import FORMAT, CostProfile, Where, read_profile, write_profile
from trtpd.build.gpu_probe import find_gpus
from trtpd.build.hand_off import HandOff, other_cores
from trtpd.build.machine import cpu_name
from trtpd.build.manifest import read_manifest
from trtpd.errors import EngineError, InputError
from trtpd.kv_transfer.pool import sweep
from trtpd.perf.environment import this_environment
from trtpd.perf.measured import Cell, Measured, Side
from trtpd.perf.profile_stages import EngineStage, Stage, TransferStage, engine_stages, transfer_stages

RUNS = 3
SLOW_RUN_S = 2.0
"""A cell whose first run takes longer is run twice in all, the first included; else the first is not counted."""

LONGEST_RUN_S = 20.0
"""Cells that are expected to run longer are not measured: the fit extends to them."""

BUSY_LOAD = 0.5

PASSES = 2
"""Time that a stage does not use goes to later ones, and then to those that ran out of it."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """`roles` and `paths`: only these (empty: all). No cell begins that would end after `budget_s`. `force`: what is at
    `out` is not gone on with."""

    build: Path
    out: Path
    roles: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    budget_s: float = 600.0
    force: bool = False
    clock: Callable[[], float] = time.monotonic


class Profiler:
    """One run. Raises InputError for a build or an earlier file that can't be used; nothing is begun then."""

    def __init__(self, options: ProfileOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._manifest = read_manifest(options.build)
        self._environment = _where()
        self._engines = engine_stages(options.build, self._manifest)
        self._transfers = transfer_stages(options.build, self._engines, self._manifest)
        self._unavailable: dict[str, str] = {}
        self._too_long: set[tuple[str, Cell]] = set()
        self.notes: list[str] = []
        self._check_names()
        if self._environment.load_average > BUSY_LOAD:
            load = self._environment.load_average
            self.notes.append(f"load average {load:g}: what else runs here will be in the figures")
        if options.out.exists() and not options.force:
            self._go_on_with(_former(options.out))
        wanted = {*options.roles, *(f"transfer {path}" for path in options.paths)}
        self._all: list[Stage] = [*self._engines, *self._transfers]
        self._stages = [stage for stage in self._all if not wanted or stage.name in wanted]

    def run(self) -> CostProfile:
        """Measures what is left, as far as the time goes. Raises EngineError for an engine that can't be measured; what
        was measured by then is kept."""
        until_s = self._options.clock() + self._options.budget_s
        self._keep()
        try:
            for _ in range(PASSES):
                stages = [stage for stage in self._stages if self._left(stage)]
                for index, stage in enumerate(stages):
                    now_s, weight = self._options.clock(), sum(later.weight for later in stages[index:])
                    self._measure(stage, until_s=now_s + (until_s - now_s) * stage.weight / weight)
        finally:
            sweep()
        return self._keep()

    @property
    def plan(self) -> str:
        """What is about to be measured, and how long it takes as far as that is known, in one line."""
        counts = ", ".join(f"{stage.name} {len(self._left(stage))}" for stage in self._stages if self._left(stage))
        done, left = self.cells
        if not left:
            return f"all {done} points are measured already; begin anew with --force"
        known_s = [stage.expected_s(cell) for stage in self._stages for cell in self._left(stage)]
        most = f"at most about {self._options.budget_s:g} s (--budget-s)"
        about = "how long a point takes shows with the first ones"
        if all(known_s):
            about = f"about {(RUNS + 1) * sum(known_s):.0f} s of running by what was measured before, and loading"
        before = f"; {done} are measured already" if done else ""
        return f"{left} points to measure ({counts}){before}; {about}, {most}"

    @property
    def cells(self) -> tuple[int, int]:
        """(how many are measured, how many are left)."""
        done = sum(len(stage.cells) - len(stage.left()) for stage in self._stages)
        return done, sum(len(self._left(stage)) for stage in self._stages)

    def _left(self, stage: Stage) -> list[Cell]:
        if stage.name in self._unavailable:
            return []
        return [cell for cell in stage.left() if (stage.name, cell) not in self._too_long]

    def _measure(self, stage: Stage, *, until_s: float) -> None:
        """As many of its cells as there is time for. A path that can't be had here is noted."""
        left = self._left(stage)
        if not left or self._options.clock() >= until_s:
            return
        total = len(stage.cells)
        self._progress(stage.name, total - len(left), total)
        try:
            with stage.open() as side:
                for cell in left:
                    self._cell(stage, cell, side, until_s)
                    self._progress(stage.name, min(total - len(self._left(stage)), total), total)
        except EngineError as error:
            if not isinstance(stage, TransferStage):
                raise
            self._unavailable[stage.name] = str(error)
        self._keep()

    def _cell(self, stage: Stage, cell: Cell, side: Side, until_s: float) -> None:
        expected_s, clock = stage.expected_s(cell), self._options.clock
        if expected_s > LONGEST_RUN_S:
            self._too_long.add((stage.name, cell))
            return
        if clock() + 2 * expected_s >= until_s:
            return
        began_s = clock()
        first = side.run(cell)
        slow = clock() - began_s > SLOW_RUN_S
        runs: list[Measured] = [first] if slow else []
        while len(runs) < (2 if slow else RUNS):
            runs.append(side.run(cell))
        stage.take(cell, runs)
        self._keep()

    def _keep(self) -> CostProfile:
        """Writes what there is."""
        profile = CostProfile(
            format=FORMAT,
            trtpd=__version__,
            model=self._manifest.model,
            pair_fingerprint=self._manifest.pair_fingerprint,
            environment=self._environment,
            complete=not any(self._left(stage) for stage in self._all),
            engines={stage.role: stage.costs() for stage in self._engines if stage.points},
            transfers={stage.setup.path: stage.costs() for stage in self._transfers if stage.points},
            unavailable=self._unavailable,
        )
        write_profile(self._options.out, profile)
        return profile

    def _check_names(self) -> None:
        known: dict[str, tuple[Sequence[str], Sequence[str]]] = {
            "--roles": (self._options.roles, [stage.role for stage in self._engines]),
            "--paths": (self._options.paths, [stage.setup.path for stage in self._transfers]),
        }
        for option, (given, there) in known.items():
            for name in given:
                if name not in there:
                    raise InputError(f"{option} {name}: this build has {', '.join(there) or 'none'}")

    def _go_on_with(self, former: CostProfile) -> None:
        """Takes over the points that are of this build on this machine. Raises InputError if none can be."""
        out, here = self._options.out, cpu_name()
        anew = "begin anew with --force, or name another file with -o"
        if former.pair_fingerprint != self._manifest.pair_fingerprint:
            raise InputError(f"{out}: it is of another build ({former.model}, {former.pair_fingerprint}); {anew}")
        if former.environment.cpu != here:
            raise InputError(f"{out}: it was measured on {former.environment.cpu}, here is {here}; {anew}")
        if former.trtpd != __version__:
            raise InputError(f"{out}: it was measured by trtpd {former.trtpd}, this is {__version__}; {anew}")
        self._environment = former.environment
        for stage in self._engines:
            self._take_over(stage, former)
        for path in self._transfers:
            self._take_over_path(path, former)

    def _take_over(self, stage: EngineStage, former: CostProfile) -> None:
        costs = former.engines.get(stage.role)
        if costs is None:
            return
        if costs.fingerprint != stage.config.fingerprint:
            self.notes.append(f"{stage.role} has other settings than when it was measured: measured anew")
        elif costs.cores != list(stage.cores):
            self.notes.append(f"{stage.role} {other_cores(costs.cores, stage.cores)}: measured anew")
        else:
            stage.points = list(costs.points)

    def _take_over_path(self, stage: TransferStage, former: CostProfile) -> None:
        costs, setup = former.transfers.get(stage.setup.path), stage.setup
        if costs is None:
            return
        made = HandOff(
            path=setup.path,
            digest_every=setup.digest_every,
            source_cores=setup.source_cores,
            sink_cores=setup.sink_cores,
        )
        if difference := made.difference(costs):
            self.notes.append(f"{stage.name} {difference}: measured anew")
        else:
            stage.points = list(costs.points)


def _former(path: Path) -> CostProfile:
    """What is at the place where the profile goes. Raises InputError, saying how not to go on with it."""
    try:
        return read_profile(path)
    except InputError as error:
        fault = str(error).partition("; make it with")[0]
        raise InputError(
            f"{fault}: it is there already and can't be gone on with; name another file with -o, or write over it with "
            "--force"
        ) from error


def _where() -> Where:
    found: Mapping[str, object] = msgspec.to_builtins(this_environment())
    gpus: Sequence[str] = [device.name for device in find_gpus().devices]
    return Where.model_validate({**found, "gpus": list(gpus)})
