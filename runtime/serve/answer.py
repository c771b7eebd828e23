"""One request's answer on its way to the client: tokens in, pieces of text out, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from trtpd.errors import InternalError, NoInstanceError, RequestError, SaturatedError
from trtpd.runtime.core.events import Finish, TopLogProbs
from trtpd.runtime.core.lifecycle import State
from trtpd.runtime.serve.emitter import End, Failure, Piece
from trtpd.runtime.serve.text import TextLayer
from trtpd.runtime.serve.timeline import TimelineReport, report, to_json

STATUS_OF_CODE = {
    RequestError.code: "INVALID_ARG",
    SaturatedError.code: "UNAVAILABLE",
    NoInstanceError.code: "UNAVAILABLE",
    InternalError.code: "INTERNAL",
}
"""Triton's status for a reason code; every other one is a fault that trying again may mend."""


class Answer:
    """Text, ids and log-probabilities of one request. `hidden` tokens (those that end it) give no text;
    `prompt_ids` are given back in front of the text."""

    def __init__(
        self,
        text: TextLayer,
        stops: Sequence[str],
        *,
        hidden: Sequence[int] = (),
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._stream = text.stream(stops, hidden=hidden, min_tokens=min_tokens)
        self._echo = text.decode(prompt_ids) if prompt_ids else ""
        self._tokens = 0
        self._cum_log_prob = 0.0
        self._second_token_s: float | None = None

    def push(
        self,
        first_index: int,
        ids: Sequence[int],
        log_probs: Sequence[float],
        top_log_probs: Sequence[TopLogProbs] = (),
        *,
        now_s: float,
    ) -> tuple[Piece, int | None]:
        """What may go out, and the output index of the token in which a stop string ended, if one did.

        Tokens behind that one are dropped.
        """
        piece = Piece(text=self._take_echo())
        for offset, token in enumerate(ids):
            if self._stream.stopped:
                break
            piece.text += self._stream.push(token)
            piece.ids.append(token)
            if log_probs:
                piece.log_probs.append(log_probs[offset])
            if top_log_probs:
                piece.top_log_probs.append(top_log_probs[offset])
        if first_index <= 1 < first_index + len(ids):
            self._second_token_s = now_s
        self._tokens += len(piece.ids)
        self._cum_log_prob += sum(piece.log_probs)
        stopped_at = first_index + len(piece.ids) - 1 if self._stream.stopped and piece.ids else None
        return piece, stopped_at

    def end(self, finish: Finish) -> tuple[Piece, End, TimelineReport | None]:
        """The rest of the text, the last response, and the timeline of the whole."""
        rest = self._take_echo() + self._stream.finish()
        # A stop string that ends within the last token, or within what was held back, came first.
        stopped = finish.state == State.FINISHED and self._stream.stopped
        reason = "stop" if stopped else finish.reason
        timeline = None
        if finish.timeline is not None:
            timeline = report(finish.timeline, finish=reason, second_token_s=self._second_token_s)
        failure = None
        if finish.state in (State.FAILED, State.REFUSED):
            failure = failure_of(finish.reason, finish.message, retry_after_s=finish.retry_after_s)
        end = End(
            finish_reason=reason,
            timeline=to_json(timeline) if timeline is not None else "",
            prompt_tokens=finish.timeline.prompt_tokens if finish.timeline is not None else 0,
            output_tokens=self._tokens,
            cached_tokens=timeline.cached_tokens if timeline is not None else 0,
            cum_log_prob=self._cum_log_prob,
            cancelled=finish.state == State.CANCELLED,
            failure=failure,
        )
        return Piece(text=rest), end, timeline

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo


def failure_of(code: str, message: str, *, retry_after_s: float | None = None) -> Failure:
    """An error for the client. Its reason is put in front, for machines: an error in a stream carries no status."""
    status = STATUS_OF_CODE.get(code, "UNAVAILABLE")
    retry = f" retry_after_s={retry_after_s:g}" if retry_after_s is not None else ""
    return Failure(status=status, message=f"code={code}{retry} {message}".rstrip())
