"""The worker as a process: ready, killed, stopped, orphaned, started wrongly."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.emulated_build import engine_config, write_build
from trtpd_testing.mini_router import MiniRouter, make_request

from trtpd.build.manifest import write_json
from trtpd.kv_transfer.pool import sweep
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import RequestKind
from trtpd.runtime.worker.local_client import LocalClient

WORKER = [sys.executable, "-P", "-m", "trtpd.runtime.worker"]
KEY = (1, 1)


class Host:
    """Starts workers of an emulated build and knows what they leave in /dev/shm."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tp-"))
        self.address = f"ipc://{self.folder}/router"
        self.build = write_build(self.folder / "build", "prefill", "decode", decode_step_ms=20.0)
        self.processes: list[subprocess.Popen[str]] = []

    def arguments(self, instance: str, *more: str) -> list[str]:
        places = ["--build", str(self.build), "--router", self.address, "--run-dir", str(self.folder)]
        return [*WORKER, "--instance", instance, *places, *more]

    def start(self, instance: str, *more: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """A worker that has said that it is ready, and what it said."""
        process = self._launch(self.arguments(instance, *more))
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return process, json.loads(line)

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.processes.append(process)
        return process

    def fails(self, *arguments: str) -> tuple[int, str]:
        """Exit status and standard error of a worker that can't start."""
        process = self._launch(arguments)
        assert process.wait(timeout=60) != 0
        said, errors = process.communicate()
        assert (said, pools_of(process)) == ("", set())
        return process.returncode, errors

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        sweep()
        shutil.rmtree(self.folder)


@pytest.fixture
def host():
    made = Host()
    yield made
    made.close()


@pytest.fixture
def router(host):
    made = MiniRouter(host.address)
    yield made
    made.close()


def pools_of(process: subprocess.Popen[str]) -> set[str]:
    return pools_of_pid(process.pid)


def pools_of_pid(pid: int) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("trtpd-") and f".{pid}." in name}


def test_two_processes_hand_a_request_over_and_leave_nothing_when_stopped(host, router):
    prefill, ready = host.start("prefill_0")
    decode, _ = host.start("decode_0")
    assert (ready["ready"], ready["instance"], ready["pid"]) == (True, "prefill_0", prefill.pid)
    assert ready["prefill_tokens_per_s"] > 0
    router.until(lambda: len(router.hellos) == 2)
    assert router.hellos["prefill_0"][0].generation == ready["generation"]
    router.start(make_request(1, tuple(range(10, 60))))
    router.until(lambda: router.finished(KEY))
    assert len(router.answer(KEY)) == 12
    assert pools_of(prefill)
    for process in (prefill, decode):
        process.terminate()
        assert process.wait(timeout=20) == 0
        assert not pools_of(process)
    router.until(lambda: len(router.lost) == 2)
    assert {lost[0].reason for lost in router.lost.values()} == {"stopped"}


def test_a_killed_worker_is_lost_and_its_successor_is_known_as_another(host, router):
    first, _ = host.start("decode_0")
    router.until(lambda: router.hellos.get("decode_0"))
    first.kill()
    first.wait()
    router.until(lambda: router.lost.get("decode_0"))
    host.start("decode_0")
    router.until(lambda: len(router.hellos["decode_0"]) == 2)
    old, new = (hello.generation for hello in router.hellos["decode_0"])
    assert old < new
    assert [lost.generation for lost in router.lost["decode_0"]] == [old]


def test_a_worker_stopped_for_a_while_comes_back_as_new_and_holds_nothing(host, router):
    worker, ready = host.start("decode_0")
    router.until(lambda: router.hellos.get("decode_0"))
    router.submit("decode_0", make_request(1, (5, 6, 7), kind=RequestKind.CONTEXT_AND_GENERATION, max_tokens=200))
    router.until_heard(KEY, core.Tokens)
    worker.send_signal(signal.SIGSTOP)
    router.until(lambda: router.lost.get("decode_0"))
    worker.send_signal(signal.SIGCONT)
    router.until(lambda: len(router.hellos["decode_0"]) == 2)
    router.until(lambda: router.load["decode_0"].running == 0)
    with LocalClient(ready["local"]) as client:
        router.until(lambda: client.status().jobs == 0)
    assert not router.finished(KEY)


