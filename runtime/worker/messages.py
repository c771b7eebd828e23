"""What router and leaders say to each other over ZeroMQ, as msgpack.

A frame is one Envelope: numbered per direction and session, kept by its sender until acknowledged, delivered in
order and once. A session is (router epoch, leader generation): a new one of either starts numbering at 1 and
forgets what the old one had not delivered. Core events and commands travel as they are, tagged with their name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineRequest

LIMIT_BYTES = 64 << 20
HEARTBEAT_S = 0.25
LOST_AFTER_S = 2.5


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`seq` 0 marks a message outside the numbering (heartbeats, acknowledgements); `ack` is the highest number
    received in order from the other side in this session."""

    instance: str
    generation: str
    epoch: str
    seq: int
    ack: int
    kind: str
    body: msgspec.Raw


# leader -> router (kind = class name) ------------------------------------------------------------------------------
# core.Hello, core.Step (as StepMessage), Heartbeat; stage model -> router: core.Lost


class StepMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """core.Step without what the envelope already says. `events` are (class name, event)."""

    events: tuple[tuple[str, msgspec.Raw], ...]
    load: core.Load


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sent every HEARTBEAT_S by both sides from a thread of its own. `busy_s`: how long the engine's present step
    has run."""

    busy_s: float = 0.0


# router -> leader (kind = class name) ------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Answer to Hello. A leader that held work of another epoch drops it now."""

    epoch: str


class SubmitWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """core.Submit with the request itself. `request.kind` is context_only or context_and_generation."""

    request: EngineRequest
    deadline_in_s: float


class PullWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """core.Pull. `request` (kind generation_only, first_token still None) comes with the offer, once."""

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
        core.Drained,
        core.Rejected,
    )
}
