"""The search for what one role is built with: over precision, threads, widened weights, and chunk or batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec

from trtpd.build.manifest import EngineConfig, Precision, RoleProfile, RoleTuning, TrialResult
from trtpd.build.roles import RoleWishes, with_settings

KEPT = 0.95
"""A variant within this share of the best rate is as good: of those the one with the least error, the fewest threads,
the smallest step and the least memory wins."""

PROMPT_TOKENS = 1024
CONTEXT_TOKENS = 500
TRIAL_BATCH = 4
CHUNKS = (128, 256, 512, 1024, 2048)
LOCAL_CHUNKS = (256, 128, 64, 32)
"""Of prompts that a decode engine computes beside its batch."""

BATCHES = (4, 8, 16, 32, 64)
TRIED_PRECISIONS: tuple[Precision, ...] = ("bf16", "int8", "int4")
"""Beside f32. f16 is as fast as bf16 wherever it isn't computed in."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: `batch` prompts of `tokens` tokens, or a decode step of `batch` sequences with a context of
    `tokens`."""

    kind: Literal["prefill", "decode"]
    tokens: int
    batch: int


MeasureVariant = Callable[[Trial, RoleProfile, Precision], float | None]
"""Seconds of a trial; None where there is no time left to find out."""


class Search:
    """The search for one role. `within` are the precisions that may be chosen with their errors; none: they are not
    searched."""

    def __init__(
        self,
        config: EngineConfig,
        wishes: RoleWishes,
        seconds: MeasureVariant,
        tpot_s: float | None,
        within: Mapping[Precision, float],
    ) -> None:
        self._config, self._wishes, self._seconds, self._tpot_s = config, wishes, seconds, tpot_s
        self._within = within
        self._profile, self._precision = config.profile, config.precision
        self._why: list[str] = []
        self._chosen: dict[str, int | bool | str | tuple[int, ...]] = {}

    def run(self) -> RoleWishes:
        """What the role is to be built with."""
        wishes = self._wishes
        if self._within and wishes.precision is None:
            self._choose_precision()
        if wishes.threads is None and wishes.cores is None:
            self._choose_threads()
        if wishes.widen_weights is None and self._precision != "f32":
            self._choose_widened()
        if self._config.role != "decode" and wishes.chunk_tokens is None:
            self._choose_chunk()
        if self._config.role == "decode" and self._tpot_s is not None:
            if wishes.max_batch is None:
                self._choose_batch(self._tpot_s)
            if wishes.chunk_tokens is None and wishes.max_step_tokens is None:
                self._choose_local_chunk(self._tpot_s)
        return with_settings(wishes, self._chosen)

    def record(self, tried: tuple[TrialResult, ...], *, complete: bool) -> RoleTuning:
        """What goes into the manifest."""
        return RoleTuning(tried=tried, chosen=self._chosen, why=tuple(self._why), complete=complete)

    def _set(self, why: str, **settings: int | bool) -> None:
        self._profile = msgspec.structs.replace(self._profile, **settings)
        self._chosen |= settings
        self._why.append(why)

    def _choose_precision(self) -> None:
        rates: dict[Precision, float] = {}
        trial = self._own_work()
        for precision in self._within:
            seconds = self._seconds(trial, self._profile, precision)
            if seconds is not None:
                rates[precision] = _tokens(trial) / seconds
        if not rates:
            return
        best = max(rates.values())
        good = [precision for precision, rate in rates.items() if rate >= KEPT * best]
        self._precision = min(good, key=self._within.__getitem__)
        self._chosen["precision"] = self._precision
        told = ", ".join(f"{name} {rate:.0f} (KL {self._within[name]:.4f})" for name, rate in rates.items())
        why = f"precision {self._precision}: the least error within {1 - KEPT:.0%} of the best; {told} tokens/s"
        self._why.append(why)

    def _choose_threads(self) -> None:
        """Fewer where they do as well: the cores are left to others."""
        share, instances = self._profile.threads, max(1, len(self._profile.cores) // max(1, self._profile.threads))
        rates = dict(self._rates("threads", tuple(_halves(share)), self._own_work())) if share > 1 else {}
        if not rates:
            return
        best = max(rates.values())
        threads = min(count for count, rate in rates.items() if rate >= KEPT * best)
        if threads == share:
            self._why.append(f"threads {share}: all that an instance has, {best:.0f} tokens/s")
            return
        cores = self._profile.cores[: threads * instances]
        why = f"threads {threads}: the fewest within {1 - KEPT:.0%} of the best, {best:.0f} tokens/s"
        self._set(why, threads=threads)
        self._profile = msgspec.structs.replace(self._profile, cores=cores)
        self._chosen["cores"] = cores

    def _choose_widened(self) -> None:
        """Memory decides where the two are alike."""
        rates = dict(self._rates("widen_weights", (False, True), self._own_work()))
        if len(rates) == 2:
            wide = bool(rates[True] * KEPT > rates[False])
            self._set(
                f"widen_weights {str(wide).lower()}: {rates[True]:.0f} tokens/s with, {rates[False]:.0f} without",
                widen_weights=wide,
            )

    def _choose_chunk(self) -> None:
        step = self._profile.max_step_tokens
        chunks = tuple(chunk for chunk in CHUNKS if chunk <= step) or (step,)
        rates = dict(self._rates("chunk_tokens", chunks, self._own_work()))
        if rates:
            best = max(rates.values())
            chunk = min(tokens for tokens, rate in rates.items() if rate >= KEPT * best)
            why = f"chunk_tokens {chunk}: the smallest within {1 - KEPT:.0%} of the best, {best:.0f} tokens/s"
            self._set(why, chunk_tokens=int(chunk))

    def _choose_batch(self, tpot_s: float) -> None:
        """The largest whose step keeps the target; larger ones than the first that doesn't are not tried."""
        kept: list[int] = []
        for batch in BATCHES:
            if not self._fits(batch):
                break
            profile = msgspec.structs.replace(self._profile, max_batch=batch)
            trial = Trial(kind="decode", tokens=CONTEXT_TOKENS, batch=batch)
            seconds = self._seconds(trial, profile, self._precision)
            if seconds is None or seconds > tpot_s:
                break
            kept.append(batch)
        batch = max(kept, default=BATCHES[0])
        self._set(f"max_batch {batch}: the largest tried whose step keeps {tpot_s * 1e3:.0f} ms", max_batch=batch)

    def _choose_local_chunk(self, tpot_s: float) -> None:
        """What a step may compute of a prompt while others wait for their next token: no longer than their target."""
        chosen = None
        for chunk in LOCAL_CHUNKS:
            if self._profile.max_batch + chunk > self._profile.max_step_tokens or chunk >= self._longest():
                continue
            profile = msgspec.structs.replace(self._profile, chunk_tokens=chunk)
            seconds = self._seconds(Trial(kind="prefill", tokens=chunk, batch=1), profile, self._precision)
            if seconds is None:
                return
            chosen = chunk
            if seconds <= tpot_s:
                break
        if chosen is not None:
            step = self._profile.max_batch + chosen
            why = f"chunk_tokens {chosen}: the largest tried that computes in {tpot_s * 1e3:.0f} ms, or the smallest"
            self._set(why, chunk_tokens=chosen, max_step_tokens=step)

    def _fits(self, batch: int) -> bool:
        profile, block = self._profile, self._config.layout.tokens_per_block
        return batch * (CONTEXT_TOKENS + 2 * block) <= profile.kv_blocks * block and batch <= profile.max_step_tokens

    def _longest(self) -> int:
        return min(self._config.max_seq_tokens, self._profile.kv_blocks * self._config.layout.tokens_per_block)

    def _own_work(self) -> Trial:
        """What this role does most, as large as its engine holds."""
        if self._config.role == "decode":
            batch = TRIAL_BATCH if self._fits(TRIAL_BATCH) else 1
            return Trial(kind="decode", tokens=min(CONTEXT_TOKENS, self._longest() // 2), batch=batch)
        return Trial(kind="prefill", tokens=min(PROMPT_TOKENS, self._longest() // 2), batch=1)

    def _rates(self, setting: str, values: tuple[int | bool, ...], trial: Trial) -> Iterator[tuple[int | bool, float]]:
        """Tokens a second for each value of a setting that there was time to measure."""
        for value in values:
            profile = msgspec.structs.replace(self._profile, **{setting: value})
            seconds = self._seconds(trial, profile, self._precision)
            if seconds is not None:
                yield value, _tokens(trial) / seconds


def _tokens(trial: Trial) -> int:
    return trial.tokens * trial.batch if trial.kind == "prefill" else trial.batch


def _halves(count: int) -> Iterator[int]:
    while count:
        yield count
        count //= 2
