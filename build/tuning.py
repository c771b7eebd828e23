"""`trtpd build --tune`: a short, bounded search per role over what a build can choose, by measuring it here.

The search runs after a plain build, on engine directories that link its weights under other settings, and its answer
is a set of wishes per role with which the build is then made again. What is measured is written down at once, so that
a search that was cut off goes on where it stopped. The measuring itself is handed in: this room knows no engine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtpd.build.accuracy import AccuracyMeter
from trtpd.build.backends import backend_of
from trtpd.build.backends.base import Progress
from trtpd.build.files import digest_of
from trtpd.build.manifest import (
    ENGINE_CONFIG,
    EngineConfig,
    Precision,
    RoleName,
    RoleProfile,
    RoleTuning,
    TrialResult,
    read_engine_config,
    write_json,
)
from trtpd.build.roles import RoleWishes, with_settings
from trtpd.build.search import TRIED_PRECISIONS, Search, Trial
from trtpd.errors import BuildError

MeasureEngine = Callable[[Path, Trial], float]
"""Seconds that an engine directory takes for a trial. Raises EngineError if it can't be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How `trtpd build --tune` measures, and for how many seconds at most; a trial that runs is not cut off. With
    `kl_bound_nats` precisions are tried too, those whose error is at most that."""

    measure: MeasureEngine
    seconds: float = 300.0
    kl_bound_nats: float | None = None
    clock: Callable[[], float] = time.monotonic


def tune(
    build: Path, work: Path, wishes: Mapping[RoleName, RoleWishes], options: TuneOptions, *, tpot_s: float | None,
    progress: Progress, meter: AccuracyMeter | None = None,
) -> tuple[dict[RoleName, RoleWishes], dict[str, RoleTuning]]:  # fmt: skip
    """Searches for every role of the build directory `build`: the wishes to build it again with, and what to record.
    What `wishes` fix already is kept. `work` holds what was measured, by what was measured. `meter` is needed where
    precisions are tried.

    Raises BuildError for an engine that isn't computed here.
    """
    deadline_s = options.clock() + options.seconds
    work.mkdir(exist_ok=True)
    found: dict[RoleName, RoleWishes] = {}
    records: dict[str, RoleTuning] = {}
    for index, (role, wish) in enumerate(wishes.items()):
        config = read_engine_config(build / role)
        share_s = (deadline_s - options.clock()) / (len(wishes) - index)
        until_s = options.clock() + share_s
        bench = Bench(config, build / role, work, options, until_s=until_s, progress=progress, meter=meter)
        within = _within(options, meter) if config.tp == 1 and wish.precision is None else {}
        search = Search(config, wish, bench.seconds, tpot_s, within)
        found[role] = search.run()
        records[role] = search.record(tuple(bench.results), complete=bench.complete)
    return found, records


def kept_wishes(records: Mapping[str, RoleTuning], wishes: Mapping[RoleName, RoleWishes]) -> dict[RoleName, RoleWishes]:
    """The wishes that a former search found, to build with again."""
    return {
        role: with_settings(wish, records[role].chosen) if role in records else wish for role, wish in wishes.items()
    }


def left_to_try(records: Mapping[str, RoleTuning], seconds: float) -> tuple[str, ...]:
    """A line for each role whose search ended before all was tried."""
    return tuple(
        f"{role}: {len(record.tried)} variants were measured when the {seconds:g} s of --tune-s were over: the same "
        "command goes on from there, with more time"
        for role, record in records.items()
        if not record.complete
    )


def _within(options: TuneOptions, meter: AccuracyMeter | None) -> dict[Precision, float]:
    """The precisions to try, each with its KL divergence from f32; none if they aren't to be tried."""
    if options.kl_bound_nats is None or meter is None:
        return {}
    found: dict[Precision, float] = {"f32": 0.0}
    for precision in TRIED_PRECISIONS:
        accuracy = meter.of(precision)
        if accuracy.figures is not None and accuracy.figures.kl_nats <= options.kl_bound_nats:
            found[precision] = accuracy.figures.kl_nats
    return found


class Bench:
    """Measures variants of one role's engine, each once: what was measured before is remembered in a file."""

    def __init__(
        self,
        config: EngineConfig,
        engine: Path,
        work: Path,
        options: TuneOptions,
        *,
        until_s: float,
        progress: Progress,
        meter: AccuracyMeter | None = None,
    ) -> None:
        backend = backend_of("openvino") if config.engine == "openvino" else None
        if backend is None:
            raise BuildError(f"--tune: {config.engine} has nothing to measure here; build without --tune")
        self._backend = backend
        self._config, self._engine, self._work, self._options = config, engine, work, options
        self._until_s, self._progress, self._meter = until_s, progress, meter
        self.results: list[TrialResult] = []
        self.complete = True

    def seconds(self, trial: Trial, profile: RoleProfile, precision: Precision) -> float | None:
        """None where there is no time left to find out."""
        config = msgspec.structs.replace(
            self._config, profile=profile, precision=precision, fingerprint="", pair_fingerprint=""
        )
        memory = self._work / f"{digest_of(config, trial)}.json"
        seconds = _remembered(memory)
        if seconds is None:
            if self._options.clock() >= self._until_s:
                self.complete = False
                return None
            self._progress(f"{config.role}: {_words(trial, config)}", 0, 0)
            seconds = self._measured(trial, config)
            memory.write_bytes(msgspec.json.encode(seconds))
        self.results.append(
            TrialResult(
                kind=trial.kind,
                tokens=trial.tokens,
                batch=trial.batch,
                chunk_tokens=profile.chunk_tokens,
                widen_weights=profile.widen_weights,
                seconds=seconds,
                threads=profile.threads,
                precision=precision,
            )
        )
        return seconds

    def _measured(self, trial: Trial, config: EngineConfig) -> float:
        place = self._work / "engine"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        write_json(place / ENGINE_CONFIG, config)
        source = self._engine
        if config.precision != self._config.precision:
            assert self._meter is not None, "precisions are tried only where their errors are known"
            source = self._meter.engine(config.precision)
        self._backend.link(source, config, place)
        try:
            return self._options.measure(place, trial)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _remembered(path: Path) -> float | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=float)
    except (OSError, ValueError):
        return None


def _words(trial: Trial, config: EngineConfig) -> str:
    profile = config.profile
    what = f"{trial.kind} {trial.tokens}x{trial.batch}, {config.precision}, {profile.threads} threads"
    return f"{what}, chunks of {profile.chunk_tokens}{', weights widened' if profile.widen_weights else ''}"
