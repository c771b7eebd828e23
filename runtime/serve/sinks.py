"""Sinks: how a piece of an answer becomes a Triton response. Used by the emitter's thread only.

`pb_utils` is typed Any throughout: it exists only inside a Triton stub.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtpd.runtime.core.events import TopLogProbs
from trtpd.runtime.serve.emitter import End, Failure, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Optional outputs that a client asked for. `top_log_probs`: how many tokens at each position."""

    log_probs: bool = False
    top_log_probs: int = 0
    input_tokens: bool = False
    output_tokens: bool = False


class Responder:
    """A response sender of the model `pd`; shapes are those of the TensorRT-LLM backend's ensemble."""

    def __init__(self, pb_utils: Any, request: Any, wanted: Wanted) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()
        self._names = frozenset(request.requested_output_names())
        self._wanted = wanted

    def send(self, piece: Piece, end: End | None, *, answer: int, last: bool) -> None:
        """A part of the answer with that number; the last response of all if `last` is given."""
        tensors = self._tensors(piece) | self._about([answer])
        self._send(tensors if end is None else tensors | self._ended([end]), last=last)

    def send_all(self, answers: Sequence[tuple[Piece, End]]) -> None:
        """Whole answers in one response, which is the last: ids and log-probabilities one after the other,
        `sequence_length` says how many belong to each."""
        whole = Piece()
        for piece, _ in answers:
            whole.add(piece)
        tensors = self._tensors(whole)
        tensors["text_output"] = _texts([piece.text for piece, _ in answers])
        tensors["sequence_length"] = np.array([[len(piece.ids) for piece, _ in answers]], np.int32)
        tensors |= self._about(range(len(answers))) | self._ended([end for _, end in answers])
        self._send(tensors, last=True)

    def fail(self, failure: Failure) -> None:
        """An error as the last response."""
        self._sender.send(error_response(self._pb, failure), flags=self._final)

    def leave(self) -> None:
        """The last response of a client that is gone."""
        self._sender.send(flags=self._final)

    def left(self) -> bool:
        return bool(self._sender.is_cancelled())

    @property
    def _final(self) -> Any:
        return self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def _tensors(self, piece: Piece) -> dict[str, Any]:
        tensors: dict[str, Any] = {
            "text_output": _texts([piece.text]),
            "output_ids": np.array([piece.ids], np.int32),
        }
        if self._wanted.log_probs:
            tensors["output_log_probs"] = np.array([[piece.log_probs]], np.float32)
        if count := self._wanted.top_log_probs:
            shape = (1, len(piece.top_log_probs), count if not piece.top_log_probs else len(piece.top_log_probs[0]))
            for name, column, kind in (("top_log_prob_ids", 0, np.int32), ("top_log_probs", 1, np.float32)):
                values = [pair[column] for top in piece.top_log_probs for pair in top]
                tensors[name] = np.array(values, kind).reshape(shape)
        return tensors

    @staticmethod
    def _about(answers: Sequence[int]) -> dict[str, Any]:
        return {"sequence_index": np.array([list(answers)], np.int32)}

    def _ended(self, ends: Sequence[End]) -> dict[str, Any]:
        tensors: dict[str, Any] = {
            "finish_reason": _texts([end.finish_reason for end in ends]),
            "timeline": _texts([end.timeline for end in ends]),
            "cached_tokens": np.array([[end.cached_tokens for end in ends]], np.int32),
        }
        if self._wanted.log_probs:
            tensors["cum_log_probs"] = np.array([[end.cum_log_prob for end in ends]], np.float32)
        if self._wanted.input_tokens:
            tensors["num_input_tokens"] = np.array([ends[0].prompt_tokens], np.int32)
        if self._wanted.output_tokens:
            tensors["num_output_tokens"] = np.array([end.output_tokens for end in ends], np.int32)
        return tensors

    def _send(self, tensors: dict[str, Any], *, last: bool) -> None:
        pb = self._pb
        response = pb.InferenceResponse(
            [pb.Tensor(name, value) for name, value in tensors.items() if name in self._names]
        )
        if last:
            self._sender.send(response, flags=self._final)
        else:
            self._sender.send(response)


class TritonSink:
    """The one answer of a request of the model `pd`."""

    def __init__(self, pb_utils: Any, request: Any, wanted: Wanted | None = None) -> None:
        self._responder = Responder(pb_utils, request, wanted or Wanted())

    def send(self, piece: Piece, end: End | None) -> None:
        if end is not None and end.failure is not None:
            if piece:
                self._responder.send(piece, None, answer=0, last=False)
            self._responder.fail(end.failure)
        elif end is not None and end.cancelled:
            self._responder.leave()
        else:
            self._responder.send(piece, end, answer=0, last=end is not None)

    def left(self) -> bool:
        return self._responder.left()


class Answers:
    """Several answers of one request over one response sender: each has a sink of its own in `sinks`.

    With `stream` responses say which answer they are part of; else there is one response, when all have ended. The
    first failure ends the whole, and the sinks of the other answers say that their client has left.
    """

    def __init__(self, responder: Responder, count: int, *, stream: bool) -> None:
        self._responder = responder
        self._stream = stream
        self._ended: dict[int, tuple[Piece, End]] = {}
        self._count = count
        self._over = False
        self.sinks = [_AnswerSink(self, number) for number in range(count)]

    def send(self, number: int, piece: Piece, end: End | None) -> None:
        """See Sink, for one of the answers."""
        if self._over:
            return
        if end is not None and (end.failure is not None or end.cancelled):
            self._over = True
            if end.failure is not None:
                self._responder.fail(end.failure)
            else:
                self._responder.leave()
            return
        if end is not None:
            self._ended[number] = (piece, end)
            self._over = len(self._ended) == self._count
        if self._stream:
            self._responder.send(piece, end, answer=number, last=self._over)
        elif self._over:
            self._responder.send_all([self._ended[number] for number in range(self._count)])

    def left(self, number: int) -> bool:
        return number not in self._ended and (self._over or self._responder.left())


class _AnswerSink:
    def __init__(self, answers: Answers, number: int) -> None:
        self._answers, self._number = answers, number

    def send(self, piece: Piece, end: End | None) -> None:
        self._answers.send(self._number, piece, end)

    def left(self) -> bool:
        return self._answers.left(self._number)


def error_response(pb_utils: Any, failure: Failure) -> Any:
    """`failure.status` is a name of Triton's status codes."""
    code = getattr(pb_utils.TritonError, failure.status)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(failure.message, code))


def _texts(texts: Sequence[str]) -> Any:
    return np.array([text.encode() for text in texts], dtype=np.object_)


@dataclass(slots=True)
class Outcome:
    """All of one answer."""

    ids: list[int]
    text: str
    end: End
    top_log_probs: list[TopLogProbs]


class CollectSink:
    """Gathers an answer for a caller in this process, who waits for it."""

    def __init__(self) -> None:
        self._piece = Piece()
        self._end: End | None = None
        self._done = threading.Event()

    def send(self, piece: Piece, end: End | None) -> None:
        self._piece.add(piece)
        if end is not None:
            self._end = end
            self._done.set()

    def left(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> Outcome | None:
        """None if it did not end in time."""
        if not self._done.wait(timeout_s):
            return None
        assert self._end is not None
        return Outcome(self._piece.ids, self._piece.text, self._end, self._piece.top_log_probs)
