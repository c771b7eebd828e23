from __future__ import annotations

from types import SimpleNamespace

from trtpd.runtime.serve.emitter import End, Failure, Piece
from trtpd.runtime.serve.sinks import TritonSink, Wanted

FINAL = 1
ALL = ("text_output", "output_ids", "output_log_probs", "cum_log_probs", "finish_reason", "timeline")


class Request:
    """A Triton request and its response sender at once."""

    def __init__(self, wanted=ALL) -> None:
        self.wanted = wanted
        self.sent: list = []

    def get_response_sender(self):
        return self

    def requested_output_names(self):
        return set(self.wanted)

    def is_cancelled(self):
        return False

    def send(self, response=None, flags=0):
        self.sent.append((response, flags))


PB = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    Tensor=lambda name, value: (name, value),
    InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=dict(tensors), error=error),
    TritonError=type(
        "TritonError", (), {"UNAVAILABLE": 14, "__init__": lambda self, text, code: setattr(self, "x", (text, code))}
    ),
)
PIECE = Piece(text="hé", ids=[1, 2], log_probs=[-0.5, -1.0])


def test_shapes_are_those_of_the_tensorrt_llm_backends_ensemble():
    request = Request()
    TritonSink(PB, request, Wanted(log_probs=True)).send(PIECE, End(finish_reason="stop", cum_log_prob=-1.5))
    (response, flags) = request.sent[0]
    shapes = {name: value.shape for name, value in response.tensors.items()}
    assert flags == FINAL
    assert (shapes["text_output"], shapes["output_log_probs"], shapes["cum_log_probs"]) == ((1,), (1, 1, 2), (1, 1))
    assert response.tensors["text_output"][0].decode() == "hé"


def test_only_outputs_that_were_asked_for_are_made():
    request = Request(wanted=("text_output",))
    TritonSink(PB, request).send(PIECE, End())
    assert set(request.sent[0][0].tensors) == {"text_output"}


def test_a_failure_comes_after_what_was_already_there_and_is_final():
    request = Request()
    TritonSink(PB, request).send(PIECE, End(failure=Failure(status="UNAVAILABLE", message="code=deadline x")))
    (first, first_flags), (last, last_flags) = request.sent
    assert (first_flags, last_flags) == (0, FINAL)
    assert first.error is None
    assert last.error.x == ("code=deadline x", 14)


def test_a_client_that_left_gets_an_empty_last_response():
    request = Request()
    TritonSink(PB, request).send(Piece(), End(cancelled=True))
    assert request.sent == [(None, FINAL)]
