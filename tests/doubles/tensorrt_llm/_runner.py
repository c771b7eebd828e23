"""Runner: the stand-in's execution loop. It has the habits of the real one that an adapter must live with.

- While no request is active it waits for a new one, and looks at nothing else: neither at KV that was fetched, nor at
  time limits, nor at cancelled ids.
- A context request is over with its answer. Its KV stays until a peer has fetched it or its time limit has passed; a
  cancelled id that isn't active is kept and never found (`cancels_held`: not so in the LLM class).
- A generation request reports the first token again, and waits for its KV as long as it takes. Cancelled meanwhile it
  gives its blocks back at once, and what still comes in is written into them, whosever they are by then: counted as
  corrupted (`cancels_held`: the LLM class waits).
- A too long prompt is an error answer, a too long answer is cut to what fits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._engine import Limits
from tensorrt_llm._stats import CountsFile, IterationRow, Stats
from tensorrt_llm._transceiver import FetchError, Held, Transceiver
from trtpd.errors import EngineError, RequestError
from trtpd.runtime.core.events import Drained, Rejected, Tokens
from trtpd.runtime.engine.base import (
    EngineEvent,
    EngineRequest,
    Key,
    PrefillBegan,
    PrefillChunk,
    PrefillDone,
    RequestKind,
    Sampling,
)
from trtpd.runtime.engine.shell import ScheduledEngine

Handed = tuple[list[int], int, bytes | None]
IDLE_S = 0.002
"""How long a turn waits that has nothing to compute."""


@dataclass(frozen=True)
class Call:
    """A request as it was put in."""

    kind: str
    ids: tuple[int, ...]
    max_tokens: int
    streaming: bool
    echo: bool
    log_probs: bool
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    handed: Handed | None = None


@dataclass(frozen=True)
class Outcome:
    """A result. `finish` is a name of FinishReason; `handed` is (first token, request id, state)."""

    id: int
    final: bool
    finish: str
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    count: int = 0
    handed: tuple[int, int, bytes] | None = None


@dataclass(frozen=True)
class Fault:
    """An error in place of a result."""

    id: int
    message: str


@dataclass
class Active:
    """A request that has not had its last answer. `fetch` is the thread that brings its KV."""

    id: int
    call: Call
    max_tokens: int
    stage: str = "QUEUED"
    position: int = 0
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    fetch: threading.Thread | None = None
    fetch_error: str | None = None
    joined: bool = False
    blocks: int = 0
    freed_early: bool = False
    ended: bool = False

    @property
    def key(self) -> Key:
        return (self.id, 1)


class Runner:
    """One executor on its leader. `engine` is used by the loop's thread alone."""

    def __init__(
        self,
        engine: ScheduledEngine,
        limits: Limits,
        *,
        transceiver: bool,
        timeout_s: float | None,
        buffer_tokens: int | None,
        nixl: bool,
        cancels_held: bool,
        iterations_kept: int,
        requests_kept: int,
        first_id: int = 1,
    ) -> None:
        self.stats = Stats(iterations_kept, requests_kept)
        self._engine, self._limits = engine, limits
        self._transceiver = Transceiver(engine.kv) if transceiver else None
        self._timeout_s, self._cancels_held = timeout_s, cancels_held
        self._buffer_tokens = buffer_tokens if nixl else None
        self._lock = threading.Condition()
        self._new: deque[tuple[int, Call]] = deque()
        self._cancelled: set[int] = set()
        self._ready: dict[int, list[Outcome | Fault]] = {}
        self._next_id = first_id
        self._shutdown = False
        self._active: dict[int, Active] = {}
        self._finished: list[Active] = []
        self._iteration = 0
        self._corrupted = 0
        self._counts = CountsFile()
        self._thread = threading.Thread(target=self._run, name="executionLoop", daemon=True)
        self._thread.start()

    def enqueue(self, call: Call) -> int:
        """Raises RuntimeError for a request that can't be."""
        if call.kind == "generation_only" and (call.handed is None or call.handed[2] is None):
            raise RuntimeError("contextPhaseParams must be set for a generation only request")
        if any(len(word) != 1 for word in call.stop_words):
            raise RuntimeError("the stand-in knows stop words of one token only")
        with self._lock:
            if self._shutdown:
                raise RuntimeError("[TensorRT-LLM][ERROR] Shutdown called, cannot enqueue requests")
            request_id, self._next_id = self._next_id, self._next_id + 1
            self._new.append((request_id, call))
            self._lock.notify_all()
            return request_id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self._cancelled.add(request_id)

    def outcomes(self, timeout_s: float | None) -> list[Outcome | Fault]:
        with self._lock:
            self._lock.wait_for(lambda: bool(self._ready), timeout_s)
            found = [outcome for outcomes in self._ready.values() for outcome in outcomes]
            self._ready.clear()
            return found

    def ready(self, request_id: int | None) -> int:
        with self._lock:
            return sum(len(found) for key, found in self._ready.items() if request_id in (None, key))

    def shutdown(self) -> None:
        """Waits until what is active has ended. Idempotent."""
        with self._lock:
            self._shutdown = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._shutdown or self._active:
                self._turn()
        finally:
            if self._transceiver is not None:
                self._transceiver.close()
            self._engine.shutdown()
            self._counts.write(active=0, held=0, used_blocks=0, corrupted=self._corrupted)

    def _turn(self) -> None:
        if self._active:
            self._end_cancelled()
            self._step()
            self._report()
        self._let_go_of_held()
        self._count()
        with self._lock:
            if not self._active and not self._shutdown:
                self._lock.wait_for(lambda: self._new or self._shutdown)
            new = list(self._new)
            self._new.clear()
        for request_id, call in new:
            self._begin(request_id, call)

    def _say(self, outcome: Outcome | Fault) -> None:
        with self._lock:
            self._ready.setdefault(outcome.id, []).append(outcome)
            self._lock.notify_all()

    def _fail(self, active: Active, message: str) -> None:
        self._say(Fault(active.id, message))
        self._finish(active)

    def _finish(self, active: Active) -> None:
        active.ended = True
        active.stage = "GENERATION_COMPLETE"
        if self._active.pop(active.id, None) is not None:
            self._finished.append(active)

    def _begin(self, request_id: int, call: Call) -> None:
        tokens, limits = len(call.ids), self._limits
        active = Active(request_id, call, min(call.max_tokens, limits.max_seq_len - tokens))
        self._active[request_id] = active
        if tokens > limits.max_input_len:
            self._fail(
                active,
                f"Prompt length ({tokens}) exceeds maximum input length ({limits.max_input_len}). Set log level to "
                "info and check TRTGptModel logs for how maximum input length is set",
            )
        elif call.kind != "context_and_generation" and self._transceiver is None:
            self._fail(
                active,
                "Disaggregated serving is not enabled, please check the configuration of cacheTransceiverConfig.",
            )
        elif call.kind != "context_and_generation" and tokens > (self._buffer_tokens or tokens):
            self._fail(active, f"the transfer of {tokens} tokens is larger than NIXL's buffer")
        elif call.kind == "generation_only":
            self._check_handed(active)
        else:
            self._submit(active, RequestKind(call.kind))

    def _check_handed(self, active: Active) -> None:
        assert active.call.handed is not None
        assert self._transceiver is not None
        try:
            self._transceiver.check(active.call.handed[2] or b"")
        except FetchError as error:
            self._fail(active, str(error))

    def _submit(self, active: Active, kind: RequestKind, first_token: int | None = None) -> None:
        call = active.call
        ends = {word[0] for word in call.stop_words} | ({call.end_id} if call.end_id is not None else set())
        request = EngineRequest(
            request_id=active.id,
            attempt=1,
            kind=kind,
            prompt_ids=call.ids,
            max_tokens=active.max_tokens,
            sampling=_sampling(call, frozenset(ends), draws_again=first_token is not None),
            first_token=first_token,
        )
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._engine.kv.free(active.key)
            self._fail(active, f"[TensorRT-LLM][ERROR] {error}")

    def _end_cancelled(self) -> None:
        """Only active requests are looked at; ids that are none of them stay."""
        with self._lock:
            found = self._cancelled & self._active.keys()
            self._cancelled -= found
        for request_id in found:
            active = self._active[request_id]
            active.ended = True
            if active.fetch is not None and not active.joined:
                if self._cancels_held:
                    active.fetch.join()
                active.freed_early = active.fetch.is_alive()
                self._engine.kv.free(active.key)
            elif active.call.kind == "generation_only" and not active.joined:
                pass  # it has nothing yet
            else:
                self._engine.cancel(active.key)
            self._say(Outcome(request_id, True, "CANCELLED"))
            self._finish(active)

    def _step(self) -> None:
        for active in list(self._active.values()):
            if active.call.kind == "generation_only" and not active.joined and not active.ended:
                self._see_to_fetch(active)
        try:
            report = self._engine.poll(IDLE_S)
        except EngineError as error:
            for active in list(self._active.values()):
                self._fail(active, f"Encountered an error in forwardAsync function: {error}")
            return
        for event in report.events:
            found = self._active.get(event.request_id)
            if found is not None and not found.ended:
                self._on_event(found, event)

    def _see_to_fetch(self, active: Active) -> None:
        assert active.call.handed is not None
        first, request_id, state = active.call.handed
        assert state is not None
        tokens = len(active.call.ids)
        if active.fetch is None:
            blocks = self._engine.kv.reserve(active.key, tokens, peak_tokens=tokens + active.max_tokens)
            if blocks is None:
                return
            active.stage, active.blocks = "CONTEXT_IN_PROGRESS", len(blocks)
            needed = blocks[: self._engine.kv.layout.blocks_for(tokens)]
            active.fetch = threading.Thread(target=self._fetch, args=(active, state, request_id, needed), daemon=True)
            active.fetch.start()
        elif not active.fetch.is_alive():
            if active.fetch_error is not None:
                self._engine.kv.free(active.key)
                self._fail(active, active.fetch_error)
                return
            active.joined = True
            active.stage, active.position = "GENERATION_IN_PROGRESS", tokens
            self._tell(active, first[:1], ())
            if active.max_tokens <= 1:
                self._engine.kv.free(active.key)
                self._end(active, "LENGTH")
            else:
                self._submit(active, RequestKind.GENERATION_ONLY, first[0])

    def _fetch(self, active: Active, state: bytes, request_id: int, blocks: tuple[int, ...]) -> None:
        assert self._transceiver is not None

        def stop() -> bool:
            return self._shutdown or (self._cancels_held and active.ended)

        try:
            self._transceiver.fetch(state, request_id, blocks, len(active.call.ids), stop=stop)
            self._corrupted += active.freed_early
        except FetchError as error:
            active.fetch_error = str(error)

    def _on_event(self, active: Active, event: EngineEvent) -> None:
        if isinstance(event, PrefillBegan):
            active.stage, active.blocks = "CONTEXT_IN_PROGRESS", len(event.blocks)
        elif isinstance(event, PrefillChunk):
            active.position = event.ready_tokens
        elif isinstance(event, PrefillDone):
            self._hold(active, event)
        elif isinstance(event, Rejected):
            self._fail(active, f"Encountered an error in forwardSync function: {event.reason}")
        elif isinstance(event, Tokens):
            active.stage, active.position = "GENERATION_IN_PROGRESS", len(active.call.ids)
            ids, probs, finish = event.ids, event.log_probs, event.finish
            if finish == "stop" and ids[-1] == active.call.end_id and (ids[-1],) not in active.call.stop_words:
                self._tell(active, ids[:-1], probs[:-1])
                self._end(active, "END_ID")
                return
            self._tell(active, ids, probs, "" if finish is None else "STOP_WORDS" if finish == "stop" else "LENGTH")
        else:
            assert isinstance(event, Drained)

    def _hold(self, active: Active, event: PrefillDone) -> None:
        assert self._transceiver is not None
        blocks = tuple(self._engine.kv.blocks_of(active.key))
        tokens = len(active.call.ids)
        active.position = tokens
        self._transceiver.hold(active.id, Held(active.key, blocks, tokens, time.monotonic()))
        probs = () if event.log_prob is None else (event.log_prob,)
        handed = (event.token, active.id, self._transceiver.state())
        self._say(Outcome(active.id, True, "LENGTH", (event.token,), probs, 1, handed))
        self._finish(active)

    def _tell(self, active: Active, ids: Iterable[int], log_probs: Iterable[float], finish: str = "") -> None:
        """New tokens; a request that doesn't stream hears of all of them at its end."""
        new = tuple(ids)
        active.ids += new
        active.log_probs += log_probs
        if finish:
            self._end(active, finish, new)
        elif active.call.streaming and new:
            probs = tuple(active.log_probs) if active.call.log_probs else ()
            self._say(Outcome(active.id, False, "NOT_FINISHED", new, probs, len(active.ids)))

    def _end(self, active: Active, finish: str, new: tuple[int, ...] = ()) -> None:
        whole = (*active.call.ids, *active.ids) if active.call.echo else tuple(active.ids)
        ids = new if active.call.streaming else whole
        probs = tuple(active.log_probs) if active.call.log_probs else ()
        self._say(Outcome(active.id, True, finish, ids, probs, len(active.ids)))
        self._finish(active)

    def _let_go_of_held(self) -> None:
        """What was fetched, has passed its time limit or, in the LLM class, was cancelled."""
        if self._transceiver is None:
            return
        now_s = time.monotonic()
        for request_id, held in self._transceiver.held().items():
            late = self._timeout_s is not None and now_s - held.since_s > self._timeout_s
            cancelled = self._cancels_held and request_id in self._cancelled
            if (held.fetched or late or cancelled) and self._transceiver.let_go(request_id):
                self._engine.release(held.key)
                self._cancelled.discard(request_id)

    def _used_blocks(self) -> int:
        allocator: Any = self._engine.kv._allocator
        return sum(len(allocator.blocks_of(key)) for key in allocator.owners())

    def _count(self) -> None:
        held = 0 if self._transceiver is None else len(self._transceiver.held())
        used = self._used_blocks()
        self._counts.write(active=len(self._active), held=held, used_blocks=used, corrupted=self._corrupted)

    def _report(self) -> None:
        self._iteration += 1
        used, limits = self._used_blocks(), self._limits
        running = [one for one in self._active.values() if one.stage != "QUEUED"]
        context = [one for one in running if one.stage == "CONTEXT_IN_PROGRESS"]
        finished, self._finished = self._finished, []
        self.stats.add(
            IterationRow(
                plain={
                    "iter": self._iteration, "iter_latency_ms": 1.0, "num_active_requests": len(self._active),
                    "num_queued_requests": len(self._active) - len(running), "num_completed_requests": len(finished),
                    "max_num_active_requests": limits.max_batch_size, "timestamp": "01-01-2026 00:00:00.000000",
                },
                kv={
                    "max_num_blocks": limits.kv_blocks, "free_num_blocks": limits.kv_blocks - used,
                    "used_num_blocks": used, "tokens_per_block": limits.tokens_per_block,
                },
                batch={
                    "num_scheduled_requests": len(running), "num_context_requests": len(context),
                    "num_gen_requests": len(running) - len(context), "num_paused_requests": 0,
                    "num_ctx_tokens": sum(len(one.call.ids) - one.position for one in context), "micro_batch_id": 0,
                },
                requests=[_request_stats(one) for one in (*self._active.values(), *finished)],
            )
        )  # fmt: skip


