"""`trtpd build --tune`: a short, bounded search per role over what a build can choose, by measuring it here.

The search runs after a plain build, on engine directories that link its weights under other settings, and its answer
is a set of wishes per role with which the build is then made again. What is measured is written down at once, so that
a search that was cut off goes on where it stopped. The measuring itself is handed in: this room knows no engine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from trtpd.build.backends import backend_of
from trtpd.build.backends.base import Progress
from trtpd.build.files import digest_of
from trtpd.build.manifest import (
    ENGINE_CONFIG,
    EngineConfig,
    RoleName,
    RoleProfile,
    RoleTuning,
    TrialResult,
    read_engine_config,
    write_json,
)
from trtpd.build.roles import RoleWishes
from trtpd.errors import BuildError

KEPT = 0.95
"""A variant within this share of the best rate is as good: of those the smallest step and the least memory wins."""

PROMPT_TOKENS = 1024
CONTEXT_TOKENS = 500
TRIAL_BATCH = 4
CHUNKS = (128, 256, 512, 1024, 2048)
BATCHES = (4, 8, 16, 32, 64)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: `batch` prompts of `tokens` tokens, or a decode step of `batch` sequences with a context of
    `tokens`."""

    kind: Literal["prefill", "decode"]
    tokens: int
    batch: int


MeasureEngine = Callable[[Path, Trial], float]
"""Seconds that an engine directory takes for a trial. Raises EngineError if it can't be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How `trtpd build --tune` measures, and for how many seconds at most; a trial that runs is not cut off."""

    measure: MeasureEngine
    seconds: float = 300.0
    clock: Callable[[], float] = time.monotonic


def tune(
    build: Path, work: Path, wishes: Mapping[RoleName, RoleWishes], options: TuneOptions, *, tpot_s: float | None,
    progress: Progress,
) -> tuple[dict[RoleName, RoleWishes], dict[str, RoleTuning]]:  # fmt: skip
    """Searches for every role of the build directory `build`: the wishes to build it again with, and what to record.
    What `wishes` fix already is kept. `work` holds what was measured, by what was measured.

    Raises BuildError for an engine that isn't computed here.
    """
    deadline_s = options.clock() + options.seconds
    work.mkdir(exist_ok=True)
    found: dict[RoleName, RoleWishes] = {}
    records: dict[str, RoleTuning] = {}
    for index, (role, wish) in enumerate(wishes.items()):
        config = read_engine_config(build / role)
        share_s = (deadline_s - options.clock()) / (len(wishes) - index)
        bench = _Bench(config, build / role, work, options, until_s=options.clock() + share_s, progress=progress)
        search = _Search(config, wish, bench, tpot_s)
        found[role] = search.run()
        records[role] = search.record()
    return found, records


class _Bench:
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
    ) -> None:
        backend = backend_of("openvino") if config.engine == "openvino" else None
        if backend is None:
            raise BuildError(f"--tune: {config.engine} has nothing to measure here; build without --tune")
        self._backend = backend
        self._config, self._engine, self._work, self._options = config, engine, work, options
        self._until_s, self._progress = until_s, progress
        self.results: list[TrialResult] = []
        self.complete = True

    def seconds(self, trial: Trial, profile: RoleProfile) -> float | None:
        """None where there is no time left to find out."""
        config = msgspec.structs.replace(self._config, profile=profile, fingerprint="", pair_fingerprint="")
        memory = self._work / f"{digest_of(config, trial)}.json"
        seconds = _remembered(memory)
        if seconds is None:
            if self._options.clock() >= self._until_s:
                self.complete = False
                return None
            self._progress(f"{config.role}: {_words(trial, profile)}", 0, 0)
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
            )
        )
        return seconds

    def _measured(self, trial: Trial, config: EngineConfig) -> float:
        place = self._work / "engine"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        write_json(place / ENGINE_CONFIG, config)
        self._backend.link(self._engine, config, place)
        try:
            return self._options.measure(place, trial)
        finally:
            shutil.rmtree(place, ignore_errors=True)


