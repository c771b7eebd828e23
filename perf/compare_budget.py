"""A comparison's time: what a run takes at most is known before it begins, and none is begun that would not fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SERVER_START_S, SERVER_STOP_S = 12.0, 3.0
"""Before one was seen."""
UNLOADED_S = 4.0
"""What the unloaded run takes at least; how long it really takes is what it is there to find out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A run to come. `arrive_s`: so long requests arrive. `drain_s`: so long the last answer may take behind that.
    `again`: why it is made once more, if it is."""

    name: str
    arrive_s: float
    drain_s: float = 0.0
    again: str = ""


class OutOfBudgetError(Exception):
    """This step does not fit into what is left; what is there is reported. `needs_s`: its time, start and stop of its
    server included."""

    def __init__(self, step: Step, needs_s: float) -> None:
        super().__init__(step.name)
        self.step = step
        self.needs_s = needs_s


def says_nothing(line: str) -> None:
    """For those who look at the result only."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """`seconds` from its making on. Each step is told to `say` as it begins. `least_steps`: how many there will be at
    least. Starts and stops of servers count as the longest seen, at first as SERVER_START_S and SERVER_STOP_S."""

    seconds: float
    say: Callable[[str], None] = says_nothing
    clock: Callable[[], float] = time.monotonic
    start_s: float = SERVER_START_S
    stop_s: float = SERVER_STOP_S
    started: bool = False
    stopped: bool = False
    least_steps: int = 0
    begun: int = 0
    _from_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._from_s = self.clock()

    @property
    def spent_s(self) -> float:
        return self.clock() - self._from_s

    def needs_s(self, step: Step, *, start: bool) -> float:
        """All it may take, on a server that is still to be started or not."""
        return (self.start_s if start else 0.0) + step.arrive_s + step.drain_s + self.stop_s

    def begin(self, step: Step, *, start: bool) -> None:
        """Raises OutOfBudgetError if it does not fit any more."""
        needs_s = self.needs_s(step, start=start)
        if self.spent_s + needs_s > self.seconds:
            raise OutOfBudgetError(step, needs_s)
        self.begun += 1
        of = f" of at least {self.least_steps}" if self.begun <= self.least_steps else ""
        first = f"{self.start_s:.0f} s to start a server, " if start else ""
        drain = f", then up to {step.drain_s:.0f} s for the last answers" if step.drain_s else ""
        again = f" (again, since {step.again})" if step.again else ""
        self.say(
            f"[run {self.begun}{of}; {self.spent_s:.0f} of {self.seconds:g} s spent] {step.name}{again}: {first}"
            f"{step.arrive_s:.0f} s of requests{drain}"
        )

    def start_took(self, seconds: float) -> None:
        """Of a server, to being ready."""
        self.start_s = max(self.start_s, seconds) if self.started else seconds
        self.started = True

    def stop_took(self, seconds: float) -> None:
        """Of a server, to its end."""
        self.stop_s = max(self.stop_s, seconds) if self.stopped else seconds
        self.stopped = True
