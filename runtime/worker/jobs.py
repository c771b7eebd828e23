"""What a leader keeps of each attempt, and how errors become events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from trtpd.errors import InputError, ServeError, TrtpdError
from trtpd.kv_transfer.base import Key
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineEvent, EngineRequest, PrefillChunk, PrefillDone


class Stage(Enum):
    """Where a job's KV is: with the engine (queued, computing, decoding), held for its puller, coming in by our
    transport, or being fetched by an engine that moves its KV itself."""

    RUNNING = auto()
    HELD = auto()
    PULLING = auto()
    FETCHING = auto()


@dataclass(slots=True)
class Job:
    """One attempt of one request here. `ending`: it is being stopped, and its one last event will be `refusal`, or
    Drained if there is none."""

    request: EngineRequest
    deadline_s: float
    stage: Stage
    ending: bool = False
    refusal: core.Rejected | None = None

    @property
    def key(self) -> Key:
        return self.request.key

    def last_word(self) -> core.InstanceEvent:
        """What the router hears when a job that is ending has ended."""
        return self.refusal or core.Drained(request_id=self.request.request_id, attempt=self.request.attempt)


class DrainingError(ServeError):
    """This instance finishes what it has and takes nothing new."""

    code = "draining"


class UnsupportedError(ServeError):
    """This instance's role does not do this."""

    code = "unsupported"


def latest_chunks(events: Iterable[EngineEvent]) -> list[EngineEvent]:
    """The events without the chunk events that a later chunk, or the end, of the same prefill makes
    needless."""
    kept: list[EngineEvent] = []
    outdone: set[Key] = set()
    for event in reversed(list(events)):
        key = (event.request_id, event.attempt)
        if isinstance(event, PrefillChunk):
            if key in outdone:
                continue
            outdone.add(key)
        elif isinstance(event, PrefillDone | core.Drained | core.Rejected):
            outdone.add(key)
        kept.append(event)
    return kept[::-1]


def is_last(event: EngineEvent) -> bool:
    """Whether the engine has nothing more to say of this key."""
    return isinstance(event, core.Drained | core.Rejected) or (
        isinstance(event, core.Tokens) and event.finish is not None
    )


def rejected(key: Key, error: TrtpdError) -> core.Rejected:
    """Permanent if the request itself is at fault: no other instance of this build would take it."""
    return core.Rejected(
        request_id=key[0],
        attempt=key[1],
        code=error.code,
        reason=str(error),
        permanent=isinstance(error, InputError),
    )


def transfer_failed(key: Key, code: str, reason: str, retryable: bool) -> core.TransferFailed:
    return core.TransferFailed(request_id=key[0], attempt=key[1], code=code, reason=reason, retryable=retryable)
