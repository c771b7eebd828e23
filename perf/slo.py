"""Targets: what a request must meet to count as served."""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeAlias

import msgspec

from trtpd.errors import InputError


class FixedSlo(msgspec.Struct, frozen=True, kw_only=True, tag="fixed"):
    """The same targets for all requests; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1e9:
                raise InputError(
                    f"the target {name.removesuffix('_s')} is {value:g} s; it must be above 0 and at most 1e9"
                )

    def ttft_for(self, prompt_tokens: int) -> float | None:
        return self.ttft_s

    def scaled(self, factor: float) -> FixedSlo:
        return FixedSlo(ttft_s=_times(self.ttft_s, factor), tpot_s=_times(self.tpot_s, factor))

    def __str__(self) -> str:
        parts = [
            f"{name} <= {value * 1e3:g} ms" for name, value in _named(self.ttft_s, self.tpot_s) if value is not None
        ]
        return " and ".join(parts) or "no targets"


class LengthSlo(msgspec.Struct, frozen=True, kw_only=True, tag="by_length"):
    """The first token within `factor` times what a prompt of that length takes unloaded, but never less than
    `floor_s`. `unloaded`: (tokens, seconds) in ascending order, between which and beyond which lines are drawn."""

    floor_s: float
    factor: float
    unloaded: tuple[tuple[int, float], ...]
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.unloaded]
        if len(tokens) < 2 or tokens != sorted(set(tokens)):
            raise InputError(f"targets by length need two or more ascending lengths; got {tokens}")

    def ttft_for(self, prompt_tokens: int) -> float:
        return max(self.floor_s, self.factor * self.unloaded_s(prompt_tokens))

    def unloaded_s(self, prompt_tokens: int) -> float:
        """What a prompt of that length takes on an idle machine."""
        points = self.unloaded
        upper = min(max(bisect_left(points, (prompt_tokens, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[upper - 1], points[upper]
        return max(0.0, y0 + (y1 - y0) * (prompt_tokens - x0) / (x1 - x0))

    def scaled(self, factor: float) -> LengthSlo:
        return LengthSlo(
            floor_s=self.floor_s * factor,
            factor=self.factor * factor,
            unloaded=self.unloaded,
            tpot_s=_times(self.tpot_s, factor),
        )

    def __str__(self) -> str:
        ttft = f"TTFT <= max({self.floor_s:g} s, {self.factor:g} x unloaded prefill of the prompt)"
        return ttft if self.tpot_s is None else f"{ttft} and TPOT <= {self.tpot_s * 1e3:g} ms"


Slo: TypeAlias = FixedSlo | LengthSlo


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _named(ttft_s: float | None, tpot_s: float | None) -> tuple[tuple[str, float | None], ...]:
    return (("TTFT", ttft_s), ("TPOT", tpot_s))
