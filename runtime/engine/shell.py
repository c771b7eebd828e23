"""ScheduledEngine: everything an engine of ours does besides computing. It schedules, an Executor computes.

The loop is `poll`: plan, execute, account.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError, InternalError, RequestError
from trtpd.kv_transfer.pool import PoolAddress, SharedPool
from trtpd.runtime.core.events import Capabilities, Drained, Preempted, Rejected, Tokens
from trtpd.runtime.engine.admission import check_request, peak_kv_tokens
from trtpd.runtime.engine.base import (
    EngineEvent,
    EngineLimits,
    EngineRequest,
    Key,
    PrefillBegan,
    PrefillChunk,
    PrefillDone,
    RequestKind,
    StepReport,
)
from trtpd.runtime.engine.batching import PrefillPart, StepLimits, StepPlan, plan_step
from trtpd.runtime.engine.executor import DrawAt, Executor, Piece
from trtpd.runtime.engine.paging import EngineKV, KVPolicy
from trtpd.runtime.engine.sampling import Draw
from trtpd.runtime.engine.sequences import Running, SequenceTable, Stage

_FAILED_STEPS_AT_MOST = 3


class ScheduledEngine:
    """The Engine seam over an Executor and the pool it computes in; it owns both. `others`: see PagedKV.

    After three failed steps in a row `poll` raises EngineError: the executor is broken, not a request.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: SharedPool,
        executor: Executor,
        *,
        others: Sequence[PoolAddress] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        profile = config.profile
        self._limits = EngineLimits(
            max_seq_tokens=config.max_seq_tokens,
            max_batch=profile.max_batch,
            max_step_tokens=profile.max_step_tokens,
            kv_blocks=pool.num_blocks,
            tokens_per_block=pool.layout.tokens_per_block,
            vocab_size=config.architecture.vocab_size,
        )
        self._step_limits = StepLimits(
            max_step_tokens=profile.max_step_tokens,
            chunk_tokens=profile.chunk_tokens,
            max_batch=profile.max_batch,
        )
        policy = KVPolicy(
            growth_kept=profile.growth_kept,
            prefix_cache=profile.prefix_cache,
            keep_blocks=profile.prefix_cache_blocks,
            salt=config.pair_fingerprint,
        )
        self._kv = EngineKV(pool, max_seq_tokens=config.max_seq_tokens, others=others, policy=policy)
        self._sequences = SequenceTable(self._kv)
        self._executor = executor
        self._clock = clock
        self._events: list[EngineEvent] = []
        self._failed_steps = 0
        self._wake = threading.Event()
        self._open = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def kv(self) -> EngineKV:
        return self._kv

    def submit(self, request: EngineRequest) -> None:
        """See Engine."""
        self._check_usable()
        check_request(request, self._limits)
        if request.key in self._sequences:
            raise RequestError(
                f"request {request.request_id}: attempt {request.attempt} is here already; number a new one"
            )
        peak_tokens = peak_kv_tokens(request, self._limits.max_seq_tokens)
        self._sequences.add(request, peak_tokens=peak_tokens)

    def cancel(self, key: Key) -> None:
        """See Engine."""
        if key in self._sequences:
            self._sequences.retire(key)
            self._events.append(Drained(request_id=key[0], attempt=key[1]))

    def release(self, key: Key) -> None:
        """See Engine. A prompt that is still being prefilled is not held yet: `cancel` ends that."""
        if self._sequences.is_held(key):
            self.cancel(key)

    def poll(self, timeout_s: float) -> StepReport:
        """See Engine. Admissions are reported before the step that begins them: then no step is run."""
        self._check_usable()
        for victim in self._sequences.make_room():
            self._events.append(Preempted(request_id=victim.key[0], attempt=victim.key[1]))
        plan = plan_step(self._sequences.plan_state(waiting_at_most=self._step_limits.max_running), self._step_limits)
        self._kv.set_aside_blocks = plan.short_blocks + self._sequences.growing_blocks
        began_s, step_tokens = self._clock(), 0
        if plan.admitted:
            self._admit(plan.admitted)
        elif plan.tokens:
            self._execute(plan)
            step_tokens = plan.tokens
        elif not self._events:
            self._wake.wait(timeout_s)
            self._wake.clear()
        step_s = self._clock() - began_s if step_tokens else 0.0
        events, self._events = tuple(self._events), []
        return StepReport(events=events, load=self._sequences.load(step_s=step_s, step_tokens=step_tokens))

    def wake(self) -> None:
        """See Engine."""
        self._wake.set()

    def check_integrity(self) -> None:
        """See Engine."""
        if self._open:
            self._sequences.check_integrity()
            if self._sequences.running > self._step_limits.max_running:
                raise InternalError(
                    f"{self._sequences.running} sequences run, at most {self._step_limits.max_running} may"
                )

    def shutdown(self) -> None:
        """See Engine."""
        if self._open:
            self._open = False
            self._executor.close()
            self._sequences.clear()
            self._kv.close()
            self._events.clear()

    def _check_usable(self) -> None:
        if not self._open:
            raise EngineError("the engine is shut down; load it again")
        if self._failed_steps >= _FAILED_STEPS_AT_MOST:
            raise EngineError(
                f"{self._failed_steps} steps failed in a row (the rejected requests say why); load it again"
            )

    def _admit(self, keys: Sequence[Key]) -> None:
        """What was preempted begins a second time, and says nothing of it."""
        for request_id, attempt in keys:
            again = self._sequences.at(Stage.WAITING, (request_id, attempt)).cached_tokens is not None
            sequence = self._sequences.admit((request_id, attempt))
            cached_tokens = sequence.cached_tokens or 0
            if again:
                continue
            blocks = tuple(self._kv.blocks_of(sequence.key))
            self._events.append(
                PrefillBegan(request_id=request_id, attempt=attempt, blocks=blocks, cached_tokens=cached_tokens)
            )
            if cached_tokens:
                self._events.append(PrefillChunk(request_id=request_id, attempt=attempt, ready_tokens=cached_tokens))

    def _execute(self, plan: StepPlan) -> None:
        for key in plan.joined:
            self._sequences.move(key, Stage.JOINING, Stage.DECODING)
        pieces = [self._decode_piece(key) for key in plan.decodes]
        pieces += [self._prefill_piece(part) for part in plan.prefills]
        try:
            draws = self._executor.run(pieces)
        except EngineError as error:
            self._failed_steps += 1
            self._reject([*plan.decodes, *(part.key for part in plan.prefills)], error)
            return
        self._failed_steps = 0
        for key, draw in zip(plan.decodes, draws[: len(plan.decodes)], strict=True):
            self._account_decode(self._sequences.at(Stage.DECODING, key), draw)
        for part, draw in zip(plan.prefills, draws[len(plan.decodes) :], strict=True):
            self._account_prefill(part, self._sequences.at(Stage.PREFILLING, part.key), draw)

    def _decode_piece(self, key: Key) -> Piece:
        sequence = self._sequences.at(Stage.DECODING, key)
        return Piece(
            ids=sequence.ids[sequence.done_tokens :],
            start=sequence.done_tokens,
            blocks=self._kv.blocks_of(key),
            draw=_draw_at(sequence),
            sequence=sequence.number,
        )

    def _prefill_piece(self, part: PrefillPart) -> Piece:
        sequence = self._sequences.at(Stage.PREFILLING, part.key)
        return Piece(
            ids=sequence.ids[part.start : part.start + part.tokens],
            start=part.start,
            blocks=self._kv.blocks_of(part.key),
            draw=_draw_at(sequence) if part.last else None,
            sequence=sequence.number,
        )

    def _account_decode(self, sequence: Running, draw: Draw | None) -> None:
        self._sequences.computed(sequence, 1)
        self._emit(sequence, _given(draw))

    def _account_prefill(self, part: PrefillPart, sequence: Running, draw: Draw | None) -> None:
        self._sequences.computed(sequence, part.tokens)
        if not part.last:
            request_id, attempt = part.key
            ready_tokens = min(sequence.done_tokens, sequence.prompt_tokens)
            if sequence.next_index == sequence.request.first_index:
                self._events.append(PrefillChunk(request_id=request_id, attempt=attempt, ready_tokens=ready_tokens))
        elif sequence.request.kind is RequestKind.CONTEXT_ONLY:
            self._sequences.move(part.key, Stage.PREFILLING, Stage.HELD)
            self._seal(sequence, _given(draw))
        else:
            self._sequences.move(part.key, Stage.PREFILLING, Stage.DECODING)
            self._emit(sequence, _given(draw))

    def _seal(self, sequence: Running, draw: Draw) -> None:
        request_id, attempt = sequence.key
        index = sequence.next_index
        self._events.append(
            PrefillDone(
                request_id=request_id,
                attempt=attempt,
                first_index=index,
                token=draw.token,
                log_prob=draw.log_prob,
                top_log_probs=draw.top,
                finish=sequence.append(draw.token, max_seq_tokens=self._limits.max_seq_tokens),
            )
        )

    def _emit(self, sequence: Running, draw: Draw) -> None:
        request_id, attempt = sequence.key
        index = sequence.next_index
        finish = sequence.append(draw.token, max_seq_tokens=self._limits.max_seq_tokens)
        self._events.append(
            Tokens(
                request_id=request_id,
                attempt=attempt,
                first_index=index,
                ids=(draw.token,),
                log_probs=() if draw.log_prob is None else (draw.log_prob,),
                top_log_probs=(draw.top,) if draw.top else (),
                cached_tokens=sequence.cached_tokens if index == sequence.request.first_index else None,
                finish=finish,
            )
        )
        if finish is not None:
            self._sequences.retire(sequence.key)

    def _reject(self, keys: Sequence[Key], error: EngineError) -> None:
        for key in keys:
            self._sequences.retire(key)
            self._events.append(Rejected(request_id=key[0], attempt=key[1], code=error.code, reason=str(error)))


def _draw_at(sequence: Running) -> DrawAt:
    return DrawAt(sampling=sequence.request.sampling, index=sequence.next_index, history=sequence.history)


def _given(draw: Draw | None) -> Draw:
    if draw is None:
        raise InternalError("the executor drew no token where one was asked for")
    return draw
