"""How long the two parts of a step are, learned from steps seen: an exponentially forgetting least-squares fit."""

from __future__ import annotations

SAMPLES = 256
"""Steps that count; older ones are forgotten by and by."""

STIFFNESS = 0.25
"""How much the two parts hold to each other, in samples: where all steps seen are about alike they say nothing about
the shape, and both parts are scaled alike."""

NEWS = 0.1
"""Once a part is further than this from what it was at the last news, whoever has built on that must look again."""


class Learned:
    """By what the two parts of a guess, one fixed and one that grows with the work, are to be multiplied.

    Errors count relative to the step's length. `samples` is how many steps were noted, at most SAMPLES.
    """

    __slots__ = ("_f", "_ff", "_fr", "_r", "_rr", "_said", "_scale", "parts", "samples")

    def __init__(self) -> None:
        self.parts = self._said = (1.0, 1.0)
        self.samples = 0
        self._ff = self._fr = self._rr = self._f = self._r = self._scale = 0.0

    def note(self, fixed: float, rest: float) -> bool:
        """Takes in a step of which the guess makes `fixed` and `rest` parts of its true length. Whether that is
        news."""
        self.samples = min(self.samples + 1, SAMPLES)
        keep = 1.0 - 1.0 / SAMPLES
        self._ff = self._ff * keep + fixed * fixed
        self._fr = self._fr * keep + fixed * rest
        self._rr = self._rr * keep + rest * rest
        self._f = self._f * keep + fixed
        self._r = self._r * keep + rest
        self.parts = self._fit()
        least = NEWS * max(self._said)  # a part that hardly counts is no news, however often it doubles
        news = any(abs(new - old) > NEWS * max(old, least) for new, old in zip(self.parts, self._said, strict=True))
        if news:
            self._said = self.parts
        return news

    def _fit(self) -> tuple[float, float]:
        """The parts, none of them negative, that make the sum of squares least: (fixed a + rest b - 1) of each step,
        and STIFFNESS of (a - b) relative to the larger."""
        both = (self._f + self._r) / (self._ff + 2.0 * self._fr + self._rr)
        stiff = STIFFNESS / max(both, self._scale) ** 2
        ff, fr, rr = self._ff + stiff, self._fr - stiff, self._rr + stiff
        det = ff * rr - fr * fr
        fixed, rest = (self._f * rr - self._r * fr) / det, (self._r * ff - self._f * fr) / det
        if fixed < 0.0:
            fixed, rest = 0.0, self._r / rr
        elif rest < 0.0:
            fixed, rest = self._f / ff, 0.0
        self._scale = max(fixed, rest)
        return fixed, rest
