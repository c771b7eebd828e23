"""A stage model with a stand-in for its worker's process, whose end of the local channel the test plays."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq
from trtpd_testing.emulated_build import write_build

from trtpd.build.manifest import read_manifest, write_json
from trtpd.runtime.serve import stage_model
from trtpd.runtime.serve.stage_model import STOP_GRACE_S, StageModel, _drain
from trtpd.runtime.serve.worker_process import Ready
from trtpd.runtime.worker.local import Ask, Batch, CancelAsk, DecodeAsk, DrainAsk, Status, StatusAsk

WAIT_S = 20.0
FINAL = 1


class TritonError(Exception):
    UNAVAILABLE, INVALID_ARG, INTERNAL = 14, 3, 13

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


PB = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    Tensor=lambda name, value: (name, value),
    InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=dict(tensors), error=error),
    TritonError=TritonError,
)


class Request:
    def __init__(self, **tensors) -> None:
        self._tensors = tensors
        self.sent: queue.Queue = queue.Queue()
        self.gone = False

    def inputs(self):
        return [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: np.atleast_2d(value))
            for name, value in self._tensors.items()
        ]

    def get_response_sender(self):
        return SimpleNamespace(send=self._send, is_cancelled=lambda: self.gone)

    def _send(self, response=None, flags=0):
        self.sent.put((response, flags))

    def last(self):
        """The last response; those before it are dropped."""
        while True:
            response, flags = self.sent.get(timeout=WAIT_S)
            if flags == FINAL:
                return response


class Worker:
    """The worker's process and its end of the channel."""

    def __init__(self, address: str) -> None:
        self.ready: Ready | None = Ready(ready=True, generation="g1", local=address)
        self.graces_s: list[float] = []
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(address)

    def start(self, timeout_s): ...

    def stop(self, *, grace_s):
        self.graces_s.append(grace_s)
        self.ready = None
        self.socket.close(linger=0)

    def expect(self, kind):
        while self.socket.poll(int(WAIT_S * 1000)):
            client, body = self.socket.recv_multipart()
            ask = msgspec.msgpack.decode(body, type=Ask)
            if isinstance(ask, kind):
                return client, ask
        raise AssertionError(f"no {kind.__name__} came")

    def answer(self, client, answer):
        self.socket.send_multipart([client, msgspec.msgpack.encode(answer)])


@pytest.fixture
def worker(tmp_path, monkeypatch):
    made = Worker(f"ipc://{tmp_path}/w")
    monkeypatch.setattr(stage_model, "WorkerProcess", lambda *_: made)
    monkeypatch.setattr(stage_model, "worker_command", lambda *_: None)
    monkeypatch.setattr(stage_model, "engine_config_of", lambda *_: SimpleNamespace(max_seq_tokens=512))
    monkeypatch.setattr(stage_model, "_drain", lambda *_: True)
    monkeypatch.setenv("TRTPD_RUN_DIR", str(tmp_path))
    return made


@pytest.fixture
def model(worker, bytewise, monkeypatch, tmp_path):
    (tmp_path / "stubs").mkdir()
    monkeypatch.setattr(stage_model, "TextLayer", lambda _: bytewise)
    args = {"model_name": "decode_0", "model_repository": str(tmp_path / "build" / "model_repo" / "decode_0")}
    made = StageModel(PB, args)
    yield made
    made.finalize()


def test_a_decode_comes_batch_by_batch(model, worker):
    request = Request(kv_tokens=100, max_tokens=3)
    model.execute([request])
    client, ask = worker.expect(DecodeAsk)
    assert (ask.kv_tokens, ask.max_tokens) == (100, 3)
    worker.answer(client, Batch(first_index=0, ids=(1, 2), done=False))
    worker.answer(client, Batch(first_index=2, ids=(3,), done=True))
    assert request.last().error is None


