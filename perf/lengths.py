"""Fits requests to what a machine can serve: one factor for all lengths, then a bound. Says what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from trtpd.errors import InputError
from trtpd.perf.prompt_text import Segment
from trtpd.perf.workload import Ask

AUTO_QUANTILE = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFit:
    """`scale` None: 1, or as much smaller as 95 % of the requests need to fit into `max_total_tokens`.

    What is still too long is cut: the answer to half of the bound at most, the prompt to the rest, from its end, so
    that shared prefixes stay shared. Bounds are None where there is none.
    """

    scale: float | None = None
    max_prompt_tokens: int | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not 0.0 < self.scale <= 100.0:
            raise InputError(f"the length scale is {self.scale:g}; it must lie above 0 and up to 100")
        for name in ("max_prompt_tokens", "max_total_tokens"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise InputError(f"{name} is {value}; it must be at least 2")

    def apply(self, asks: Sequence[Ask]) -> tuple[list[Ask], tuple[str, ...]]:
        """The fitted requests, and notes on what changed."""
        scale = self.scale if self.scale is not None else self._scale_for(asks)
        fitted, cut = [], 0
        for ask in asks:
            scaled = ask if scale == 1.0 else _scaled(ask, scale)
            bounded = self._bounded(scaled)
            cut += bounded != scaled
            fitted.append(bounded)
        notes = [] if scale == 1.0 else [f"all lengths times {scale:.4g}"]
        if cut:
            notes.append(f"{cut} of {len(asks)} requests cut to {self._bounds()}")
        return fitted, tuple(notes)

    def _scale_for(self, asks: Sequence[Ask]) -> float:
        if self.max_total_tokens is None or not asks:
            return 1.0
        usual = float(np.percentile([ask.total_tokens for ask in asks], AUTO_QUANTILE))
        return min(1.0, self.max_total_tokens / usual)

    def _bounded(self, ask: Ask) -> Ask:
        prompt_tokens, max_tokens = ask.prompt_tokens, ask.max_tokens
        if self.max_total_tokens is not None and ask.total_tokens > self.max_total_tokens:
            max_tokens = min(max_tokens, max(1, self.max_total_tokens // 2))
            prompt_tokens = min(prompt_tokens, self.max_total_tokens - max_tokens)
        if self.max_prompt_tokens is not None:
            prompt_tokens = min(prompt_tokens, self.max_prompt_tokens)
        if (prompt_tokens, max_tokens) == (ask.prompt_tokens, ask.max_tokens):
            return ask
        return msgspec.structs.replace(ask, segments=_first(ask.segments, prompt_tokens), max_tokens=max_tokens)

    def _bounds(self) -> str:
        bounds = []
        if self.max_total_tokens is not None:
            bounds.append(f"{self.max_total_tokens} tokens in all")
        if self.max_prompt_tokens is not None:
            bounds.append(f"{self.max_prompt_tokens} prompt tokens")
        return " and ".join(bounds)


def _scaled(ask: Ask, scale: float) -> Ask:
    """Each segment by itself, so that equal ones stay equal."""
    return msgspec.structs.replace(
        ask,
        segments=tuple(Segment(seed=s.seed, tokens=max(1, round(s.tokens * scale))) for s in ask.segments),
        max_tokens=max(1, round(ask.max_tokens * scale)),
    )


def _first(segments: Sequence[Segment], tokens: int) -> tuple[Segment, ...]:
    """The first `tokens` tokens of them."""
    kept = []
    for segment in segments:
        if tokens <= 0:
            break
        kept.append(Segment(seed=segment.seed, tokens=min(segment.tokens, tokens)))
        tokens -= segment.tokens
    return tuple(kept)
