"""Nudges: requests of one token that make an idle executor look at its finished fetches and time limits."""

from __future__ import annotations

import logging

from trtpd.errors import RequestError
from trtpd.runtime.engine.base import RequestKind, Sampling
from trtpd.runtime.engine.tensorrt_llm.backend import Answer, Backend, Start

log = logging.getLogger(__name__)

FIRST_S = 0.02
MOST_S = 1.0
"""The first nudge comes so long after the executor went idle; each one after it twice as long, up to this."""

_NUDGE = Start(kind=RequestKind.CONTEXT_AND_GENERATION, prompt_ids=(0,), max_tokens=1, sampling=Sampling())


class Nudges:
    """At most one is under way."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: int | None = None
        self._pause_s = FIRST_S
        self._due_s: float | None = None

    def answered(self, answer: Answer) -> bool:
        """Whether the answer is a nudge's."""
        if answer.id != self._under_way:
            return False
        if answer.final:
            self._backend.forget(answer.id)
            self._under_way = None
        return True

    def see_to(self, now_s: float, *, wanted: bool) -> None:
        """Sends one if it is time. `wanted`: something waits for an executor that has nothing to do."""
        if not wanted:
            self._pause_s, self._due_s = FIRST_S, None
        elif self._due_s is None:
            self._due_s = now_s + self._pause_s
        elif now_s >= self._due_s and self._under_way is None:
            self._pause_s = min(MOST_S, 2 * self._pause_s)
            self._due_s = now_s + self._pause_s
            try:
                self._under_way = self._backend.start(_NUDGE)
            except RequestError as error:
                log.error("the executor takes no nudge: %s", error)
