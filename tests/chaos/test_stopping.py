"""`trtpd serve` stops cleanly: exit 0, no child process, nothing in /dev/shm, no run directory."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest
from trtpd_testing.harness import Answer, Server, ask, orphans_in_shm, serving, trtpd

pytestmark = pytest.mark.e2e


HANG_UP = pytest.param(
    signal.SIGHUP,  # SIGTERM is what stops the stream below
    marks=pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="run under nohup"),
)


@pytest.mark.parametrize("signum", [signal.SIGINT, HANG_UP])
def test_a_signal_stops_everything_and_exits_0(mixed_build: Path, tmp_path: Path, signum: int) -> None:
    with serving(mixed_build, tmp_path / "serve.log") as server:
        assert ask(server, text_input="Once upon a time", max_tokens=4).error is None
        assert server.stop(signum) == 0
    said = (tmp_path / "serve.log").read_text()
    assert "starting tritonserver and 2 models" in said
    assert "draining up to 30 s; Ctrl-C again stops at once" in said


def stream_of(server: Server, *, max_tokens: int) -> tuple[threading.Thread, threading.Event, list[Answer]]:
    """A client's thread, what it sets with its first token, and where its answer will be."""
    begun, result = threading.Event(), list[Answer]()

    def run() -> None:
        result.append(
            ask(server, text_input="Once upon a time", max_tokens=max_tokens, on_tokens=lambda n: begun.set())
        )

    asking = threading.Thread(target=run)
    asking.start()
    return asking, begun, result


def test_a_running_stream_ends_before_the_server_does(mixed_build: Path, tmp_path: Path) -> None:
    with serving(mixed_build, tmp_path / "serve.log") as server:
        asking, begun, result = stream_of(server, max_tokens=60)
        assert begun.wait(30)
        assert server.stop(signal.SIGTERM) == 0
        asking.join(30)
        assert result[0].error is None
        assert len(result[0].ids) == 60


def test_a_killed_launcher_ends_its_streams_leaves_no_process_and_the_next_start_sweeps_its_memory(
    mixed_build: Path, tmp_path: Path
) -> None:
    before = orphans_in_shm()
    with serving(mixed_build, tmp_path / "first.log") as server:
        tree = psutil.Process(server.process.pid).children(recursive=True)
        asking, begun, result = stream_of(server, max_tokens=400)
        assert begun.wait(30)
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(tree, timeout=15)
        assert not alive
        asking.join(30)
        assert "shutting_down" in str(result[0].error)
    with serving(mixed_build, tmp_path / "second.log") as server:
        assert ask(server, text_input="Once upon a time", max_tokens=2).error is None
        server.shm_before = before
        assert server.stop() == 0


def test_a_port_in_use_is_one_line_and_exit_2(mixed_build: Path, tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        run = trtpd("serve", mixed_build, "--http", port, "--grpc", "0", "--metrics", "0")
    assert run.returncode == 2
    assert str(port) in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
