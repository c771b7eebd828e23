"""Instances on their way into the other role, as the router's driver sees it. Pure: the clock is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trtpd.runtime.core.events import Event, Hello, Role, SwitchRole

GIVE_UP_S = 900.0
"""An instance that isn't back after so long no longer keeps others from switching."""

NOT_AGAIN_S = 300.0
"""One that came back in the role it had isn't asked again for so long."""

Outcome = Literal["done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    role: Role
    generation: str
    begun_s: float


class Switches:
    """One at a time, so that the load is judged anew after each. `ended` counts how they ended, by (role, outcome)."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[Role, Outcome]] = Counter()
        self._hellos: dict[str, Hello] = {}
        self._under_way: dict[str, _Switch] = {}
        self._not_before_s: dict[str, float] = {}

    def begin(self, command: SwitchRole, now_s: float) -> bool:
        """Whether it is to be done now. One that is has begun."""
        hello = self._hellos.get(command.instance)
        self._under_way = {n: one for n, one in self._under_way.items() if now_s - one.begun_s < GIVE_UP_S}
        refused_s = self._not_before_s.get(command.instance, now_s)
        if hello is None or hello.role == command.role or self._under_way or now_s < refused_s:
            return False
        self._under_way[command.instance] = _Switch(role=command.role, generation=hello.generation, begun_s=now_s)
        return True

    def note(self, event: Event, now_s: float) -> tuple[str, Role, Outcome] | None:
        """Every event of the link; says of a switch that it has ended, and how."""
        if not isinstance(event, Hello):
            return None
        self._hellos[event.instance] = event
        switch = self._under_way.get(event.instance)
        if switch is None or event.generation == switch.generation:
            return None
        del self._under_way[event.instance]
        outcome: Outcome = "done" if event.role == switch.role else "failed"
        if outcome == "failed":
            self._not_before_s[event.instance] = now_s + NOT_AGAIN_S
        self.ended[(switch.role, outcome)] += 1
        return event.instance, switch.role, outcome

    @property
    def under_way(self) -> Mapping[str, Role]:
        """The role each instance is to have."""
        return {name: switch.role for name, switch in self._under_way.items()}