def _request_stats(active: Active) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": active.id, "stage": active.stage, "context_prefill_position": active.position,
        "num_generated_tokens": len(active.ids), "avg_num_decoded_tokens_per_iter": 1.0,
        "scheduled": active.stage != "QUEUED", "paused": False, "alloc_total_blocks_per_request": active.blocks,
        "alloc_new_blocks_per_request": active.blocks, "reused_blocks_per_request": 0,
    }  # fmt: skip
    return found


def _sampling(call: Call, ends: frozenset[int], *, draws_again: bool) -> Sampling:
    """As the decoder reads it: top-k 1 where nothing says otherwise. A generation request draws from its own start of
    the random sequence, not from where its context request left off."""
    seed = (call.seed or 0) + (1 if draws_again else 0)
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.0 if call.repetition_penalty is None else call.repetition_penalty,
        "presence_penalty": call.presence_penalty or 0.0,
        "frequency_penalty": call.frequency_penalty or 0.0,
        "bad_words": call.bad_words,
    }
    if call.top_k == 1 or (call.top_k is None and call.top_p is None) or call.temperature == 0:
        return Sampling(seed=seed, end_ids=tuple(ends), log_probs=call.log_probs, **penalties)
    return Sampling(
        temperature=1.0 if call.temperature is None else call.temperature,
        top_k=call.top_k or 0,
        top_p=call.top_p or 1.0,
        min_p=call.min_p or 0.0,
        seed=seed & ((1 << 63) - 1),
        end_ids=tuple(ends),
        log_probs=call.log_probs,
        **penalties,
    )
