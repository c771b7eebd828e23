"""TensorRTEngine: the Engine seam over a TensorRT-LLM executor, which schedules, batches and moves its KV by itself.

What it can't do, and what is done about it
  chunk events     none: an offer is made when the prompt is computed
  release          no call for it: held KV goes when a peer has fetched it or its time limit has passed, and counts
                   until the executor's statistics show that it is gone
  second pull      none: a fetch that fails ends that context request, and the prompt is computed again elsewhere
  idle executor    it looks neither at finished fetches nor at time limits while no request is active; a request of
                   one token (a nudge) makes it look
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError, RequestError, TransferError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.runtime.core.events import Capabilities, Drained, FinishReason, Rejected, Tokens
from trtpd.runtime.engine.admission import check_request, peak_kv_tokens
from trtpd.runtime.engine.base import (
    EngineEvent,
    EngineLimits,
    EngineRequest,
    Key,
    KVArrived,
    PrefillBegan,
    PrefillDone,
    RequestKind,
    StepReport,
)
from trtpd.runtime.engine.tensorrt_llm.backend import Answer, Backend, Iteration
from trtpd.runtime.engine.tensorrt_llm.hand_off import HandOff, encode
from trtpd.runtime.engine.tensorrt_llm.ledger import Entry, Ledger
from trtpd.runtime.engine.tensorrt_llm.nudge import Nudges
from trtpd.runtime.engine.tensorrt_llm.reader import Reader
from trtpd.runtime.engine.tensorrt_llm.start import check_start, start_of

log = logging.getLogger(__name__)

FETCH_S = 30.0
"""How long decode waits for KV where the build names no limit, beside what its bytes take."""
FETCH_FLOOR_BYTES_PER_S = 50e6
STUCK_S = 60.0
STUCK_SHARE = 0.5
"""Closed holds older than STUCK_S that fill so much of the pool end the engine: only a new one frees them."""
WAIT_S = 0.1


class TensorRTEngine:
    """See the module, Engine and SelfMovingEngine. It owns `backend`."""

    def __init__(
        self, config: EngineConfig, backend: Backend, *, version: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert config.tensorrt_llm is not None, "load checks it"
        self._config = config
        self._trt = config.tensorrt_llm
        self._backend = backend
        self._version = version
        self._clock = clock
        self._ledger = Ledger(config.profile.kv_blocks, config.layout.tokens_per_block)
        self._nudges = Nudges(backend)
        self._events: list[EngineEvent] = []
        self._open = True
        self._reader = Reader(backend)
        self._reader.start()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(chunk_events=False, release=False, repull=False, digests=False, seeded_resume=False)

    @property
    def limits(self) -> EngineLimits:
        profile = self._config.profile
        return EngineLimits(
            max_seq_tokens=self._config.max_seq_tokens,
            max_batch=profile.max_batch,
            max_step_tokens=profile.max_step_tokens,
            kv_blocks=self._ledger.pool_blocks,
            tokens_per_block=self._config.layout.tokens_per_block,
            vocab_size=self._config.architecture.vocab_size,
        )

    @property
    def kv(self) -> None:
        return None

    @property
    def layout(self) -> KVLayout:
        return self._config.layout

    def hand_off_of(self, key: Key) -> bytes:
        """See SelfMovingEngine."""
        entry = self._ledger.of(key)
        return b"" if entry is None else entry.hand_off

    def has_room(self, tokens: int) -> bool:
        """See SelfMovingEngine."""
        return self._ledger.promised_blocks() + self._ledger.blocks_for(tokens) <= self._ledger.pool_blocks

    def submit(self, request: EngineRequest) -> None:
        """See Engine. Raises TransferError for a hand-off that can't be used here."""
        self._check_usable()
        check_request(request, self.limits)
        check_start(request, self._config)
        if request.key in self._ledger:
            raise RequestError(
                f"request {request.request_id}: attempt {request.attempt} is here already; number a new one"
            )
        start = start_of(request, self._config, version=self._version)
        peak_tokens = peak_kv_tokens(request, self._config.max_seq_tokens)
        request_id = self._backend.start(start)
        entry = Entry(
            request=request,
            id=request_id,
            stats_id=request_id if self._backend.ids_in_statistics else None,
            blocks=self._ledger.blocks_for(peak_tokens),
            started_s=self._clock(),
            alone=start.kind is not request.kind,
        )
        self._ledger.add(entry)

    def cancel(self, key: Key) -> None:
        """See Engine. `Drained` follows when the executor has let go."""
        self._close(key, cancel=True)

    def release(self, key: Key) -> None:
        """See Engine. It was fetched, or nobody will: what is held goes by itself."""
        entry = self._ledger.of(key)
        if entry is not None and entry.held:
            self._close(key, cancel=self._backend.cancels_held)

    def poll(self, timeout_s: float) -> StepReport:
        """See Engine. The executor steps by itself: this takes in what it has said since the last time."""
        self._check_usable()
        if not self._events:
            self._reader.woken.wait(min(timeout_s, WAIT_S) if self._waits_on_time() else timeout_s)
        self._reader.woken.clear()
        for found in self._reader.take():
            if isinstance(found, Iteration):
                self._on_iteration(found)
            elif not self._nudges.answered(found):
                self._on_answer(found)
        self._end_overdue()
        self._nudges.see_to(self._clock(), wanted=self._awaits_idle_executor())
        events, self._events = tuple(self._events), []
        return StepReport(events=events, load=self._ledger.load())

    def wake(self) -> None:
        """See Engine."""
        self._reader.woken.set()

    def check_integrity(self) -> None:
        """See Engine."""
        if self._open:
            self._ledger.check_integrity()

    def shutdown(self) -> None:
        """See Engine. The executor would wait for what runs, so that is cancelled first."""
        if not self._open:
            return
        self._open = False
        try:
            for entry in self._ledger:
                if not entry.held:
                    self._backend.cancel(entry.id)
        finally:
            self._reader.stop()
            self._backend.close()
            self._events.clear()

    def _check_usable(self) -> None:
        if not self._open:
            raise EngineError("the engine is shut down; load it again")

    def _close(self, key: Key, *, cancel: bool) -> None:
        entry = self._ledger.of(key)
        if entry is None or entry.closed:
            return
        entry.closed_s = self._clock()
        if entry.held and entry.alone:
            self._end(entry, Drained(request_id=key[0], attempt=key[1]))
        elif cancel and (not entry.held or self._backend.cancels_held):
            self._backend.cancel(entry.id)

    def _end(self, entry: Entry, event: EngineEvent) -> None:
        self._remove(entry)
        if not entry.given_up:
            self._events.append(event)

    def _remove(self, entry: Entry) -> None:
        self._ledger.remove(entry)
        self._backend.forget(entry.id)

    def _on_iteration(self, iteration: Iteration) -> None:
        self._ledger.take(iteration)
        for entry in self._ledger.gone():
            if not entry.closed:
                log.warning("the KV of %s is gone before anyone fetched it: its time limit has passed", entry.key)
            self._end(entry, _drained(entry))

    def _on_answer(self, answer: Answer) -> None:
        entry = self._ledger.by_id(answer.id)
        if entry is None:
            return
        fault = answer.error or self._fault_of(entry, answer)
        if fault is not None:
            self._fail(entry, answer, fault)
        elif entry.request.kind is RequestKind.CONTEXT_ONLY:
            if answer.final:
                self._computed(entry, answer)
        else:
            self._decoded(entry, answer)

    def _fault_of(self, entry: Entry, answer: Answer) -> str | None:
        """What is wrong with an answer that isn't an error itself."""
        if answer.finish in ("cancelled", "timed_out"):
            return f"the executor ended it ({answer.finish})"
        context = entry.request.kind is RequestKind.CONTEXT_ONLY
        if context and answer.final and not entry.alone and answer.hand_off is None:
            return "the executor sent no context_phase_params: its cache_transceiver_config has no backend"
        if entry.alone and answer.final and not answer.ids:
            return "the executor sent no token"
        first = entry.request.first_token
        if first is not None and not entry.arrived and answer.ids and answer.ids[0] != first:
            return f"the executor goes on from token {answer.ids[0]} where {first} was handed off"
        return None

    def _fail(self, entry: Entry, answer: Answer, fault: str) -> None:
        if not answer.final:
            self._backend.cancel(entry.id)
            self._give_up(entry, "engine_failed", fault)
        elif entry.closed:
            self._end(entry, _drained(entry))
        else:
            self._end(entry, _rejected(entry, "engine_failed", fault))

    def _give_up(self, entry: Entry, code: str, reason: str) -> None:
        """Its last event is told now; its blocks count until the executor has let go."""
        self._events.append(_drained(entry) if entry.closed else _rejected(entry, code, reason))
        entry.closed_s = entry.closed_s if entry.closed else self._clock()
        self._ledger.give_up(entry)

    def _computed(self, entry: Entry, answer: Answer) -> None:
        """A context request is done: from here its KV is held."""
        if entry.closed and entry.alone:
            self._end(entry, _drained(entry))
            return
        if entry.alone:
            hand_off = HandOff(version=self._version, first_gen_tokens=answer.ids[:1], req_id=entry.id)
            entry.blocks = 0
        else:
            assert answer.hand_off is not None, "_fault_of looks for it"
            hand_off = answer.hand_off
        entry.held, entry.held_s = True, self._clock()
        entry.stats_id = entry.id if entry.alone else hand_off.req_id
        try:
            entry.hand_off = encode(hand_off)
        except TransferError as error:
            self._give_up(entry, error.code, str(error))
            return
        if entry.closed:
            if self._backend.cancels_held:
                self._backend.cancel(entry.id)
            return
        request, token = entry.request, hand_off.first_token
        self._events.append(_began(entry))
        self._events.append(
            PrefillDone(
                request_id=request.request_id,
                attempt=request.attempt,
                first_index=request.first_index,
                token=token,
                log_prob=answer.log_probs[0] if request.sampling.log_probs and answer.log_probs else None,
                finish=self._finish_at(entry, token, request.first_index + 1),
            )
        )

    def _decoded(self, entry: Entry, answer: Answer) -> None:
        ids, log_probs = answer.ids, answer.log_probs
        if entry.request.first_token is not None and not entry.arrived and ids:
            self._arrived(entry)
            ids, log_probs = ids[1:], log_probs[1:]  # prefill has told it
        elif entry.request.first_token is None and not entry.emitted and ids and not entry.closed:
            self._events.append(_began(entry))
        first_index, room = entry.next_index, entry.request.max_tokens - entry.next_index
        ends = [at for at, token in enumerate(ids[:room]) if token in entry.request.sampling.end_ids]
        ids = ids[: ends[0] + 1] if ends else ids[:room]
        entry.emitted += len(ids)
        finish = self._finish_at(entry, ids[-1], entry.next_index) if ids else None
        if answer.final and finish is None:
            finish = "stop" if answer.finish == "stop" else "length"
        if (ids or finish) and not entry.closed:
            self._tell(entry, first_index, ids, log_probs[: len(ids)], finish)
        if answer.final:
            self._end_decoded(entry)
        elif finish is not None and not entry.given_up:
            self._backend.cancel(entry.id)
            entry.closed_s = entry.closed_s if entry.closed else self._clock()
            self._ledger.give_up(entry)

    def _end_decoded(self, entry: Entry) -> None:
        if entry.closed and not entry.given_up:
            self._events.append(_drained(entry))
        self._remove(entry)

    def _tell(
        self,
        entry: Entry,
        first_index: int,
        ids: tuple[int, ...],
        log_probs: tuple[float, ...],
        finish: FinishReason | None,
    ) -> None:
        self._events.append(
            Tokens(
                request_id=entry.request.request_id,
                attempt=entry.request.attempt,
                first_index=first_index,
                ids=ids,
                log_probs=log_probs if entry.request.sampling.log_probs else (),
                finish=finish,
            )
        )

    def _arrived(self, entry: Entry) -> None:
        entry.arrived = True
        entry.emitted = 1
        if not entry.closed:
            self._events.append(
                KVArrived(
                    request_id=entry.request.request_id,
                    attempt=entry.request.attempt,
                    bytes_moved=len(entry.request.prompt_ids) * self.layout.bytes_per_token,
                    seconds=self._clock() - entry.started_s,
                )
            )

    def _finish_at(self, entry: Entry, token: int, next_index: int) -> FinishReason | None:
        """Whether and why `token`, the one before output index `next_index`, ends the answer."""
        request = entry.request
        if token in request.sampling.end_ids:
            return "stop"
        length = len(request.prompt_ids) + next_index - request.first_index
        full = next_index >= request.max_tokens or length >= self._config.max_seq_tokens
        return "length" if full else None

    def _waits_on_time(self) -> bool:
        """Whether something is due that no answer announces."""
        return any(entry.closed or self._fetching(entry) for entry in self._ledger)

    def _fetching(self, entry: Entry) -> bool:
        return entry.request.kind is RequestKind.GENERATION_ONLY and not entry.arrived and not entry.given_up

    def _end_overdue(self) -> None:
        """A fetch takes too long: the request ends here, whatever the executor still does with it. Closed holds that
        never go end the engine."""
        now_s = self._clock()
        for entry in self._ledger:
            if self._fetching(entry) and not entry.closed and now_s - entry.started_s > self._fetch_limit_s(entry):
                self._backend.cancel(entry.id)
                waited = f"its KV did not come within {self._fetch_limit_s(entry):.1f} s"
                self._give_up(entry, "transfer_timeout", waited)
        stuck = [entry for entry in self._ledger if entry.closed_s is not None and now_s - entry.closed_s > STUCK_S]
        if sum(entry.blocks for entry in stuck) > STUCK_SHARE * self._ledger.pool_blocks:
            raise EngineError(
                f"the KV of {len(stuck)} requests that nobody wants has been held for more than {STUCK_S:g} s and "
                "fills most of the pool; the executor has no call to free it: set tensorrt_llm.kv_transfer_timeout_ms"
            )

    def _fetch_limit_s(self, entry: Entry) -> float:
        limit_ms = self._trt.kv_transfer_timeout_ms
        fixed_s = FETCH_S if limit_ms is None else limit_ms / 1e3
        return fixed_s + len(entry.request.prompt_ids) * self.layout.bytes_per_token / FETCH_FLOOR_BYTES_PER_S

    def _awaits_idle_executor(self) -> bool:
        """Closed holds wait for an executor that has nothing to do."""
        return any(entry.closed and entry.held for entry in self._ledger) and not any(
            not entry.held for entry in self._ledger
        )


def _began(entry: Entry) -> PrefillBegan:
    return PrefillBegan(request_id=entry.request.request_id, attempt=entry.request.attempt, blocks=())


def _drained(entry: Entry) -> Drained:
    return Drained(request_id=entry.request.request_id, attempt=entry.request.attempt)


def _rejected(entry: Entry, code: str, reason: str) -> Rejected:
    return Rejected(request_id=entry.request.request_id, attempt=entry.request.attempt, code=code, reason=reason)
