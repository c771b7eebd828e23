"""Backend: one TensorRT-LLM executor behind one small seam, whichever of its two Python interfaces drives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trtpd.errors import EngineError, RequestError, TrtpdError
from trtpd.runtime.engine.base import RequestKind, Sampling
from trtpd.runtime.engine.tensorrt_llm.hand_off import HandOff

Finish = Literal["stop", "length", "cancelled", "timed_out"]
Stage = Literal["queued", "active", "complete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A request for the executor. `max_tokens` counts what it is to report itself: for GENERATION_ONLY that includes
    the first token, which it reports again."""

    kind: RequestKind
    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling
    hand_off: HandOff | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the executor says of one of its requests: new tokens, and with the last answer (`final`) how it ended.

    `log_probs` is empty or as long as `ids`. `error` is its message for a request that failed; that is final too.
    """

    id: int
    final: bool
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish: Finish | None = None
    hand_off: HandOff | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One request in one iteration. `tokens` are those whose KV is there, `context_tokens` those of them that belong
    to the prompt. `blocks` is what the executor counted for it, as far as it says."""

    stage: Stage
    context_tokens: int
    tokens: int
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Statistics of one iteration. `used_blocks` includes those of context requests whose KV nobody has fetched yet,
    which are no longer among `uses`."""

    used_blocks: int
    pool_blocks: int
    seconds: float
    tokens: int
    uses: Mapping[int, Use] = field(default_factory=dict)


class Backend(Protocol):
    """`answers` and `iterations` are called from one thread, the rest from another. Errors of the executor come out as
    ours: RequestError from `start` for a request it refuses at once, EngineError for anything else."""

    @property
    def cancels_held(self) -> bool:
        """Whether `cancel` reaches a context request whose KV waits to be fetched."""

    @property
    def cancels_fetching(self) -> bool:
        """Whether `cancel` may come while a generation request's KV is on its way. If not, its blocks would be given
        to others while they are still being written."""

    @property
    def ids_in_statistics(self) -> bool:
        """Whether statistics name requests as `start` does. If not, only a held one is found there, by its hand-off's
        req_id."""

    def start(self, start: Start) -> int:
        """Queues a request; its id here, never used twice."""

    def cancel(self, request_id: int) -> None:
        """A final answer follows, unless it has been given. Unknown ids are ignored."""

    def answers(self, timeout_s: float) -> list[Answer]:
        """Waits up to `timeout_s` for some."""

    def iterations(self) -> list[Iteration]:
        """Those since the last call, oldest first. Doesn't wait."""

    def forget(self, request_id: int) -> None:
        """Nothing will be asked of it any more."""

    def close(self) -> None:
        """Ends the executor, in a group on all ranks. Nothing may be running. Idempotent."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of TensorRT-LLM as EngineError. It raises plain RuntimeError mostly, but any class of Python's."""
    try:
        yield
    except TrtpdError:
        raise
    except Exception as error:
        raise EngineError(f"TensorRT-LLM: {what} failed: {one_line(error)}") from error


@contextmanager
def translated_request() -> Iterator[None]:
    """What TensorRT-LLM says of a request that it refuses, as RequestError."""
    try:
        yield
    except TrtpdError:
        raise
    except Exception as error:
        raise RequestError(f"TensorRT-LLM refuses it: {one_line(error)}") from error


def one_line(error: BaseException | str) -> str:
    """The first line that says something, without the source location and stack that TensorRT-LLM adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else repr(error)
    return text[:400]
