"""What the router counts and remembers for status and metrics."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from trtpd.runtime.core.lifecycle import Timeline
from trtpd.runtime.core.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A fault: something went wrong and was dealt with. An event: the router changed its ways, or would."""

    at_s: float
    code: str
    text: str


class Tally:
    """Counters by name, each a plain number that only grows; recent faults, events and timelines, all
    bounded."""

    def __init__(self, policy: Policy) -> None:
        self.counts: Counter[str] = Counter()
        self.output_tokens = 0
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.placed: Counter[str] = Counter()
        self.shed: Counter[str] = Counter()
        self.moves: Counter[str] = Counter()
        self.rungs: Counter[str] = Counter()
        self.faults: deque[Note] = deque(maxlen=policy.faults_kept)
        self.events: deque[Note] = deque(maxlen=policy.faults_kept)
        self._ended: OrderedDict[int, Timeline] = OrderedDict()
        self._timelines_kept = policy.timelines_kept

    def fault(self, at_s: float, code: str, text: str) -> None:
        self.faults.append(Note(at_s=at_s, code=code, text=text))
        self.counts["faults"] += 1

    def event(self, at_s: float, code: str, text: str) -> None:
        self.events.append(Note(at_s=at_s, code=code, text=text))

    def keep(self, timeline: Timeline) -> None:
        """Remembers an ended request's timeline; the oldest makes room."""
        self._ended[timeline.request_id] = timeline
        if len(self._ended) > self._timelines_kept:
            self._ended.popitem(last=False)

    def ended(self, request_id: int) -> Timeline | None:
        return self._ended.get(request_id)
