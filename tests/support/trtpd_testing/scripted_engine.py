"""An engine, a source and a sink that do what a test tells them, for tests of the leader alone."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from trtpd.errors import InternalError, RequestError
from trtpd.kv_transfer.base import Key, PullResult, Visits
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.pool import PoolAddress
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineEvent, EngineLimits, EngineRequest, StepReport
from trtpd.runtime.worker.leader_link import InboxItem, Registered
from trtpd.runtime.worker.messages import StepMessage, step_events

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=2, tokens_per_block=4, dtype="f32")


class ScriptedKV:
    """Counts blocks; there is no memory behind them."""

    layout = LAYOUT
    pool: Any = None
    others: tuple[PoolAddress, ...] = ()

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reserved: dict[Key, int] = {}
        self.present = 0

    @property
    def blocks_free(self) -> int:
        return self.num_blocks - sum(self.reserved.values())

    def reserve(
        self, key: Key, tokens: int, *, peak_tokens: int | None = None, prompt_ids: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        if key in self.reserved:
            raise InternalError(f"{key} has blocks already")
        count = LAYOUT.blocks_for(tokens + 1)
        if count > self.blocks_free:
            return None
        self.reserved[key] = count
        return tuple(range(count))

    def present_blocks(self, key: Key) -> int:
        return self.present

    def free(self, key: Key) -> None:
        self.reserved.pop(key, None)


class ScriptedEngine:
    """Reports what was put into `script`; answers cancel and release with Drained in the next poll."""

    capabilities = core.Capabilities()
    limits = EngineLimits(
        max_seq_tokens=64, max_batch=4, max_step_tokens=16, kv_blocks=16, tokens_per_block=4, vocab_size=100
    )

    def __init__(self, kv_blocks: int = 16) -> None:
        self.kv: ScriptedKV | None = ScriptedKV(kv_blocks)
        self.script: list[EngineEvent | Exception] = []
        self.submitted: list[EngineRequest] = []
        self.calls: list[tuple[str, Key]] = []
        self.alive: set[Key] = set()
        self.timeouts_s: list[float] = []

    def submit(self, request: EngineRequest) -> None:
        if any(not 0 <= token < self.limits.vocab_size for token in request.prompt_ids):
            raise RequestError("a token id is out of range")
        self.submitted.append(request)
        self.alive.add(request.key)

    def cancel(self, key: Key) -> None:
        self._stop("cancel", key)

    def release(self, key: Key) -> None:
        self._stop("release", key)

    def _stop(self, how: str, key: Key) -> None:
        self.calls.append((how, key))
        if key in self.alive:
            self.script.append(core.Drained(request_id=key[0], attempt=key[1]))

    def poll(self, timeout_s: float) -> StepReport:
        self.timeouts_s.append(timeout_s)
        script, self.script = self.script, []
        events: list[EngineEvent] = []
        for item in script:
            if isinstance(item, Exception):
                raise item
            events.append(item)
            key = (item.request_id, item.attempt)
            if isinstance(item, core.Drained | core.Rejected) or getattr(item, "finish", None) is not None:
                if not isinstance(item, core.Drained | core.Rejected | core.Tokens):
                    continue
                self.alive.discard(key)
                if self.kv is not None:
                    self.kv.free(key)
        free = self.kv.blocks_free if self.kv is not None else 0
        return StepReport(events=tuple(events), load=core.Load(kv_blocks_free=free, running=len(self.alive)))

    def wake(self) -> None: ...

    def check_integrity(self) -> None: ...

    def shutdown(self) -> None: ...


class ScriptedSource:
    """Holds are names only. `lapse` makes leases end."""

    def __init__(self) -> None:
        self.held: dict[Key, int] = {}
        self.published: list[tuple[Key, int]] = []
        self.lapse: list[Key] = []
        self.refusal: Exception | None = None
        self.came = Visits()

    def visits(self) -> Visits:
        return self.came

    def offer(self, key: Key, *, prompt_tokens: int, blocks: Sequence[int]) -> Offer:
        if self.refusal is not None:
            raise self.refusal
        self.held[key] = len(blocks)
        return Offer(
            request_id=key[0],
            attempt=key[1],
            generation="g",
            instance="prefill_0",
            transport="shm",
            layout=LAYOUT,
            prompt_tokens=prompt_tokens,
            blocks=tuple(blocks),
            epochs=(0,) * len(blocks),
            address=b"",
            lease_s=5.0,
        )

    def publish(self, key: Key, *, ready_tokens: int) -> Chunk:
        self.published.append((key, ready_tokens))
        return Chunk(request_id=key[0], attempt=key[1], ready_tokens=ready_tokens)

    def seal(self, key: Key, *, first_token: int, first_log_prob: float | None, seed: int) -> Seal:
        return Seal(
            request_id=key[0],
            attempt=key[1],
            prompt_tokens=1,
            first_token=first_token,
            first_log_prob=first_log_prob,
            seed=seed,
        )

    def end(self, key: Key) -> bool:
        return self.held.pop(key, None) is not None

    def lapsed(self, now_s: float) -> list[Key]:
        lapse, self.lapse = self.lapse, []
        for key in lapse:
            del self.held[key]
        return lapse

    def holds(self) -> dict[Key, int]:
        return dict(self.held)

    def close(self) -> None:
        self.held.clear()


class ScriptedSink:
    """Pulls end when the test says so with `finish`, aborted ones when it says `settle`."""

    def __init__(self) -> None:
        self.pulling: dict[Key, Sequence[int]] = {}
        self.aborted: list[Key] = []
        self.chunks: list[Chunk] = []
        self.seals: list[Seal] = []
        self.refusal: Exception | None = None
        self.present = 0
        self._results: list[PullResult] = []

    def handshake(self, offer: Offer) -> None: ...

    def begin(self, offer: Offer, blocks: Sequence[int], *, present: int = 0) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.present = present
        self.pulling[(offer.request_id, offer.attempt)] = blocks

    def ready(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def sealed(self, seal: Seal) -> None:
        self.seals.append(seal)

    def abort(self, key: Key) -> None:
        self.aborted.append(key)

    def settle(self) -> None:
        """The copies of aborted pulls have come to rest."""
        for key in self.aborted:
            self.finish(key, error="aborted", code="aborted")
        self.aborted = []

    def finish(self, key: Key, *, error: str | None = None, code: str = "", retryable: bool = False) -> None:
        del self.pulling[key]
        self._results.append(
            PullResult(
                key=key,
                bytes_moved=64,
                chunks=1,
                seconds=0.01,
                exposed_s=0.0,
                path="shm",
                error=error,
                code=code,
                retryable=retryable,
            )
        )

    def progress(self) -> list[PullResult]:
        results, self._results = self._results, []
        return results

    def busy(self) -> bool:
        return bool(self.pulling)

    def close(self) -> None: ...


class ScriptedLink:
    """A registered link without a router: the test puts items in `inbox` and reads `sent`."""

    def __init__(self) -> None:
        self.busy_since_s: float | None = None
        self.inbox: collections.deque[InboxItem] = collections.deque([Registered("e1", "g1")])
        self.sent: list[tuple[StepMessage, str]] = []

    def send(self, message: StepMessage, generation: str) -> None:
        self.sent.append((message, generation))

    def drain(self) -> Iterator[InboxItem]:
        while self.inbox:
            yield self.inbox.popleft()

    def check(self) -> None: ...

    def events(self) -> list[Any]:
        """Everything told so far; forgets it."""
        told = [event for message, _ in self.sent for event in step_events(message)]
        self.sent = []
        return told
