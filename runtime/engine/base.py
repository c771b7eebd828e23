"""The Engine seam: an executor, shaped after TensorRT-LLM's, that a leader drives from one thread.

A leader calls `submit` and `cancel` between steps and `poll` for the next step. Events come only from `poll`.
Keys are (request_id, attempt). What an engine can't do is in its `Capabilities`, never guessed from its name.

Life of a key
  CONTEXT_ONLY            PrefillBegan, PrefillChunk*, PrefillDone; then the engine HOLDS its KV: `release`
  GENERATION_ONLY         KV was put into blocks reserved with `kv.reserve`; Tokens*, the last with `finish`
  CONTEXT_AND_GENERATION  PrefillBegan, PrefillChunk*, Tokens*, the last with `finish`
and at any time instead: Rejected (never begun, given up, or failed: the engine holds nothing of it), or,
after `cancel` or `release`, Drained. After the last event of a key (Rejected, Drained, Tokens with `finish`)
its blocks are free. Each accepted key gets exactly one last event.

An engine that moves its KV itself (`kv` is None) is a SelfMovingEngine. It tells PrefillBegan (without blocks) together
with PrefillDone or the first Tokens; of GENERATION_ONLY it tells KVArrived before the first Tokens, and until then a
Rejected means that the KV did not come. What it may still hold of a key after its Rejected counts in its load.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import PoolAddress, SharedPool
from trtpd.runtime.core.events import Capabilities, Drained, FinishReason, Load, Rejected, Tokens

Key = tuple[int, int]


class RequestKind(StrEnum):
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"
    CONTEXT_AND_GENERATION = "context_and_generation"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. temperature 0 is greedy. Draws depend on (seed, output index) alone.

    Ranges: temperature >= 0; top_k >= 0 (0: all); 0 < top_p <= 1. `end_ids` end the answer and are emitted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    log_probs: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an engine sees it.

    `prompt_ids` is the whole context: the user's prompt and, after a failover, the accepted output tokens, of
    which there are `first_index`; the next token drawn has output index `first_index`. `max_tokens` bounds
    the output as a whole, earlier tokens included. For GENERATION_ONLY `first_token` (output index
    `first_index`) was drawn by prefill and reported; it is not in the KV yet, and the first Tokens event
    starts at first_index + 1. `hand_off` comes with GENERATION_ONLY to an engine that moves its KV itself: the state
    that the prefilling engine gave.
    """

    request_id: int
    attempt: int
    kind: RequestKind
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    first_index: int = 0
    first_token: int | None = None
    hand_off: bytes = b""

    @property
    def key(self) -> Key:
        return (self.request_id, self.attempt)


class PrefillBegan(msgspec.Struct, frozen=True, kw_only=True):
    """Admitted: `blocks` are reserved for the whole prompt, in prompt order; the first chunk runs next."""

    request_id: int
    attempt: int
    blocks: tuple[int, ...]


class PrefillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """KV of the first `ready_tokens` tokens is final and will not be written again."""

    request_id: int
    attempt: int
    ready_tokens: int


class PrefillDone(msgspec.Struct, frozen=True, kw_only=True):
    """The token at output index `first_index` was drawn. KV is held until `release` or `cancel`."""

    request_id: int
    attempt: int
    first_index: int
    token: int
    log_prob: float | None
    finish: FinishReason | None


class KVArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A SelfMovingEngine has fetched the KV of a GENERATION_ONLY request."""

    request_id: int
    attempt: int
    bytes_moved: int
    seconds: float


EngineEvent = PrefillBegan | PrefillChunk | PrefillDone | KVArrived | Tokens | Drained | Rejected


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one `poll` brought about, and the load afterwards."""

    events: tuple[EngineEvent, ...]
    load: Load


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine can take. `max_seq_tokens` bounds prompt + output of one sequence."""

    max_seq_tokens: int
    max_batch: int
    max_step_tokens: int
    kv_blocks: int
    tokens_per_block: int
    vocab_size: int


class PagedKV(Protocol):
    """The engine's KV blocks, for a transport of ours. Called from the engine thread only."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def pool(self) -> SharedPool:
        """The memory of this rank. Owned by the engine; gone after `Engine.shutdown`."""

    @property
    def others(self) -> tuple[PoolAddress, ...]:
        """The pools of the group's other ranks, if this engine has any; blocks have the same numbers there."""

    def reserve(self, key: Key, tokens: int, *, peak_tokens: int | None = None) -> tuple[int, ...] | None:
        """Blocks for a sequence that will come by transfer: for `tokens` prompt tokens and the first token
        to be decoded. None when there is no room now. The key must then be submitted or freed.

        `peak_tokens` (prompt + output at most) is what room is kept for, so that the sequence can't die for
        lack of blocks; where it isn't given, the longest sequence the engine takes.
        """

    def free(self, key: Key) -> None:
        """Gives reserved blocks back before `submit`. Idempotent."""


class Engine(Protocol):
    """See the module's docstring. All methods from one thread."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def kv(self) -> PagedKV | None:
        """None where the engine moves its KV itself."""

    def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError for one that could never run here (too long, a token id out
        of range, sampling out of range, unknown key for GENERATION_ONLY); then nothing was accepted."""

    def cancel(self, key: Key) -> None:
        """Stops it before its next step. `Drained` follows from `poll`. Unknown keys are ignored."""

    def release(self, key: Key) -> None:
        """Frees the KV held after PrefillDone. `Drained` follows from `poll`. Unknown keys are ignored."""

    def poll(self, timeout_s: float) -> StepReport:
        """Runs at most one step; without work waits up to `timeout_s` and returns. A failed step rejects the
        requests in it and leaves the others; raises EngineError only when the engine can't go on."""

    def wake(self) -> None:
        """Ends a waiting `poll` early. The one method that may be called from any thread."""

    def check_integrity(self) -> None:
        """Raises InternalError if blocks, sequences and holds don't add up. Cheap enough for tests after
        every step."""

    def shutdown(self) -> None:
        """Frees everything, shared memory included. Idempotent."""


@runtime_checkable
class SelfMovingEngine(Engine, Protocol):
    """An engine that moves its KV itself; the transport is "opaque". `kv` is None."""

    @property
    def layout(self) -> KVLayout:
        """By which two such engines know that they can exchange KV."""

    def hand_off_of(self, key: Key) -> bytes:
        """The state another engine of its kind fetches the KV by, from PrefillDone until the key's last event."""

    def has_room(self, tokens: int) -> bool:
        """Whether a sequence that grows to so many tokens fits beside what is promised already."""


class RankFollower(Protocol):
    """A rank of a group other than the first."""

    def run(self) -> None:
        """Computes what the first rank tells it, until that dismisses it. Raises EngineError."""

    def close(self) -> None:
        """Lets go of everything. Idempotent."""


def validate_sampling(sampling: Sampling) -> Sequence[str]:
    """What is wrong with it, one phrase each; empty if nothing is."""
    faults = []
    if not 0.0 <= sampling.temperature <= 100.0:
        faults.append(f"temperature is {sampling.temperature}; it must lie between 0 (greedy) and 100")
    if sampling.top_k < 0:
        faults.append(f"top_k is {sampling.top_k}; it must be at least 0 (0 keeps all)")
    if not 0.0 < sampling.top_p <= 1.0:
        faults.append(f"top_p is {sampling.top_p}; it must lie above 0 and up to 1")
    return faults
