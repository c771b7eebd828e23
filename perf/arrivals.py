"""When requests arrive: instants of a given mean rate and shape. Seeded; knows nothing of requests.

    even            equal gaps
    poisson         independent arrivals
    gamma:CV        gaps with a coefficient of variation: above 1 burstier than Poisson, below 1 steadier
    bursts:ON,OFF   Poisson for ON seconds, then nothing for OFF seconds
    ramp:A,B        Poisson whose rate goes evenly from A to B (in relation to each other), over as long as all of the
                    requests take at the mean rate: all of them arrive within it

The mean rate is what was asked for whatever the shape: bursts are denser where they are (it is that of whole bursts
with the silence behind them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtpd.errors import InputError

Instants = npt.NDArray[np.float64]
Maker = Callable[[int, float, np.random.Generator, tuple[float, ...]], Instants]


def _even(count: int, rate: float, rng: np.random.Generator, numbers: tuple[float, ...]) -> Instants:
    return np.arange(count, dtype=np.float64) / rate


def _poisson(count: int, rate: float, rng: np.random.Generator, numbers: tuple[float, ...]) -> Instants:
    return np.cumsum(rng.exponential(1.0 / rate, count))


def _gamma(count: int, rate: float, rng: np.random.Generator, numbers: tuple[float, ...]) -> Instants:
    shape = 1.0 / numbers[0] ** 2
    return np.asarray(np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count)), dtype=np.float64)


def _bursts(count: int, rate: float, rng: np.random.Generator, numbers: tuple[float, ...]) -> Instants:
    on_s, off_s = numbers
    busy_s = _poisson(count, rate * (on_s + off_s) / on_s, rng, ())
    bursts = np.floor(busy_s / on_s)
    return np.asarray(bursts * (on_s + off_s) + (busy_s - bursts * on_s), dtype=np.float64)


def _ramp(count: int, rate: float, rng: np.random.Generator, numbers: tuple[float, ...]) -> Instants:
    """Of a Poisson process that is known to have `count` arrivals in its `count / rate` seconds: given how many they
    are, their places in the expected count are even, and the instants are those sent through its inverse. It is
    quadratic in time: count x (f t + (1 - f) t^2), t from 0 to 1, f the first rate by the mean."""
    f = 2.0 * numbers[0] / sum(numbers)
    share = np.sort(rng.random(count))
    # The form of the root that does not cancel for f near 1; where f is 0 and so is the share, so is the time.
    root = f + np.sqrt(np.maximum(f * f + 4.0 * (1.0 - f) * share, 0.0))
    time = np.divide(2.0 * share, root, out=np.zeros_like(share), where=root > 0.0)
    return np.asarray(np.clip(time, 0.0, 1.0) * (count / rate), dtype=np.float64)


BOUNDS = {"CV": (0.01, 100.0), "ON": (1e-3, 1e6), "OFF": (1e-3, 1e6), "A": (1e-6, 1e6), "B": (1e-6, 1e6)}
"""What the numbers of a shape may be: beyond, no arrivals of that kind can be told from others, or computed."""
RATES = (1e-6, 1e6)

SHAPES: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "even": (_even, ()),
    "poisson": (_poisson, ()),
    "gamma": (_gamma, ("CV",)),
    "bursts": (_bursts, ("ON", "OFF")),
    "ramp": (_ramp, ("A", "B")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A shape and its numbers; `parse` reads one from text, `str` writes it."""

    shape: str = "poisson"
    numbers: tuple[float, ...] = ()

    def instants(self, count: int, rate: float, rng: np.random.Generator) -> Instants:
        """`count` ascending instants in seconds from 0 on, `rate` a second on average. Raises InputError for a rate
        that is not above 0."""
        check_rate(rate)
        maker, _ = SHAPES[self.shape]
        return maker(count, rate, rng, self.numbers)

    def __str__(self) -> str:
        return self.shape + (":" + ",".join(f"{number:g}" for number in self.numbers) if self.numbers else "")


def check_rate(rate: float) -> None:
    """Raises InputError for a rate that means nothing."""
    least, most = RATES
    if not least <= rate <= most:
        raise InputError(f"the rate is {rate:g} requests/s; it must be above 0 (between {least:g} and {most:g})")


def parse(text: str) -> Arrivals:
    """Raises InputError naming the shapes there are."""
    shape, _, rest = text.partition(":")
    if shape not in SHAPES:
        raise InputError(f"arrivals {text!r}: there is no shape {shape!r}; choose {_choices()}")
    names = SHAPES[shape][1]
    try:
        numbers = tuple(float(number) for number in rest.split(",")) if rest else ()
    except ValueError as error:
        raise InputError(f"arrivals {text!r}: {rest!r} is not numbers; write {_form(shape)}") from error
    if len(numbers) != len(names):
        raise InputError(f"arrivals {text!r}: {shape} takes {len(names)} numbers; write {_form(shape)}")
    for name, number in zip(names, numbers, strict=True):
        may_be_zero = name in ("OFF", "A", "B")
        least, most = BOUNDS[name]
        if not (least <= number <= most or (number == 0.0 and may_be_zero)):
            raise InputError(
                f"arrivals {text!r}: {name} is {number:g}; it must {'be 0 or ' * may_be_zero}lie between {least:g} and "
                f"{most:g}"
            )
    if shape == "ramp" and sum(numbers) == 0.0:
        raise InputError(f"arrivals {text!r}: A and B are both 0; one of them must be above 0")
    return Arrivals(shape=shape, numbers=numbers)


def _form(shape: str) -> str:
    names = SHAPES[shape][1]
    return shape + (":" + ",".join(names) if names else "")


def _choices() -> str:
    return ", ".join(_form(shape) for shape in SHAPES)
