"""What goes into RouterCore; what instances report (answers.py) and what comes out of it (commands.py) can be had from
here too: one seam, one name. Plain data, standard library only.

Instants are seconds on the driver's clock.
"""

from __future__ import annotations

from dataclasses import field

from trtpd.runtime.core.answers import (
    ChunkReady,
    Drained,
    FinishReason,
    InstanceEvent,
    Load,
    Offered,
    Preempted,
    Rejected,
    Role,
    Sealed,
    Tokens,
    TopLogProbs,
    TransferBegun,
    TransferDone,
    TransferFailed,
)
from trtpd.runtime.core.commands import (
    Cancel,
    Command,
    Emit,
    Finish,
    Pull,
    Quarantine,
    Refuse,
    Submit,
    SwitchRole,
    WakeAt,
    Withdraw,
    WorkKind,
)
from trtpd.runtime.core.message import message

__all__ = [
    "Arrived",
    "Cancel",
    "Capabilities",
    "ChunkReady",
    "ClientGone",
    "Command",
    "Drain",
    "Drained",
    "Emit",
    "Event",
    "Finish",
    "FinishReason",
    "Hello",
    "InstanceEvent",
    "LinkDown",
    "Load",
    "Lost",
    "Offered",
    "Preempted",
    "Pull",
    "Quarantine",
    "Refuse",
    "Rejected",
    "Role",
    "Sealed",
    "Step",
    "Submit",
    "SwitchRole",
    "TextStopped",
    "Tick",
    "Tokens",
    "TopLogProbs",
    "TransferBegun",
    "TransferDone",
    "TransferFailed",
    "WakeAt",
    "Withdraw",
    "WorkKind",
]


@message
class Capabilities:
    """What an engine can't do, as data; the core plans by these and never by an engine's name.

    chunk_events: reports chunks before the seal · release: held KV can be freed on request · repull: an offer
    can be pulled twice · digests: blocks can be verified · seeded_resume: sampling is a function of (seed,
    position) · shorter_first: a short prompt does not wait for a long one that came before (see batching.due).
    """

    chunk_events: bool = True
    release: bool = True
    repull: bool = True
    digests: bool = True
    seeded_resume: bool = True
    shorter_first: bool = True


@message
class Arrived:
    """A new request. `deadline_s` is an instant; targets are durations from arrival (TTFT) and per token
    (TPOT).

    `model` may be left out while one model is served. `request_id` is unique in the router's life. `priority` above 0
    goes before others, below 0 after them and is shed first. `block_hashes` are those of the prompt's full blocks, in
    order, each covering all before it (runtime/engine/prefix.py): equal ones are equal beginnings.
    """

    request_id: int
    prompt_tokens: int
    max_tokens: int
    deadline_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0
    tenant: str = ""
    block_hashes: tuple[int, ...] = ()
    model: str | None = None


@message
class Hello:
    """An instance registers, or registers again with a new `generation` after a restart (all it held is
    gone).

    `pairing_key` is equal for instances that can exchange KV. `fingerprint` names the build; pairs never
    cross it. `gpus` names the GPUs it runs on (empty: none, or unknown). `gpu_links` says what lies between them and
    each GPU of its host: "self", "nvlink", "switch", "bridge", "node" or "system", nearest first (empty: unknown).
    With `prefix_cache` it computes (and pulls) only what it has not of a prompt's full blocks.
    """

    instance: str
    generation: str
    role: Role
    model: str
    fingerprint: str
    pairing_key: str
    host: str
    kv_blocks: int
    tokens_per_block: int
    max_seq_tokens: int
    max_batch: int
    bytes_per_token: int
    prefill_tokens_per_s: float
    transports: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    gpus: tuple[str, ...] = ()
    gpu_links: tuple[tuple[str, str], ...] = ()
    prefix_cache: bool = False


@message
class Step:
    """One message of one instance: everything that happened in one engine step, and its load afterwards."""

    instance: str
    generation: str
    events: tuple[InstanceEvent, ...]
    load: Load


@message
class Lost:
    """The instance's process is gone or silent; nothing it held can be had any more."""

    instance: str
    generation: str
    reason: str


@message
class LinkDown:
    """KV can't move from one instance to another just now."""

    source: str
    sink: str


@message
class TextStopped:
    """The text of this request met a stop string within the token at output index `index`."""

    request_id: int
    index: int


@message
class ClientGone:
    request_id: int


@message
class Drain:
    """No new work for this instance. What runs there finishes; with `move`, what can run elsewhere goes there,
    paced."""

    instance: str
    move: bool = False


@message
class Tick:
    """Time has passed (sent for every WakeAt, not before its instant, and may be sent at any time)."""


Event = Arrived | Hello | Step | Lost | LinkDown | TextStopped | ClientGone | Drain | Tick
