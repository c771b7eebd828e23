"""Model control against a small HTTP server that answers as Triton does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trtpd.errors import ServeError
from trtpd.runtime.serve.triton_http import TritonControl


class FakeTriton(ThreadingHTTPServer):
    states: list[str]
    load_error: str


class Handler(BaseHTTPRequestHandler):
    server: FakeTriton

    def do_GET(self):
        self._reply(200, {})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("/index"):
            states = self.server.states
            state = states.pop(0) if len(states) > 1 else states[0]
            self._reply(200, [{"name": "m", "version": "1", "state": state}])
        elif self.path.endswith("/load"):
            self._reply(400, {"error": self.server.load_error})
        else:
            self._reply(200, {})

    def _reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


@pytest.fixture
def server():
    made = FakeTriton(("127.0.0.1", 0), Handler)
    made.states, made.load_error = ["READY"], ""
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def control(server):
    return TritonControl(*server.server_address)


def test_unloading_waits_until_the_model_is_gone(server, control):
    server.states = ["UNLOADING", "UNLOADING", "UNAVAILABLE"]
    assert control.unload("m", timeout_s=20)
    assert server.states == ["UNAVAILABLE"]


def test_unloading_gives_up_after_its_time(server, control):
    server.states = ["UNLOADING"]
    assert not control.unload("m", timeout_s=0.2)


def test_a_failed_load_says_what_the_model_said_and_no_more(server, control):
    server.load_error = (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: TritonModelException: "
        "EngineError: no room\n\nAt:\n  /x/model.py(25): initialize\n"
    )
    with pytest.raises(ServeError, match=r"^model m did not load: EngineError: no room$"):
        control.load("m", timeout_s=5)


def test_a_server_that_is_gone_is_not_live_and_calls_name_it(server):
    control = TritonControl("127.0.0.1", 1)
    assert not control.live()
    with pytest.raises(ServeError, match=r"127\.0\.0\.1:1"):
        control.ready("m")
