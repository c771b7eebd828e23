from __future__ import annotations

from types import SimpleNamespace

from trtpd.runtime.serve.emitter import End, Failure, Piece
from trtpd.runtime.serve.sinks import Answers, Responder, TritonSink, Wanted

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


EVERY = (*ALL, "sequence_index", "sequence_length", "top_log_prob_ids", "top_log_probs", "cached_tokens")
FAILED = End(failure=Failure(status="UNAVAILABLE", message="code=x"))


def answers(count, *, stream):
    request = Request(wanted=EVERY)
    return request, Answers(Responder(PB, request, Wanted(log_probs=True)), count, stream=stream)


def test_streamed_answers_say_which_one_each_response_is_part_of_and_only_the_last_end_is_final():
    request, made = answers(2, stream=True)
    one, two = made.sinks
    one.send(PIECE, None)
    two.send(PIECE, End(finish_reason="stop"))
    one.send(PIECE, End(finish_reason="length"))
    indexes = [response.tensors["sequence_index"].tolist() for response, _ in request.sent]
    assert (indexes, [flags for _, flags in request.sent]) == ([[[0]], [[1]], [[0]]], [0, 0, FINAL])
    assert [response.tensors.get("finish_reason", [b""])[0] for response, _ in request.sent] == [
        b"",
        b"stop",
        b"length",
    ]


def test_answers_that_are_not_streamed_come_in_one_response_in_their_order():
    request, made = answers(2, stream=False)
    made.sinks[1].send(Piece(text="b", ids=[3], log_probs=[-2.0]), End(finish_reason="stop", cum_log_prob=-2.0))
    assert request.sent == []
    made.sinks[0].send(PIECE, End(finish_reason="length", cum_log_prob=-1.5, cached_tokens=4))
    ((response, flags),) = request.sent
    tensors = {name: value.tolist() for name, value in response.tensors.items()}
    assert flags == FINAL
    assert tensors["text_output"] == ["hé".encode(), b"b"]
    assert (tensors["output_ids"], tensors["sequence_length"]) == ([[1, 2, 3]], [[2, 1]])
    assert tensors["finish_reason"] == [b"length", b"stop"]
    assert (tensors["cum_log_probs"], tensors["cached_tokens"]) == ([[-1.5, -2.0]], [[4, 0]])


def test_the_first_failure_ends_all_answers_and_the_others_are_told_that_nobody_listens():
    request, made = answers(3, stream=True)
    made.sinks[0].send(PIECE, End(finish_reason="stop"))
    assert not any(sink.left() for sink in made.sinks)
    made.sinks[1].send(Piece(), FAILED)
    made.sinks[2].send(PIECE, None)
    made.sinks[2].send(PIECE, FAILED)
    assert [flags for _, flags in request.sent] == [0, FINAL]
    assert request.sent[-1][0].error.x == ("code=x", 14)
    assert made.sinks[2].left()


def test_likeliest_tokens_come_as_rows():
    request = Request(wanted=EVERY)
    piece = Piece(text="ab", ids=[1, 2], top_log_probs=[((1, -0.25), (9, -2.0)), ((2, -0.5), (8, -1.0))])
    TritonSink(PB, request, Wanted(top_log_probs=2)).send(piece, None)
    tensors = request.sent[0][0].tensors
    assert tensors["top_log_prob_ids"].tolist() == [[[1, 9], [2, 8]]]
    assert tensors["top_log_probs"].tolist() == [[[-0.25, -2.0], [-0.5, -1.0]]]
    TritonSink(PB, request, Wanted(top_log_probs=2)).send(Piece(text="c"), None)
    assert request.sent[1][0].tensors["top_log_probs"].shape == (1, 0, 2)
