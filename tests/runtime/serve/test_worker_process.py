"""A keeper with stand-ins for the worker: small scripts that say they are ready and wait."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

from trtpd.errors import EngineError, ServeError
from trtpd.runtime.core.events import Lost
from trtpd.runtime.serve.worker_process import WorkerCommand, WorkerProcess, worker_environment
from trtpd.runtime.worker.mpirun import Mpi

WAIT_S = 20.0
READY = 'import json,os,sys; print(json.dumps({"ready":True,"generation":"g%d"%os.getpid(),"local":"x"}),flush=True);'
SERVE = READY + "sys.stdin.read()"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand(WorkerCommand):
    script: str

    def argv(self):
        return [sys.executable, "-c", self.script]


@pytest.fixture
def keep(tmp_path):
    made: deque[WorkerProcess] = deque()
    (tmp_path / "logs").mkdir()

    def start(script):
        command = ScriptCommand(
            build=tmp_path, instance="x_0", router=f"ipc://{tmp_path}/r", run_dir=tmp_path, script=script
        )
        made.append(WorkerProcess(command, os.environ))
        return made[-1]

    yield start
    for worker in made:
        worker.stop(grace_s=1.0)


@pytest.fixture
def reported(monkeypatch):
    """Deaths told to the router."""
    deaths: list[Lost] = []

    def report(address, *, instance, generation, reason, keys=None):
        deaths.append(Lost(instance=instance, generation=generation, reason=reason))

    monkeypatch.setattr("trtpd.runtime.serve.worker_process.report_death", report)
    return deaths


def until(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_killed_worker_is_reported_and_comes_back_with_a_new_generation(keep, reported):
    worker = keep(SERVE)
    first = worker.start(WAIT_S)
    os.kill(int(first.generation[1:]), signal.SIGKILL)
    until(lambda: worker.ready not in (first, None))
    assert [(death.instance, death.generation) for death in reported] == [("x_0", first.generation)]


def test_closing_its_input_ends_a_worker_and_nothing_restarts_it(keep, reported):
    worker = keep(SERVE)
    pid = int(worker.start(WAIT_S).generation[1:])
    worker.stop(grace_s=WAIT_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.ready is None
    assert reported == []


def test_a_worker_that_listens_to_nothing_is_killed(keep, reported):
    worker = keep("import signal;signal.signal(signal.SIGTERM,signal.SIG_IGN);" + READY + "import time;time.sleep(99)")
    pid = int(worker.start(WAIT_S).generation[1:])
    worker.stop(grace_s=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_is_stopped_is_killed_without_grace(keep, reported):
    worker = keep(SERVE)
    pid = int(worker.start(WAIT_S).generation[1:])
    os.kill(pid, signal.SIGSTOP)
    stopping = threading.Thread(target=worker.stop, kwargs={"grace_s": 1e6}, daemon=True)
    stopping.start()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_cannot_start_is_told_in_its_own_words(keep, reported):
    worker = keep("import sys; print('12:00 x_0 ERROR no room in /dev/shm', file=sys.stderr); sys.exit(1)")
    with pytest.raises(EngineError, match="x_0: its worker could not start: no room in /dev/shm"):
        worker.start(WAIT_S)


def test_a_worker_that_is_never_ready_is_given_up(keep, reported):
    worker = keep("import time; time.sleep(99)")
    with pytest.raises(EngineError, match=r"not ready within 0\.3 s"):
        worker.start(0.3)


def test_a_worker_that_comes_back_and_is_never_ready_is_ended_and_started_again(keep, reported, monkeypatch, tmp_path):
    mark = tmp_path / "second"
    hang = f"import os,time; p={str(mark)!r}; first=os.path.exists(p+'0'); open(p+'0','w').close();"
    hang += "first and not os.path.exists(p) and (open(p,'w').close(), time.sleep(99));"
    worker = keep(hang + SERVE)
    first = worker.start(WAIT_S)
    monkeypatch.setattr("trtpd.runtime.serve.worker_process.LOAD_TIMEOUT_S", 0.5)
    os.kill(int(first.generation[1:]), signal.SIGKILL)
    until(mark.exists)
    monkeypatch.setattr("trtpd.runtime.serve.worker_process.LOAD_TIMEOUT_S", WAIT_S)
    until(lambda: worker.ready not in (first, None))


def test_a_stop_in_the_instant_before_a_start_starts_nothing(keep, reported):
    worker = keep(SERVE)
    spawn = worker._spawn

    def late():
        assert worker._stopping.wait(WAIT_S)
        return spawn()

    worker._spawn = late
    worker._keeper.start()
    stopping = threading.Thread(target=worker.stop, kwargs={"grace_s": 1.0}, daemon=True)
    stopping.start()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()


def test_chatter_before_the_ready_line_is_no_answer(keep, reported):
    worker = keep("print('hello', flush=True);" + SERVE)
    assert worker.start(WAIT_S).local == "x"


def test_workers_get_the_loaders_path_of_before_the_server():
    def path_of(**environment):
        return worker_environment(environment).get("LD_LIBRARY_PATH")

    assert path_of(LD_LIBRARY_PATH="triton:/mine", TRTPD_LD_LIBRARY_PATH="/mine") == "/mine"
    assert path_of(LD_LIBRARY_PATH="triton", TRTPD_LD_LIBRARY_PATH="") is None
    assert path_of(LD_LIBRARY_PATH="/mine") == "/mine"


def test_workers_copy_past_the_cache_unless_the_user_says_otherwise():
    ours = "glibc.cpu.x86_non_temporal_threshold=131072"
    assert worker_environment({})["GLIBC_TUNABLES"] == ours
    given = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert worker_environment(given)["GLIBC_TUNABLES"] == f"glibc.malloc.arena_max=1:{ours}"
    given = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1"}
    assert worker_environment(given) == given


def test_the_command_names_build_instance_router_and_run_directory(tmp_path):
    command = WorkerCommand(build=tmp_path, instance="decode_0", router="ipc://r", run_dir=tmp_path)
    argv = command.argv()
    assert argv[1:3] == ["-m", "trtpd.runtime.worker"]
    assert json.dumps(argv).count("--") == 4


def test_a_worker_of_several_ranks_is_started_by_mpirun_in_its_groups_folder(tmp_path):
    command = WorkerCommand(
        build=tmp_path, instance="decode_0", router="ipc://r", run_dir=tmp_path, ranks=3, hosts=["here:2", "there"]
    )
    words = command.group_argv(Mpi(mpirun=Path("/mpi/bin/mpirun"), version="5"), tmp_path / "group", {"PATH": "/bin"})
    assert words[:3] == ["/mpi/bin/mpirun", "-n", "3"]
    assert "here:2,there" in words
    start = words.index(sys.executable)
    assert words[start : start + 5] == [sys.executable, "-m", "mpi4py", "-m", "trtpd.runtime.worker"]
    assert words[-2:] == ["--group", str(tmp_path / "group")]
    assert words[start + 3 : -2] == command.argv()[1:]


def test_a_group_whose_folder_can_not_be_made_says_so_and_is_tried_again(keep, reported, monkeypatch):
    def no_room(instance, ranks):
        raise ServeError("/dev/shm/trtpd-mpi, where the ranks meet, can't be made: No space left on device")

    worker = keep(SERVE)
    worker._mpi = Mpi(mpirun=Path("/mpi/bin/mpirun"), version="5")
    monkeypatch.setattr("trtpd.runtime.serve.worker_process.GroupFolder.make", no_room)
    with pytest.raises(EngineError, match=r"x_0: its worker could not start: .*No space left on device"):
        worker.start(WAIT_S)
    assert reported == []