class _Search:
    """The search for one role: whether to widen weights, then the chunk (prefill, mixed) or the batch (decode)."""

    def __init__(self, config: EngineConfig, wishes: RoleWishes, bench: _Bench, tpot_s: float | None) -> None:
        self._config, self._wishes, self._bench, self._tpot_s = config, wishes, bench, tpot_s
        self._profile = config.profile
        self._why: list[str] = []

    def run(self) -> RoleWishes:
        """What the role is to be built with."""
        found = self._wishes
        if self._wishes.widen_weights is None and self._config.precision != "f32":
            found = replace(found, widen_weights=self._widened())
        if self._config.role != "decode" and self._wishes.chunk_tokens is None:
            found = replace(found, chunk_tokens=self._chunk())
        if self._config.role == "decode" and self._wishes.max_batch is None and self._tpot_s is not None:
            found = replace(found, max_batch=self._batch(self._tpot_s))
        return found

    def record(self) -> RoleTuning:
        profile = self._profile
        return RoleTuning(
            tried=tuple(self._bench.results),
            chosen={
                "chunk_tokens": profile.chunk_tokens,
                "max_batch": profile.max_batch,
                "widen_weights": profile.widen_weights,
            },
            why=tuple(self._why),
            complete=self._bench.complete,
        )

    def _widened(self) -> bool:
        """Memory decides where the two are alike."""
        rates = dict(self._rates("widen_weights", (False, True), self._own_work()))
        if len(rates) == 2:
            wide = bool(rates[True] * KEPT > rates[False])
            self._why.append(
                f"widen_weights {str(wide).lower()}: {rates[True]:.0f} tokens/s with, {rates[False]:.0f} without"
            )
            self._profile = msgspec.structs.replace(self._profile, widen_weights=wide)
        return self._profile.widen_weights

    def _chunk(self) -> int:
        step = self._profile.max_step_tokens
        chunks = tuple(chunk for chunk in CHUNKS if chunk <= step) or (step,)
        rates = dict(self._rates("chunk_tokens", chunks, self._own_work()))
        if rates:
            best = max(rates.values())
            chunk = min(tokens for tokens, rate in rates.items() if rate >= KEPT * best)
            self._why.append(
                f"chunk_tokens {chunk}: the smallest within {1 - KEPT:.0%} of the best, {best:.0f} tokens/s"
            )
            self._profile = msgspec.structs.replace(self._profile, chunk_tokens=int(chunk))
        return self._profile.chunk_tokens

    def _batch(self, tpot_s: float) -> int:
        """The largest whose step keeps the target; larger ones than the first that doesn't are not tried."""
        kept: list[int] = []
        for batch in BATCHES:
            if not self._fits(batch):
                break
            profile = msgspec.structs.replace(self._profile, max_batch=batch)
            seconds = self._bench.seconds(Trial(kind="decode", tokens=CONTEXT_TOKENS, batch=batch), profile)
            if seconds is None or seconds > tpot_s:
                break
            kept.append(batch)
        batch = max(kept, default=BATCHES[0])
        self._why.append(f"max_batch {batch}: the largest tried whose step keeps {tpot_s * 1e3:.0f} ms")
        self._profile = msgspec.structs.replace(self._profile, max_batch=batch)
        return batch

    def _fits(self, batch: int) -> bool:
        profile, block = self._profile, self._config.layout.tokens_per_block
        return batch * (CONTEXT_TOKENS + 2 * block) <= profile.kv_blocks * block and batch <= profile.max_step_tokens

    def _own_work(self) -> Trial:
        """What this role does most, as large as its engine holds."""
        longest = min(self._config.max_seq_tokens, self._profile.kv_blocks * self._config.layout.tokens_per_block)
        if self._config.role == "decode":
            batch = TRIAL_BATCH if self._fits(TRIAL_BATCH) else 1
            return Trial(kind="decode", tokens=min(CONTEXT_TOKENS, longest // 2), batch=batch)
        return Trial(kind="prefill", tokens=min(PROMPT_TOKENS, longest // 2), batch=1)

    def _rates(self, setting: str, values: tuple[int | bool, ...], trial: Trial) -> Iterator[tuple[int | bool, float]]:
        """Tokens a second for each value of a setting that there was time to measure."""
        tokens = trial.tokens * trial.batch if trial.kind == "prefill" else trial.batch
        for value in values:
            profile = msgspec.structs.replace(self._profile, **{setting: value})
            seconds = self._bench.seconds(trial, profile)
            if seconds is not None:
                yield value, tokens / seconds


def _remembered(path: Path) -> float | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=float)
    except (OSError, ValueError):
        return None


def _words(trial: Trial, profile: RoleProfile) -> str:
    what = f"{trial.kind} {trial.tokens}x{trial.batch}"
    return f"{what}, chunks of {profile.chunk_tokens}{', weights widened' if profile.widen_weights else ''}"
