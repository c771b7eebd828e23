from __future__ import annotations

import threading

import pytest

from trtpd.runtime.serve.emitter import Emitter, End, Failure, Piece


class RecordingSink:
    """Keeps what was sent. Sending waits while `blocked` is set, as a slow server does."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.end: End | None = None
        self.ended = threading.Event()
        self.sending = threading.Event()
        self.free = threading.Event()
        self.free.set()
        self.threads: set[int] = set()
        self.is_left = False
        self.broken = False
        self.breaks_next = False

    def send(self, piece, end):
        self.threads.add(threading.get_ident())
        self.sending.set()
        self.free.wait(5)
        if self.broken or self.breaks_next:
            self.breaks_next = False
            raise OSError("sender broke")
        self.pieces.append(piece)
        if end is not None:
            assert self.end is None, "two last responses"
            self.end = end
            self.ended.set()

    def left(self):
        return self.is_left


class WatchedEmitter(Emitter):
    noticed: threading.Event


@pytest.fixture
def gone():
    return []


@pytest.fixture
def emitter(gone):
    noticed = threading.Event()

    def on_gone(request_id):
        gone.append(request_id)
        noticed.set()

    made = WatchedEmitter(on_gone)
    made.noticed = noticed
    made.start()
    yield made
    made.stop(Failure(status="UNAVAILABLE", message="test over"))


def piece(*ids):
    return Piece(text="".join(f"<{i}>" for i in ids), ids=list(ids))


def test_what_waits_behind_a_slow_response_goes_out_in_one(emitter):
    sink = RecordingSink()
    sink.free.clear()
    emitter.open(1, sink, stream=True)
    emitter.push(1, piece(0))
    assert sink.sending.wait(5)
    for i in range(1, 20):
        emitter.push(1, piece(i))
    emitter.close(1, End(finish_reason="length"))
    sink.free.set()
    assert sink.ended.wait(5)
    assert [len(p.ids) for p in sink.pieces] == [1, 19]
    assert [i for p in sink.pieces for i in p.ids] == list(range(20))
    assert emitter.open_streams == 0


def test_without_streaming_everything_comes_in_one_response(emitter):
    sink = RecordingSink()
    emitter.open(1, sink, stream=False)
    for i in range(5):
        emitter.push(1, piece(i))
    emitter.close(1, End(finish_reason="stop"))
    assert sink.ended.wait(5)
    assert [p.ids for p in sink.pieces] == [[0, 1, 2, 3, 4]]


def test_all_senders_are_used_from_one_thread(emitter):
    sinks = [RecordingSink() for _ in range(8)]
    for i, sink in enumerate(sinks):
        emitter.open(i, sink, stream=True)
    pushers = [threading.Thread(target=emitter.push, args=(i, piece(i))) for i in range(8)]
    for thread in pushers:
        thread.start()
    for thread in pushers:
        thread.join()
    for i, sink in enumerate(sinks):
        emitter.close(i, End())
        assert sink.ended.wait(5)
    assert len(set().union(*(sink.threads for sink in sinks))) == 1


def test_a_client_that_left_is_reported_once_and_still_gets_its_end(emitter, gone):
    sink = RecordingSink()
    emitter.open(3, sink, stream=True)
    sink.is_left = True
    assert emitter.noticed.wait(5)
    emitter.push(3, piece(1))
    emitter.close(3, End(finish_reason="cancelled"))
    assert sink.ended.wait(5)
    assert gone == [3]
    assert emitter.open_streams == 0


def test_a_sender_that_breaks_harms_no_other_stream(emitter, gone):
    broken, sound = RecordingSink(), RecordingSink()
    broken.broken = True
    emitter.open(1, broken, stream=True)
    emitter.open(2, sound, stream=True)
    emitter.push(1, piece(1))
    emitter.push(2, piece(2))
    emitter.close(2, End())
    assert sound.ended.wait(5)
    assert emitter.noticed.wait(5)
    assert gone == [1]


def test_without_streaming_a_failure_comes_alone(emitter):
    sink = RecordingSink()
    emitter.open(1, sink, stream=False)
    emitter.push(1, piece(1))
    emitter.close(1, End(failure=Failure(status="UNAVAILABLE", message="code=deadline")))
    assert sink.ended.wait(5)
    assert [p.ids for p in sink.pieces] == [[]]


def test_a_last_response_that_can_not_be_sent_is_replaced_by_an_error(emitter):
    sink = RecordingSink()
    emitter.open(1, sink, stream=False)
    sink.breaks_next = True
    emitter.push(1, piece(1))
    emitter.close(1, End(finish_reason="stop"))
    assert sink.ended.wait(5)
    assert sink.end is not None
    assert sink.end.failure is not None
    assert sink.end.failure.status == "INTERNAL"


def test_stopping_ends_every_open_stream_with_the_failure(gone):
    emitter = Emitter(gone.append)
    emitter.start()
    sinks = [RecordingSink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        emitter.open(i, sink, stream=i % 2 == 0)
    emitter.stop(Failure(status="UNAVAILABLE", message="code=shutting_down"))
    assert [sink.end.failure.message for sink in sinks if sink.end and sink.end.failure] == ["code=shutting_down"] * 3


def test_a_response_waits_for_its_tokens_but_the_first_and_the_last_do_not():
    sink = RecordingSink()
    emitter = Emitter(lambda request_id: None, interval_tokens=3)
    emitter.start()
    emitter.open(1, sink, stream=True)
    emitter.push(1, Piece())
    emitter.push(1, Piece(text="a", ids=[1]))
    assert sink.sending.wait(5)
    for token in range(2, 7):
        emitter.push(1, Piece(text="b", ids=[token]))
    emitter.close(1, End(finish_reason="length"))
    assert sink.ended.wait(5)
    emitter.stop(Failure(status="UNAVAILABLE", message=""))
    sizes = [len(piece.ids) for piece in sink.pieces]
    assert sizes[0] == 1
    assert sum(sizes) == 6
    assert all(size >= 3 for size in sizes[1:-1])
