"""What one instance reports: its load, and what has happened to the attempts that it works on. Plain data.

Payloads that the core only passes on (offers, seals, chunks) are opaque bytes here: the wire's msgpack. `attempt`
counts placements of one request from 1; together with the instance's `generation` it fences old answers.
"""

from __future__ import annotations

from typing import Literal

from trtpd.runtime.core.message import message

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode", "mixed"]
TopLogProbs = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, likeliest first."""


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