def test_a_worker_that_ends_under_a_request_ends_it_at_once(model, worker):
    request = Request(kv_tokens=100, max_tokens=3)
    model.execute([request])
    worker.expect(DecodeAsk)
    worker.ready = Ready(ready=True, generation="g2", local="ipc://elsewhere")
    assert "its worker ended" in str(request.last().error)


def test_a_client_that_leaves_stops_its_decode_and_gets_an_empty_end(model, worker):
    request = Request(kv_tokens=100, max_tokens=3)
    model.execute([request])
    client, _ = worker.expect(DecodeAsk)
    request.gone = True
    assert worker.expect(CancelAsk)[0] == client
    assert request.last() is None


def test_a_worker_that_does_not_say_how_it_is_gets_no_grace(model, worker, monkeypatch):
    monkeypatch.setattr(stage_model, "_drain", _drain)
    monkeypatch.setattr(stage_model, "ANSWER_S", 0.1)
    model.finalize()
    assert worker.graces_s == [0.0]


def test_a_worker_that_answers_is_drained_until_it_has_no_jobs(model, worker, monkeypatch):
    monkeypatch.setattr(stage_model, "_drain", _drain)
    ending = threading.Thread(target=model.finalize)
    ending.start()
    for kind, jobs in ((StatusAsk, 2), (DrainAsk, 2), (StatusAsk, 1), (StatusAsk, 0)):
        client, _ = worker.expect(kind)
        worker.answer(
            client,
            Status(instance="x_0", generation="g1", registered=True, draining=True, jobs=jobs, busy_s=0.0, load=None),
        )
    ending.join(WAIT_S)
    assert worker.graces_s == [STOP_GRACE_S]


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"kv_tokens": 0, "max_tokens": 1}, "kv_tokens is 0"),
        ({"kv_tokens": 10}, "max_tokens is missing"),
        ({"kv_tokens": 10, "max_tokens": 600}, "max_tokens is 600"),
        ({"kv_tokens": 10, "max_tokens": 1, "input_ids": [1, 2]}, "input_ids are both given"),
        ({}, "send input_ids or text_input"),
        ({"input_ids": np.zeros(600, np.int32)}, "the prompt has 600 tokens"),
        ({"text_input": np.array([], np.object_)}, "the prompt has 0 tokens"),
        ({"text_input": np.array([b"a", b"b"], np.object_)}, "text_input holds 2 values"),
        ({"text_input": np.array([b"\xff"], np.object_)}, "text_input is not valid UTF-8"),
        ({"input_ids": np.array([], np.int32)}, "the prompt has 0 tokens"),
        ({"kv_tokens": np.array([], np.int32), "max_tokens": 1}, "kv_tokens is missing"),
        ({"kv_tokens": 10, "max_tokens": np.array([1, 2])}, "max_tokens holds 2 values"),
    ],
)
def test_what_can_not_be_measured_is_refused_by_name(model, tensors, named):
    request = Request(**tensors)
    model.execute([request])
    error = request.last().error
    assert named in str(error)
    assert error.code == TritonError.INVALID_ARG


def test_the_worker_of_a_group_is_started_with_its_ranks_and_hosts(tmp_path, monkeypatch):
    build = write_build(tmp_path / "build", "prefill", "decode", tp={"decode": 3})
    manifest = read_manifest(build)
    pools = {"decode": {"hosts": ["here:2", "there"], "tp": 3}}
    write_json(build / "manifest.json", msgspec.structs.replace(manifest, settings={"pools": pools}))
    monkeypatch.setenv("TRTPD_ROUTER", "ipc://r")
    monkeypatch.setenv("TRTPD_RUN_DIR", str(tmp_path))
    prefill, decode = (stage_model.worker_command(build, name) for name in ("prefill_0", "decode_0"))
    assert (prefill.ranks, prefill.hosts) == (1, None)
    assert (decode.ranks, decode.hosts) == (3, ["here:2", "there"])
