"""The Engine seam: an executor, shaped after TensorRT-LLM's, that a leader drives from one thread.

A leader calls `submit` and `cancel` between steps and `poll` for the next step. Events come only from `poll`.
Keys are (request_id, attempt). What an engine can't do is in its `Capabilities`, never guessed from its name.

Life of a key
  CONTEXT_ONLY            PrefillBegan, PrefillChunk*, PrefillDone; then the engine HOLDS its KV: `release`
  GENERATION_ONLY         KV was put into blocks reserved with `kv.reserve`; Tokens*, the last with `finish`
  CONTEXT_AND_GENERATION  PrefillBegan, PrefillChunk*, Tokens*, the last with `finish`
with Preempted in between where the engine took a sequence's blocks for others and computes its KV anew later (never
of CONTEXT_ONLY), and at any time instead: Rejected (never begun, given up, or failed: the engine holds nothing of it),
or, after `cancel` or `release`, Drained. After the last event of a key (Rejected, Drained, Tokens with `finish`)
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
from trtpd.runtime.core.events import Capabilities, Drained, FinishReason, Load, Preempted, Rejected, Tokens

Key = tuple[int, int]


class RequestKind(StrEnum):
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"
    CONTEXT_AND_GENERATION = "context_and_generation"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. temperature 0 is greedy. Draws depend on (seed, output index, tokens so far) alone.

    In this order logits are changed by the penalties, `logit_bias` (token, what is added), and what may not come:
    the last token of each of `bad_words` where the others come right before it, and `end_ids` below output index
    `min_tokens`. Then temperature, `top_k` (0: all), `top_p` and `min_p` (0: all; else tokens with at least that
    share of the likeliest one's probability) say what is drawn from.

    `repetition_penalty` divides positive and multiplies negative logits of tokens that came before, in the prompt or
    the answer; `presence_penalty` is taken once off tokens that came, `frequency_penalty` as often as they came, both
    without the first `prompt_ignore_length` tokens of the prompt.

    `end_ids` end the answer and are emitted. `log_probs` asks for the log-probability of each drawn token,
    `top_log_probs` for so many of the likeliest ones: both of the model's own distribution, before any of the above.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    log_probs: bool = False
    top_log_probs: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens came before, and how often."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an engine sees it.

    `prompt_ids` is the whole context: the user's prompt and, after a failover, the accepted output tokens, of
    which there are `first_index`; the next token drawn has output index `first_index`. `max_tokens` bounds
    the output as a whole, earlier tokens included. For GENERATION_ONLY `first_token` (output index
    `first_index`) was drawn by prefill and reported; it is not in the KV yet, and the first Tokens event
    starts at first_index + 1. Of the lowest `priority` the youngest is preempted first. With `reuse` false its KV
    neither comes from the prefix cache nor goes there (KV that is no model's, and prompts that measure a prefill).
    `hand_off` comes with GENERATION_ONLY to an engine that moves its KV itself: the state that the prefilling one gave.
    """

    request_id: int
    attempt: int
    kind: RequestKind
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    first_index: int = 0
    first_token: int | None = None
    priority: int = 0
    reuse: bool = True
    hand_off: bytes = b""

    @property
    def key(self) -> Key:
        return (self.request_id, self.attempt)


class PrefillBegan(msgspec.Struct, frozen=True, kw_only=True):
    """Admitted: `blocks` are reserved for the whole prompt, in prompt order; the first chunk runs next. KV of the
    first `cached_tokens` tokens is there already: a PrefillChunk follows that says so."""

    request_id: int
    attempt: int
    blocks: tuple[int, ...]
    cached_tokens: int = 0


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
    top_log_probs: tuple[tuple[int, float], ...] = ()


class KVArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A SelfMovingEngine has fetched the KV of a GENERATION_ONLY request."""

    request_id: int
    attempt: int
    bytes_moved: int
    seconds: float


EngineEvent = PrefillBegan | PrefillChunk | PrefillDone | KVArrived | Tokens | Preempted | Drained | Rejected


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

    def reserve(
        self, key: Key, tokens: int, *, peak_tokens: int | None = None, prompt_ids: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """Blocks for a sequence that will come by transfer: for `tokens` prompt tokens and the first token
        to be decoded. None when there is no room now. The key must then be submitted or freed.

        `peak_tokens` (prompt + output at most) is what it may grow to; where it isn't given, the longest sequence the
        engine takes. With `prompt_ids`, blocks that hold a beginning of this prompt are shared: they come first, see
        `present_blocks`, and must not be written.
        """

    def present_blocks(self, key: Key) -> int:
        """How many of the first blocks reserved for this key hold their KV already."""

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
