"""What router and leaders say to each other over ZeroMQ, as msgpack.

A frame is one Envelope: numbered per direction and session, kept by its sender until acknowledged, delivered
in order and once. A session is (router epoch, leader generation): a new one of either starts numbering at 1
and forgets what the old one had not delivered. Core events travel as they are, tagged with their name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from trtpd.errors import TrtpdError
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineRequest

PROTOCOL = 1
LIMIT_BYTES = 64 << 20
BODY_LIMIT_BYTES = LIMIT_BYTES - (64 << 10)
HEARTBEAT_S = 0.25
LOST_AFTER_S = 2.5


class WireError(TrtpdError):
    """A frame from a peer can't be understood, or one of ours would be too long. Nothing was done with it."""

    code = "wire"


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`seq` 0 marks a message outside the numbering (heartbeats, acknowledgements); `ack` is the highest
    number received in order from the other side in this session."""

    protocol: int = PROTOCOL
    instance: str
    generation: str
    epoch: str
    seq: int
    ack: int
    kind: str
    body: msgspec.Raw


# both ways, outside the numbering


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sent every HEARTBEAT_S by both sides from a thread of its own. `sent`: the highest number given so far,
    so that the loss of a last message shows. `busy_s`: how long the engine's present step has run."""

    sent: int
    busy_s: float = 0.0


class Resend(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """These numbers (both included) did not arrive."""

    first: int
    last: int


# leader -> router (kind = class name): core.Hello, StepMessage; core.Lost, of itself or from its stage model


class StepMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """core.Step without what the envelope already says. `events` are (class name, event)."""

    events: tuple[tuple[str, msgspec.Raw], ...]
    load: core.Load


# router -> leader (kind = class name)


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Answer to Hello. A leader that held work of another epoch drops it now."""

    epoch: str


class Reregister(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The router does not know this session (it restarted, or took the leader for lost): the leader drops the
    session's work and says Hello under a new generation."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """This leader is not wanted: another process of a newer generation goes by its name."""

    reason: str


class SubmitWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """core.Submit with the request itself. `request.kind` is context_only or context_and_generation."""

    request: EngineRequest
    deadline_in_s: float


class PullWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """core.Pull. `request` (kind generation_only, first_token still None) comes with the offer, once per try:
    after TransferFailed a PullWork with an offer starts a new try of the same attempt."""

    request_id: int
    attempt: int
    request: EngineRequest | None
    offer: bytes | None
    chunks: tuple[bytes, ...]
    seal: bytes | None
    deadline_in_s: float


class WithdrawWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    request_id: int
    attempt: int


class CancelWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    request_id: int
    attempt: int


class DrainWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Finish what runs, take nothing new."""


class SwitchWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """As DrainWork, and then have this instance started again as one of the other role."""

    role: core.Role


Work = SubmitWork | PullWork | WithdrawWork | CancelWork | DrainWork | SwitchWork
Message = Work | Heartbeat | Resend | StepMessage | Welcome | Reregister | Refused | core.Hello | core.Lost

MESSAGE_TYPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Heartbeat,
        Resend,
        StepMessage,
        Welcome,
        Reregister,
        Refused,
        SubmitWork,
        PullWork,
        WithdrawWork,
        CancelWork,
        DrainWork,
        SwitchWork,
        core.Hello,
        core.Lost,
    )
}

EVENT_TYPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        core.Offered,
        core.ChunkReady,
        core.Sealed,
        core.TransferBegun,
        core.TransferDone,
        core.TransferFailed,
        core.Tokens,
        core.Preempted,
        core.Drained,
        core.Rejected,
    )
}


def pack(envelope: Envelope) -> bytes:
    """The frame of an envelope whose body came from `encode_body`."""
    return msgspec.msgpack.encode(envelope)


def unpack(frame: bytes) -> Envelope:
    """The envelope in a frame. Raises WireError for anything that is not one of this protocol."""
    if len(frame) > LIMIT_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes is longer than the {LIMIT_BYTES} bytes a message may have")
    envelope: Envelope = _decode("frame", frame, Envelope)
    if envelope.protocol != PROTOCOL:
        raise WireError(
            f"{envelope.instance!r} speaks protocol {envelope.protocol}, this process {PROTOCOL}; "
            f"run the same trtpd version on all hosts"
        )
    if envelope.seq < 0 or envelope.ack < 0:
        raise WireError(f"numbers of a message from {envelope.instance!r} are negative")
    return envelope


def encode_body(message: Message) -> tuple[str, bytes]:
    """(kind, body) of a message. Raises WireError when it is longer than BODY_LIMIT_BYTES."""
    kind, body = type(message).__name__, msgspec.msgpack.encode(message)
    if len(body) > BODY_LIMIT_BYTES:
        raise WireError(
            f"a {kind} of {len(body)} bytes is longer than the {BODY_LIMIT_BYTES} bytes a message may have; "
            f"shorten the prompt"
        )
    return kind, body


def decode_body(kind: str, body: msgspec.Raw | bytes) -> Message:
    """The message of a kind. Raises WireError for an unknown kind or a body that isn't of that kind."""
    if kind not in MESSAGE_TYPES:
        raise WireError(f"a message of unknown kind {kind[:40]!r}")
    message: Message = _decode(kind, body, MESSAGE_TYPES[kind])
    return message


def step_message(events: Iterable[core.InstanceEvent], load: core.Load) -> StepMessage:
    """Everything one step brought about, as one message."""
    named = tuple((type(event).__name__, msgspec.Raw(msgspec.msgpack.encode(event))) for event in events)
    return StepMessage(events=named, load=load)


def step_events(message: StepMessage) -> tuple[core.InstanceEvent, ...]:
    """The events in a step. Raises WireError for an unknown or malformed one."""
    events: list[core.InstanceEvent] = []
    for name, raw in message.events:
        if name not in EVENT_TYPES:
            raise WireError(f"an event of unknown kind {name[:40]!r}")
        events.append(_decode(name, raw, EVENT_TYPES[name]))
    return tuple(events)


def _decode(what: str, data: msgspec.Raw | bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a malformed {what}: {error}") from error
