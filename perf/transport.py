"""The seam between the measuring client and a protocol: prepare a request, send it, report each arrival at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trtpd.perf.records import ServerTimes, State

Arrived = Callable[[int], None]
"""Called the moment a response with so many tokens is there, before anything else is done with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, ready to be put into a protocol. `kv_tokens` is the prompt's length, for a stage that is given
    no text; targets and `timeout_s` are for servers that take them."""

    prompt: str
    kv_tokens: int
    max_tokens: int
    timeout_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ended. `output_tokens`: as the server counted them, None if it didn't say."""

    state: State
    reason: str = ""
    message: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    server: ServerTimes | None = None


class Transport(Protocol):
    """One server. All calls from one event loop; `send` may run thousands of times at once."""

    async def open(self) -> None:
        """Raises ServeError if the server can't be reached or doesn't serve this."""

    def prepare(self, question: Question) -> bytes:
        """The bytes of the request, made before it is due. After `open`."""

    async def send(self, request: bytes, arrived: Arrived) -> Ending:
        """Until the answer has ended. Whatever the server or the network does is an Ending, never an exception;
        cancelling the task cancels the request."""

    async def close(self) -> None:
        """Lets go of all connections."""
