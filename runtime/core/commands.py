"""What comes out of RouterCore: orders to instances, and word to the driver. Plain data."""

from __future__ import annotations

from typing import Literal

from trtpd.runtime.core.answers import Role, TopLogProbs
from trtpd.runtime.core.lifecycle import Timeline
from trtpd.runtime.core.message import message

WorkKind = Literal["context_only", "context_and_generation"]


@message
class Submit:
    """Prefill this request on `instance`. The driver adds the prompt; `journal` are accepted output tokens
    that now belong to the prompt, so output starts at index len(journal)."""

    instance: str
    request_id: int
    attempt: int
    kind: WorkKind
    journal: tuple[int, ...]


@message
class Pull:
    """Decode is to pull this offer, or learns more of a pull it has: `ready_tokens`, new chunks, the seal.

    The first Pull of an attempt carries `offer` and the journal; later ones carry only what is new.
    """

    instance: str
    request_id: int
    attempt: int
    offer: bytes | None
    journal: tuple[int, ...]
    chunks: tuple[bytes, ...]
    seal: bytes | None


@message
class Withdraw:
    """Prefill frees what it holds for this attempt (delivered, or no longer wanted). Answered by Drained,
    also when nothing is held any more."""

    instance: str
    request_id: int
    attempt: int


@message
class Cancel:
    """The instance stops this attempt and frees it. Answered by Drained, also when nothing is held any
    more."""

    instance: str
    request_id: int
    attempt: int


@message
class Emit:
    """Tokens for the client, each output index exactly once and in order."""

    request_id: int
    first_index: int
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_log_probs: tuple[TopLogProbs, ...] = ()


@message
class Finish:
    """The request's end. `reason` is "stop", "length", "cancelled", or an error's code with `message` for it.

    `state` may be "refused": it waited, was never begun, and gives way (`reason` as in Refuse). `timeline` is the
    request's whole record, the driver's from here on.
    """

    request_id: int
    state: str
    reason: str
    message: str = ""
    timeline: Timeline | None = None
    retry_after_s: float | None = None


@message
class Refuse:
    """Not admitted. `code` is "saturated" (with `retry_after_s`), "no_instance" or "invalid_argument"."""

    request_id: int
    code: str
    message: str
    retry_after_s: float | None = None


@message
class Quarantine:
    """No work for this instance until `until_s`."""

    instance: str
    until_s: float
    reason: str


@message
class SwitchRole:
    instance: str
    role: Role


@message
class WakeAt:
    """Send a Tick at this instant."""

    at_s: float


Command = Submit | Pull | Withdraw | Cancel | Emit | Finish | Refuse | Quarantine | SwitchRole | WakeAt
