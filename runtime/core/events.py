"""What goes into RouterCore (events) and what comes out (commands). Plain data, standard library only.

Payloads that the core only passes on (offers, seals, chunks) are opaque bytes here: the wire's msgpack.
`attempt` counts placements of one request from 1; together with the instance's `generation` it fences old
answers. Instants are seconds on the driver's clock.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from trtpd.runtime.core.lifecycle import Timeline
from trtpd.runtime.core.message import message

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode", "mixed"]
TopLogProbs = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, likeliest first."""


@message
class Capabilities:
    """What an engine can't do, as data; the core plans by these and never by an engine's name.

    chunk_events: reports chunks before the seal · release: held KV can be freed on request · repull: an offer
    can be pulled twice · digests: blocks can be verified · seeded_resume: sampling is a function of (seed,
    position).
    """

    chunk_events: bool = True
    release: bool = True
    repull: bool = True
    digests: bool = True
    seeded_resume: bool = True


@message
class Load:
    """What an instance reports with every step. `queued_tokens` are prompt tokens accepted and not yet computed.

    `preemptions` counts, since the instance's start, sequences that lost their blocks to others and were computed
    anew. `cached_blocks` of its KV hold beginnings of prompts that others may share (those that no sequence has count
    as free); `evicted` are the hashes, as in `Arrived.block_hashes`, of those that are gone since the last report.
    `draining`: it takes nothing new and will go when it is empty. `strangers`, `stalled` and `refused` count who came
    to its data plane in vain since it started (kv_transfer's Visits).
    """

    kv_blocks_free: int
    kv_blocks_held: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    preemptions: int = 0
    cached_blocks: int = 0
    evicted: tuple[int, ...] = ()
    draining: bool = False
    strangers: int = 0
    stalled: int = 0
    refused: int = 0


# Events from one instance, carried by Step ------------------------------------------------------------------


@message
class Offered:
    """Prefill admitted the request and holds `blocks` blocks for it; its first chunk is about to run. KV of
    `cached_tokens` tokens was there already."""

    request_id: int
    attempt: int
    blocks: int
    lease_s: float
    offer: bytes
    cached_tokens: int = 0


@message
class ChunkReady:
    """KV of the first `ready_tokens` tokens is final."""

    request_id: int
    attempt: int
    ready_tokens: int
    chunk: bytes


@message
class Sealed:
    """Prefill is done and drew the token at output index `first_index`. `finish` is set if it ends the
    answer. `top_log_probs` as one of those of Tokens."""

    request_id: int
    attempt: int
    first_index: int
    token: int
    log_prob: float | None
    finish: FinishReason | None
    seal: bytes
    top_log_probs: TopLogProbs = ()


@message
class TransferBegun:
    request_id: int
    attempt: int


@message
class TransferDone:
    """KV has arrived, is verified and joined decode's batch; prefill may free it. KV of `present_tokens` tokens was
    there before and did not move."""

    request_id: int
    attempt: int
    bytes_moved: int
    chunks: int
    seconds: float
    exposed_s: float
    path: str
    present_tokens: int = 0


@message
class TransferFailed:
    """A pull ended without KV. Decode has given its blocks back."""

    request_id: int
    attempt: int
    code: str
    reason: str
    retryable: bool


@message
class Tokens:
    """Tokens at output indexes `first_index ...` of one request. The last one ends the answer if `finish` is
    set.

    `log_probs` is empty or as long as `ids`, and so is `top_log_probs`: for each of them the likeliest tokens with
    their log-probabilities, likeliest first. The end token itself is among `ids`. `cached_tokens` comes with the first
    token of a prompt that was computed here: KV of so many of its tokens was there already.
    """

    request_id: int
    attempt: int
    first_index: int
    ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    finish: FinishReason | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()
    cached_tokens: int | None = None


@message
class Preempted:
    """The instance gave this attempt's blocks to others for lack of them. It keeps the attempt, and goes on with the
    next token when it has computed its KV anew."""

    request_id: int
    attempt: int


@message
class Drained:
    """The instance holds nothing of this attempt any more (answer to Cancel and Withdraw, or a lapsed
    lease)."""

    request_id: int
    attempt: int


@message
class Rejected:
    """The instance did not take the work, or gave it up, and holds nothing of it. `code` as in errors.py.

    `permanent`: no other instance of this build would take it either (say, the prompt is too long).
    """

    request_id: int
    attempt: int
    code: str
    reason: str
    permanent: bool = False


InstanceEvent = (
    Offered
    | ChunkReady
    | Sealed
    | TransferBegun
    | TransferDone
    | TransferFailed
    | Tokens
    | Preempted
    | Drained
    | Rejected
)


# Events -----------------------------------------------------------------------------------------------------


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


# Commands ---------------------------------------------------------------------------------------------------

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
