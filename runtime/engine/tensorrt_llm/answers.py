"""Answers: what an executor says of its requests, as events of the seam."""

from __future__ import annotations

from trtpd.build.manifest import EngineConfig
from trtpd.errors import TransferError
from trtpd.runtime.core.events import FinishReason, Tokens
from trtpd.runtime.engine.base import KVArrived, PrefillBegan, PrefillDone, RequestKind
from trtpd.runtime.engine.tensorrt_llm.backend import Answer
from trtpd.runtime.engine.tensorrt_llm.hand_off import HandOff, encode
from trtpd.runtime.engine.tensorrt_llm.ledger import Entry
from trtpd.runtime.engine.tensorrt_llm.work import Work, drained, rejected


class Answers:
    """Takes answers one by one. Nothing that an executor says is passed on unless it fits what was asked."""

    def __init__(self, work: Work, config: EngineConfig, *, version: str) -> None:
        self._work = work
        self._config = config
        self._version = version

    def take(self, answer: Answer) -> None:
        """One answer of the executor. What it says of a request that is no more is ignored."""
        entry = self._work.ledger.by_id(answer.id)
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
            entry.arrived = True  # the executor has begun to answer, so nothing is on its way any more
            self._work.cancel(entry)
            self._work.give_up(entry, "engine_failed", fault)
        elif entry.closed:
            self._work.end(entry, drained(entry))
        else:
            self._work.end(entry, rejected(entry, "engine_failed", fault))

    def _computed(self, entry: Entry, answer: Answer) -> None:
        """A context request is done: from here its KV is held."""
        if entry.closed and entry.alone:
            self._work.end(entry, drained(entry))
            return
        if entry.alone:
            hand_off = HandOff(version=self._version, first_gen_tokens=answer.ids[:1], req_id=entry.id)
            entry.blocks = 0
        else:
            assert answer.hand_off is not None, "_fault_of looks for it"
            hand_off = answer.hand_off
        entry.held, entry.held_s = True, self._work.clock()
        entry.stats_id = entry.id if entry.alone else hand_off.req_id
        try:
            entry.hand_off = encode(hand_off)
        except TransferError as error:
            self._work.give_up(entry, error.code, str(error))
            return
        if entry.closed:
            self._work.cancel(entry)
            return
        request, token = entry.request, hand_off.first_token
        self._work.events.append(_began(entry))
        self._work.events.append(
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
            self._work.events.append(_began(entry))
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
            self._work.cancel(entry)
            self._work.leave(entry)

    def _end_decoded(self, entry: Entry) -> None:
        if entry.closed and not entry.given_up:
            self._work.events.append(drained(entry))
        self._work.remove(entry)

    def _tell(
        self,
        entry: Entry,
        first_index: int,
        ids: tuple[int, ...],
        log_probs: tuple[float, ...],
        finish: FinishReason | None,
    ) -> None:
        self._work.events.append(
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
        if entry.closed:
            self._work.cancel(entry)
        else:
            self._work.events.append(
                KVArrived(
                    request_id=entry.request.request_id,
                    attempt=entry.request.attempt,
                    bytes_moved=len(entry.request.prompt_ids) * self._config.layout.bytes_per_token,
                    seconds=self._work.clock() - entry.started_s,
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


def _began(entry: Entry) -> PrefillBegan:
    return PrefillBegan(request_id=entry.request.request_id, attempt=entry.request.attempt, blocks=())
