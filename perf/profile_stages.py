"""What `trtpd profile` measures, each in a process of its own: the engine of a role, and a path of KV."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from trtpd.build.cost_profile import EngineCosts, StepPoint, TransferCosts, TransferPoint
from trtpd.build.hand_off import HandOff, first_cores
from trtpd.build.manifest import EngineConfig, Manifest, RoleName, check_loadable, read_engine_config
from trtpd.kv_transfer.factory import TRANSPORTS
from trtpd.kv_transfer.hands import copying_environment
from trtpd.perf.measured import Cell, Measured, Side
from trtpd.perf.profile import steps_of
from trtpd.perf.profile_grid import Grid, transfer_cells
from trtpd.perf.profile_points import cell_of, expected_s, step_point, transfer_point
from trtpd.perf.step_fit import fit_steps, fit_transfer, transfer_s
from trtpd.perf.transfer_side import TransferSetup
from trtpd.runtime.worker.mpirun import Hosts, hosts_of

TRANSFER_TOKENS = 2048
"""The longest prompt whose hand-off is measured."""

ENGINE_WEIGHT = 5
"""An engine has so many times more to measure than a path."""


class Stage(Protocol):
    """Something to be measured in one process: its cells, and what becomes of their runs."""

    @property
    def name(self) -> str: ...

    @property
    def cells(self) -> Sequence[Cell]: ...

    @property
    def weight(self) -> int:
        """What it gets of the time, beside others."""

    def open(self) -> AbstractContextManager[Side]: ...

    def left(self) -> list[Cell]:
        """The cells that have no point yet."""

    def expected_s(self, cell: Cell) -> float: ...

    def take(self, cell: Cell, runs: Sequence[Measured]) -> None:
        """Makes a point of it, and fits again."""


@dataclass(slots=True, kw_only=True)
class EngineStage:
    """One role's engine, on the cores that an instance of it has."""

    role: RoleName
    directory: Path
    config: EngineConfig
    cores: tuple[int, ...]
    hosts: Hosts
    points: list[StepPoint]
    cells: Sequence[Cell]

    @property
    def name(self) -> str:
        return self.role

    @property
    def weight(self) -> int:
        return ENGINE_WEIGHT

    def open(self) -> AbstractContextManager[Side]:
        return steps_of(self.directory, self.config, cores=self.cores, hosts=self.hosts)

    def left(self) -> list[Cell]:
        return _left(self.cells, self.points)

    def expected_s(self, cell: Cell) -> float:
        fit = fit_steps(self.points)
        return 0.0 if fit is None else expected_s(fit, cell)

    def take(self, cell: Cell, runs: Sequence[Measured]) -> None:
        self.points.append(step_point(cell, runs))

    def costs(self) -> EngineCosts:
        config = self.config
        return EngineCosts(
            fingerprint=config.fingerprint,
            engine=config.engine,
            precision=config.precision,
            tp=config.tp,
            threads=config.profile.threads,
            cores=list(self.cores),
            chunk_tokens=config.profile.chunk_tokens,
            points=self.points,
            fit=fit_steps(self.points),
        )


@dataclass(slots=True, kw_only=True)
class TransferStage:
    """One path from prefill to decode. Both ends as of one rank: what re-layout between TP sizes adds isn't in it."""

    setup: TransferSetup
    points: list[TransferPoint]
    cells: Sequence[Cell]

    @property
    def name(self) -> str:
        return f"transfer {self.setup.path}"

    @property
    def weight(self) -> int:
        return 1

    def open(self) -> AbstractContextManager[Side]:
        return Side("trtpd.perf.transfer_side", self.setup, copying_environment(os.environ))

    def left(self) -> list[Cell]:
        return _left(self.cells, self.points)

    def expected_s(self, cell: Cell) -> float:
        fit = fit_transfer(self.points)
        return 0.0 if fit is None else transfer_s(fit, self._bytes(cell))

    def take(self, cell: Cell, runs: Sequence[Measured]) -> None:
        self.points.append(transfer_point(cell, runs, moved_bytes=self._bytes(cell)))

    def _bytes(self, cell: Cell) -> int:
        layout = self.setup.layout
        return layout.blocks_for(cell.tokens) * layout.tokens_per_block * layout.bytes_per_token

    def costs(self) -> TransferCosts:
        setup = self.setup
        return TransferCosts(
            digest_every=setup.digest_every,
            source_cores=list(setup.source_cores),
            sink_cores=list(setup.sink_cores),
            points=self.points,
            fit=fit_transfer(self.points),
        )


def _left(cells: Sequence[Cell], points: Sequence[StepPoint] | Sequence[TransferPoint]) -> list[Cell]:
    done = {cell_of(point) for point in points}
    return [cell for cell in cells if cell not in done]


def engine_stages(build: Path, manifest: Manifest) -> list[EngineStage]:
    """One for each role that has an instance. Raises EngineError for an engine that can't be loaded here."""
    stages = []
    for name, entry in manifest.roles.items():
        if not entry.instances:
            continue
        config = read_engine_config(build / entry.directory)
        check_loadable(config, build)
        stages.append(
            EngineStage(
                role=cast(RoleName, name),
                directory=build / entry.directory,
                config=config,
                cores=first_cores(build, entry),
                hosts=hosts_of(manifest.settings, name),
                points=[],
                cells=Grid(config, stepwise=config.engine != "tensorrt_llm").cells(),
            )
        )
    return stages


def transfer_stages(build: Path, engines: Sequence[EngineStage], manifest: Manifest) -> list[TransferStage]:
    """One for each path; none for a build without prefill and decode, or whose engines move their KV themselves."""
    ends, made = {stage.role: stage for stage in engines}, HandOff.of(build, manifest)
    if made is None or ends["prefill"].config.engine == "tensorrt_llm":
        return []
    source, sink = ends["prefill"], ends["decode"]
    pools = [stage.config.profile.kv_blocks * stage.config.layout.tokens_per_block for stage in (source, sink)]
    tokens = min(TRANSFER_TOKENS, source.config.max_seq_tokens, *pools)
    return [
        TransferStage(
            setup=TransferSetup(
                layout=replace(source.config.layout, tp=1),
                tokens=tokens,
                path=path,
                digest_every=made.digest_every,
                source_cores=made.source_cores,
                sink_cores=made.sink_cores,
            ),
            points=[],
            cells=transfer_cells(tokens),
        )
        for path in TRANSPORTS
    ]
