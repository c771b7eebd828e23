"""The record of each request: state, journal of accepted tokens, the attempt that runs now."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtpd.errors import InternalError
from trtpd.runtime.core.events import Arrived, WorkKind
from trtpd.runtime.core.instance import Hold
from trtpd.runtime.core.lifecycle import AttemptRecord, Instant, State, Timeline
from trtpd.runtime.core.timers import Timer


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One placement of a request and how far its hand-off has come.

    `prefill` is the hold of the instance that prefills (or does everything, when local), `decode` that of the
    one that pulls; None once gone. `base` is the number of journal tokens that belong to this attempt's
    prompt. `paced`: it takes one of the places for new attempts. `shunned` are sinks that may still answer
    for an old pull. `lead` begins the pull, `stall` ends one that takes too long.
    """

    number: int
    kind: WorkKind
    base: int
    prompt_tokens: int
    record: AttemptRecord
    prefill: Hold | None = None
    decode: Hold | None = None
    paced: bool = False
    offer: bytes | None = None
    chunks: list[bytes] = field(default_factory=list)
    chunks_sent: int = 0
    ready_tokens: int = 0
    ready_at_s: float = 0.0
    seal: bytes | None = None
    seal_sent: bool = False
    begun: bool = False
    joined: bool = False
    repulls: int = 0
    shunned: set[str] = field(default_factory=set)
    lead: Timer | None = None
    stall: Timer | None = None

    @property
    def pulling(self) -> bool:
        """Decode was told to pull and has not got it all yet."""
        return self.decode is not None and self.decode.sent and not self.joined

    @property
    def names(self) -> str:
        """The instances of this attempt, for messages."""
        return self.record.prefill if self.record.decode is None else f"{self.record.prefill}→{self.record.decode}"


class Request:
    """One request in flight. `left_tokens`: the output still to expect when it was last placed; `tag`: its place in
    the fair order; `patience` ends it if it waits too long for its first place; `short`: the user's prompt is."""

    __slots__ = (
        "arrived",
        "arrived_s",
        "attempt",
        "attempts",
        "avoid",
        "blocked_since_s",
        "deadline",
        "failures",
        "journal",
        "left_tokens",
        "losses",
        "model",
        "patience",
        "rejects",
        "short",
        "state",
        "tag",
        "timeline",
        "transfer_failures",
    )

    def __init__(self, arrived: Arrived, model: str, now_s: float, *, short: bool = False) -> None:
        self.arrived = arrived
        self.model = model
        self.state = State.QUEUED
        self.journal: list[int] = []
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.failures: list[str] = []
        self.losses: list[str] = []
        self.transfer_failures = 0
        self.rejects = 0
        self.avoid: dict[str, float] = {}
        self.blocked_since_s: float | None = None
        self.deadline: Timer | None = None
        self.patience: Timer | None = None
        self.left_tokens = float(arrived.max_tokens)
        self.tag = (0.0, 0)
        self.short = short
        self.arrived_s = now_s
        self.timeline = Timeline(request_id=arrived.request_id, prompt_tokens=arrived.prompt_tokens)
        self.timeline.mark(Instant.ARRIVED, now_s)

    @property
    def id(self) -> int:
        return self.arrived.request_id

    @property
    def prompt_tokens(self) -> int:
        """What a new attempt has to prefill: the user's prompt and the journal."""
        return self.arrived.prompt_tokens + len(self.journal)

    @property
    def total_tokens(self) -> int:
        """The longest it can become."""
        return self.arrived.prompt_tokens + self.arrived.max_tokens

    def avoids(self, instance: str, now_s: float) -> bool:
        return bool(self.avoid) and self.avoid.get(instance, now_s) > now_s

    def blocks_others(self, now_s: float, after_s: float) -> bool:
        """It has waited for room so long that nobody may take any before it."""
        return self.blocked_since_s is not None and now_s - self.blocked_since_s >= after_s

    def running(self) -> Attempt:
        """The attempt that runs now; there must be one."""
        if self.attempt is None:
            raise InternalError(f"request {self.id} is {self.state} and has no attempt")
        return self.attempt
