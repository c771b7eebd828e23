from __future__ import annotations

import os
import resource
import signal
import stat
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from trtpd.errors import ServeError
from trtpd.runtime.serve.preflight import Ports
from trtpd.runtime.serve.server_package import ServerPackage
from trtpd.runtime.serve.triton_server import (
    ERROR_CHARS,
    STACK_BYTES,
    ServerPlan,
    TritonServer,
    last_error,
    stack_limit,
)

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (8 << 20, NONE, STACK_BYTES),
        (8 << 20, 64 << 20, 64 << 20),
        (1 << 30, NONE, 1 << 30),
        (NONE, NONE, STACK_BYTES),
    ],
)
def test_the_servers_threads_get_a_large_stack_as_far_as_the_host_allows(soft, hard, expected):
    assert stack_limit(soft, hard) == expected


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Starts a shell script in the place of tritonserver."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = []

    def start(script: str) -> TritonServer:
        binary = tmp_path / "tritonserver"
        binary.write_text(f"#!/bin/bash\n{script}\n")
        binary.chmod(0o755)
        for name in ("logs", "stubs"):
            (tmp_path / name).mkdir()
        package = ServerPackage(
            name="script", binary=binary, backend=tmp_path, stub=tmp_path, caches=tmp_path, libraries=None
        )
        plan = ServerPlan(
            package=package,
            host="127.0.0.1",
            ports=Ports(http=1, grpc=2, metrics=3),
            models=1,
            repository=tmp_path,
            run_dir=tmp_path,
            environment=dict(os.environ),
            control_key="k",
            load_timeout_s=1.0,
        )
        started.append(TritonServer(plan))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.kill()


def pid_in(path: Path) -> int:
    while not (path.exists() and path.read_text().strip()):
        time.sleep(0.01)
    return int(path.read_text())


def end_of(server: TritonServer) -> str:
    """What is said of its end."""
    while True:
        try:
            server.check()
        except ServeError as error:
            return str(error)
        time.sleep(0.01)


def test_what_a_killed_server_leaves_running_is_ended_with_it(server, tmp_path):
    running = server("sleep 600 & echo $! > child; echo $$ > self; wait")
    child = psutil.Process(pid_in(tmp_path / "child"))
    parent = pid_in(tmp_path / "self")
    running.check()
    os.kill(parent, signal.SIGKILL)
    end_of(running)
    assert child.is_running()
    running.kill()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


ERROR = 'E1129 18:40:57.272 15729 model.cc:692] "no room for it"'


def test_a_servers_end_is_told_in_one_line_and_its_log_kept_for_its_user(server, tmp_path):
    told = end_of(server(f"echo '{ERROR}'; echo +-----+; kill -9 $$"))
    kept = tmp_path / f"trtpd-last-{os.getuid()}-tritonserver.log"
    assert told == f"tritonserver was ended by SIGKILL: no room for it; its log is kept in {kept}"
    assert "+-----+" in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_an_exit_code_is_told_where_no_error_was(server):
    assert end_of(server("exit 3")).startswith("tritonserver ended with code 3; its log")


def test_a_long_error_is_cut():
    assert last_error("an error " + "x" * 5000 + "\n| a | table |").startswith("an error xxx")
    assert len(last_error("an error " + "x" * 5000)) == ERROR_CHARS


def test_what_every_start_without_a_gpu_logs_is_no_reason_for_an_end():
    start = 'E1129 18:40:57.272 15729 cuda.cc:41] "CudaDriverHelper has not been initialized."'
    assert last_error(start) == ""
    assert last_error(f"{ERROR}\n{start}") == "no room for it"