def test_sigterm_lets_a_short_answer_finish(host, router):
    worker, _ = host.start("decode_0", "--drain-s", "20")
    router.until(lambda: router.hellos.get("decode_0"))
    router.submit("decode_0", make_request(1, (5, 6, 7), kind=RequestKind.CONTEXT_AND_GENERATION, max_tokens=30))
    router.until_heard(KEY, core.Tokens)
    worker.terminate()
    router.until(lambda: router.finished(KEY))
    assert len(router.answer(KEY)) == 30
    assert worker.wait(timeout=20) == 0


def test_a_second_sigterm_ends_it_without_waiting(host, router):
    worker, _ = host.start("decode_0", "--drain-s", "600")
    router.until(lambda: router.hellos.get("decode_0"))
    router.submit("decode_0", make_request(1, (5, 6, 7), kind=RequestKind.CONTEXT_AND_GENERATION, max_tokens=240))
    router.until_heard(KEY, core.Tokens)
    worker.terminate()
    router.submit("decode_0", make_request(2, (5, 6, 7), kind=RequestKind.CONTEXT_AND_GENERATION))
    (rejected,) = router.until_heard((2, 1), core.Rejected)
    assert rejected.code == "draining"
    worker.terminate()
    assert worker.wait(timeout=20) == 0
    assert not router.finished(KEY)
    assert not pools_of(worker)


def test_it_outlives_a_ctrl_c_and_ends_when_its_standard_input_is_closed(host):
    worker, ready = host.start("decode_0")
    worker.send_signal(signal.SIGINT)
    with LocalClient(ready["local"]) as client:
        assert not client.status().draining
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(timeout=20) == 0
    assert not pools_of(worker)


def test_the_death_of_the_starting_process_ends_it(host):
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE); print(p.pid, p.stdout.readline().decode(), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-P", "-c", code, *host.arguments("decode_0")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    host.processes.append(parent)
    assert parent.stdout is not None
    worker_pid = int(parent.stdout.readline().split()[0])
    watch = os.pidfd_open(worker_pid)
    parent.kill()
    parent.wait()
    ended, _, _ = select.select([watch], [], [], 20)
    os.close(watch)
    assert ended
    assert not pools_of_pid(worker_pid)


@pytest.mark.parametrize(
    ("instance", "changes", "code", "reason"),
    [
        ("decode_9", {}, 2, "decode_0, prefill_0"),
        ("decode_0", {"--build": "/nowhere"}, 2, "/nowhere"),
        ("decode_0", {"--router": "tcp://0.0.0.0:5000"}, 1, "not loopback"),
        ("decode_0", {"--run-dir": "/" + "x" * 120}, 1, "shorter run directory"),
        ("decode_0", {"--run-dir": "/nowhere"}, 1, "can't listen"),
    ],
)
def test_what_can_not_start_says_why_in_one_line(host, instance, changes, code, reason):
    more = [part for pair in changes.items() for part in pair]
    status, errors = host.fails(*host.arguments(instance, *more))
    assert status == code
    assert reason in errors
    assert len(errors.splitlines()) == 1


def test_an_engine_built_with_another_version_is_refused_with_the_mend(host):
    config = msgspec.structs.replace(engine_config("decode"), versions={"trtpd": "0.0.1"})
    write_json(host.build / "decode" / "config.json", config)
    status, errors = host.fails(*host.arguments("decode_0"))
    assert status == 1
    assert "0.0.1" in errors
    assert len(errors.splitlines()) == 1


def test_a_broken_engine_directory_is_named(host):
    (host.build / "decode" / "config.json").write_text("{}")
    status, errors = host.fails(*host.arguments("decode_0"))
    assert status == 1
    assert "config.json" in errors
    assert len(errors.splitlines()) == 1
