"""A kept group of ranks and everything that may happen to one of them: real processes, real signals."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from trtpd_testing.emulated_build import write_build
from trtpd_testing.mini_router import MiniRouter, make_request

from trtpd.errors import EngineError
from trtpd.kv_transfer.pool import sweep
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import RequestKind
from trtpd.runtime.serve import worker_process
from trtpd.runtime.serve.worker_process import Ready, WorkerCommand, WorkerProcess
from trtpd.runtime.worker import group as group_module
from trtpd.runtime.worker.board import Board
from trtpd.runtime.worker.group import sweep_groups

SUPPORT = Path(__file__).resolve().parents[2] / "support"
WAIT_S = 60.0
RANKS = 2


class FaultyCommand(WorkerCommand):
    """Starts a worker that goes wrong when told to, and is watched impatiently."""

    def _arguments(self) -> list[str]:
        _, _, *flags = super()._arguments()
        return ["-m", "trtpd_testing.faulty_worker", *flags, "--silent-s", "2", "--step-limit-s", "3.5"]


class Host:
    """A router, a group `decode_0` and beside it a worker `prefill_0` of one rank."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tp-"))
        (self.folder / "logs").mkdir()
        address = f"ipc://{self.folder}/router"
        self.build = write_build(self.folder / "build", "prefill", "decode", tp={"decode": RANKS}, decode_step_ms=20.0)
        self.router = MiniRouter(address)
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        self.environment = {**os.environ, "PYTHONPATH": path}
        self.requests = 0
        self.prefill, self.decode = (
            WorkerProcess(
                FaultyCommand(build=self.build, instance=name, router=address, run_dir=self.folder, ranks=ranks),
                self.environment,
            )
            for name, ranks in (("prefill_0", 1), ("decode_0", RANKS))
        )

    def start(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.start(WAIT_S)
        self.router.until(lambda: len(self.router.hellos) == 2)

    def close(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.stop(grace_s=5.0)
        self.router.close()
        shutil.rmtree(self.folder)

    @property
    def registered(self) -> Ready | None:
        """What is ready, if the router knows just that life of it."""
        ready, hello = self.decode.ready, self.router.hellos["decode_0"][-1]
        return ready if ready is not None and hello.generation.startswith(ready.generation) else None

    def lost(self) -> list[core.Lost]:
        """Lives of the group that the router has seen end."""
        return self.router.lost.get("decode_0", [])

    @property
    def group(self) -> Path:
        """The folder of the group's present life."""
        (path,) = Path("/dev/shm").glob(f"{group_module.PREFIX}{os.getpid()}.*.decode_0")
        return path

    def ranks(self) -> list[psutil.Process]:
        return [psutil.Process(state.pid) for state in Board(self.group / "board").states()]

    def begin(self, *, max_tokens: int = 200) -> tuple[int, int]:
        """A request that the group decodes for seconds; its key, once it streams."""
        self.router.until(lambda: self.registered)
        self.requests += 1
        request = make_request(self.requests, (5, 6, 7), kind=RequestKind.CONTEXT_AND_GENERATION, max_tokens=max_tokens)
        self.router.submit("decode_0", request)
        self.router.until_heard((self.requests, 1), core.Tokens)
        return (self.requests, 1)

    def tell(self, fault: str) -> None:
        fresh = self.folder / "fault.new"
        fresh.write_text(fault)
        fresh.replace(self.folder / "fault")

    def is_kept(self, former: Ready) -> bool:
        return self.decode.ready not in (former, None)


def ended(process: psutil.Process) -> bool:
    """Whether it runs no more. It may go between two looks at it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def pools() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("trtpd-decode_0.")}


def pools_of(processes: list[psutil.Process]) -> set[str]:
    return {name for name in pools() if any(f".{process.pid}." in name for process in processes)}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_process, "BACKOFF_MAX_S", worker_process.BACKOFF_FIRST_S)
            host.start()
            yield host
    finally:
        host.close()


FAULTS: dict[str, Callable[[Host], None]] = {
    "rank 0 is killed": lambda host: host.ranks()[0].kill(),
    "a follower is killed": lambda host: host.ranks()[1].kill(),
    "a follower is stopped": lambda host: host.ranks()[1].send_signal(signal.SIGSTOP),
    "a follower fails in a step": lambda host: host.tell("raise 1"),
    "a follower hangs in a step": lambda host: host.tell("hang 1"),
    "mpirun is killed": lambda host: host.ranks()[0].parent().kill(),
}
SAID = {
    "a follower is stopped": "rank 1 (pid {pid}) has not run for",
    "a follower fails in a step": "rank 1 ends its group: told to fail",
    "a follower hangs in a step": "rank 1 (pid {pid}) hung",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_to_one_rank_ends_all_and_only_the_group_and_it_comes_back(host: Host, fault: str) -> None:
    former, ranks, prefill = host.decode.ready, host.ranks(), host.prefill.ready
    assert former is not None
    assert len(pools_of(ranks)) == RANKS
    lost = len(host.lost())
    key = host.begin()
    FAULTS[fault](host)
    try:
        until(lambda: all(ended(rank) for rank in ranks))
    finally:
        (host.folder / "fault").unlink(missing_ok=True)
    until(lambda: host.is_kept(former))
    host.router.until(lambda: len(host.lost()) > lost)
    assert host.lost()[-1].generation == former.generation
    assert not host.router.finished(key)
    assert not pools_of(ranks)
    assert len(pools_of(host.ranks())) == RANKS
    if fault in SAID:
        assert SAID[fault].format(pid=ranks[1].pid) in (host.folder / "logs" / "decode_0.log").read_text()
    key = host.begin(max_tokens=5)
    host.router.until(lambda: host.router.finished(key))
    assert (host.prefill.ready, "prefill_0" in host.router.lost) == (prefill, False)


def test_a_request_is_handed_over_to_a_group(host: Host) -> None:
    host.requests += 1
    host.router.start(make_request(host.requests, tuple(range(10, 60))))
    host.router.until(lambda: host.router.finished((host.requests, 1)))
    assert len(host.router.answer((host.requests, 1))) == 12


def test_a_ctrl_c_in_the_terminal_leaves_the_group_alone(host: Host) -> None:
    mpirun = host.ranks()[0].parent()
    assert mpirun is not None
    assert {os.getpgid(process.pid) for process in (mpirun, *host.ranks())}.isdisjoint({os.getpgrp()})
    for rank in host.ranks():
        rank.send_signal(signal.SIGINT)
    key = host.begin(max_tokens=5)
    host.router.until(lambda: host.router.finished(key))


def test_a_group_that_is_stopped_leaves_nothing(host: Host) -> None:
    ranks, folder = host.ranks(), host.group
    host.decode.stop(grace_s=20.0)
    assert not any(rank.is_running() for rank in ranks)
    assert not pools_of(ranks)
    assert not folder.exists()


def test_a_killed_keeper_takes_mpirun_and_all_ranks_along(host: Host) -> None:
    address = f"ipc://{host.folder}/router"
    command = [sys.executable, "-P", "-m", "trtpd_testing.keeper"]
    arguments = [str(host.build), "decode_0", address, str(host.folder), str(RANKS)]
    keeper = subprocess.Popen([*command, *arguments], env=host.environment, stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    try:
        assert keeper.stdout.readline() == "ready\n"
        below = psutil.Process(keeper.pid).children(recursive=True)
        assert len(below) == 1 + RANKS
        watches = [os.pidfd_open(process.pid) for process in below]
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
    for watch in watches:
        assert select.select([watch], [], [], 20.0)[0]
        os.close(watch)
    assert any(f".{keeper.pid}." in name for name in sweep_groups())
    sweep()
    assert not pools_of(below)
    assert not list(Path("/dev/shm").glob(f"{group_module.PREFIX}{keeper.pid}.*"))


def test_without_mpi_a_group_is_refused_with_the_mend_and_a_single_worker_is_not(host: Host, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI today')")
    environment = {**host.environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{host.environment['PYTHONPATH']}"}
    command = WorkerCommand(
        build=host.build, instance="decode_0", router="ipc:///nowhere", run_dir=host.folder, ranks=RANKS
    )
    with pytest.raises(EngineError, match=r"no MPI today.*pip install '\.\[mpi\]'"):
        WorkerProcess(command, environment).start(WAIT_S)
