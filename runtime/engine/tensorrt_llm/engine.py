"""TensorRTEngine: the Engine seam over a TensorRT-LLM executor, which schedules, batches and moves its KV by itself.

What it can't do, and what is done about it
  chunk events     none: an offer is made when the prompt is computed
  release          no call for it: held KV goes when a peer has fetched it or its time limit has passed, and counts
                   until the executor's statistics show that it is gone
  second pull      none: a fetch that fails ends that context request, and the prompt is computed again elsewhere
  cancel           not of a fetch under way (compiled engines): that is cancelled once its KV is there
  idle executor    it looks neither at finished fetches nor at time limits while no request is active; a request of
                   one token (a nudge) makes it look
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError, RequestError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.runtime.core.events import Capabilities
from trtpd.runtime.engine.admission import check_request, peak_kv_tokens
from trtpd.runtime.engine.base import (
    EngineLimits,
    EngineRequest,
    Key,
    RequestKind,
    StepReport,
)
from trtpd.runtime.engine.tensorrt_llm.answers import Answers
from trtpd.runtime.engine.tensorrt_llm.backend import Backend, Iteration
from trtpd.runtime.engine.tensorrt_llm.ledger import Entry, Ledger
from trtpd.runtime.engine.tensorrt_llm.nudge import Nudges
from trtpd.runtime.engine.tensorrt_llm.reader import Reader
from trtpd.runtime.engine.tensorrt_llm.start import check_start, start_of
from trtpd.runtime.engine.tensorrt_llm.work import Work, drained

log = logging.getLogger(__name__)

FETCH_S = 10.0
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
        self._work = Work(self._ledger, backend, clock)
        self._answers = Answers(self._work, config, version=version)
        self._nudges = Nudges(backend)
        self._open = True
        self._reader = Reader(backend)
        self._reader.start()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            chunk_events=False,
            release=False,
            repull=False,
            digests=False,
            seeded_resume=False,
            shorter_first=False,
        )

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
        if not self._work.events:
            self._reader.woken.wait(min(timeout_s, WAIT_S) if self._waits_on_time() else timeout_s)
        self._reader.woken.clear()
        for found in self._reader.take():
            if isinstance(found, Iteration):
                self._on_iteration(found)
            elif not self._nudges.answered(found):
                self._answers.take(found)
        self._end_overdue()
        self._nudges.see_to(self._clock(), wanted=self._awaits_idle_executor())
        events, self._work.events = tuple(self._work.events), []
        return StepReport(events=events, load=self._ledger.load())

    def wake(self) -> None:
        """See Engine."""
        self._reader.woken.set()

    def check_integrity(self) -> None:
        """See Engine."""
        if self._open:
            self._ledger.check_integrity()

    def shutdown(self) -> None:
        """See Engine. The executor would wait for what runs, so that is cancelled first, fetches too: nobody gets their
        blocks any more."""
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
            self._work.events.clear()

    def _check_usable(self) -> None:
        if not self._open:
            raise EngineError("the engine is shut down; load it again")

    def _close(self, key: Key, *, cancel: bool) -> None:
        entry = self._ledger.of(key)
        if entry is None or entry.closed:
            return
        entry.closed_s = self._clock()
        if entry.held and entry.alone:
            self._work.end(entry, drained(entry))
        elif cancel:
            self._work.cancel(entry)

    def _on_iteration(self, iteration: Iteration) -> None:
        self._ledger.take(iteration)
        limit_ms = self._trt.kv_transfer_timeout_ms
        expired_s = None if limit_ms is None else self._clock() - limit_ms / 1e3
        for entry in self._ledger.gone(expired_s=expired_s):
            if not entry.closed:
                log.warning("the KV of %s is gone before anyone fetched it: its time limit has passed", entry.key)
            self._work.end(entry, drained(entry))

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
                self._work.cancel(entry)
                waited = f"its KV did not come within {self._fetch_limit_s(entry):.1f} s"
                self._work.give_up(entry, "transfer_timeout", waited)
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
