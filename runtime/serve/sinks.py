"""Sinks: how a piece of an answer becomes a Triton response. Used by the emitter's thread only.

`pb_utils` is typed Any throughout: it exists only inside a Triton stub.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtpd.runtime.serve.emitter import End, Failure, Piece


class TritonSink:
    """A response sender of the model `pd`; shapes are those of the TensorRT-LLM backend's ensemble.

    `log_probs` and `counts` (of input and of output tokens) say which optional outputs the client asked for.
    """

    def __init__(
        self,
        pb_utils: Any,
        request: Any,
        *,
        log_probs: bool = False,
        counts: tuple[bool, bool] = (False, False),
    ) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()
        self._wanted = frozenset(request.requested_output_names())
        self._log_probs = log_probs
        self._count_input, self._count_output = counts

    def send(self, piece: Piece, end: End | None) -> None:
        final = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if end is None:
            self._sender.send(self._response(self._tensors(piece)))
        elif end.failure is not None:
            if piece:
                self._sender.send(self._response(self._tensors(piece)))
            self._sender.send(error_response(self._pb, end.failure), flags=final)
        elif end.cancelled:
            self._sender.send(flags=final)
        else:
            self._sender.send(self._response(self._tensors(piece) | self._last(end)), flags=final)

    def left(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _tensors(self, piece: Piece) -> dict[str, Any]:
        tensors: dict[str, Any] = {
            "text_output": np.array([piece.text.encode()], dtype=np.object_),
            "output_ids": np.array([piece.ids], dtype=np.int32),
        }
        if self._log_probs:
            tensors["output_log_probs"] = np.array([[piece.log_probs]], dtype=np.float32)
        return tensors

    def _last(self, end: End) -> dict[str, Any]:
        tensors: dict[str, Any] = {
            "finish_reason": np.array([end.finish_reason.encode()], dtype=np.object_),
            "timeline": np.array([end.timeline.encode()], dtype=np.object_),
        }
        if self._log_probs:
            tensors["cum_log_probs"] = np.array([[end.cum_log_prob]], dtype=np.float32)
        if self._count_input:
            tensors["num_input_tokens"] = np.array([end.prompt_tokens], dtype=np.int32)
        if self._count_output:
            tensors["num_output_tokens"] = np.array([end.output_tokens], dtype=np.int32)
        return tensors

    def _response(self, tensors: dict[str, Any]) -> Any:
        pb = self._pb
        return pb.InferenceResponse([pb.Tensor(name, value) for name, value in tensors.items() if name in self._wanted])


def error_response(pb_utils: Any, failure: Failure) -> Any:
    """`failure.status` is a name of Triton's status codes."""
    code = getattr(pb_utils.TritonError, failure.status)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(failure.message, code))


@dataclass(slots=True)
class Outcome:
    """All of one answer."""

    ids: list[int]
    text: str
    end: End


class CollectSink:
    """Gathers an answer for a caller in this process, who waits for it."""

    def __init__(self) -> None:
        self._piece = Piece()
        self._end: End | None = None
        self._done = threading.Event()

    def send(self, piece: Piece, end: End | None) -> None:
        self._piece.text += piece.text
        self._piece.ids += piece.ids
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
        return Outcome(self._piece.ids, self._piece.text, self._end)
