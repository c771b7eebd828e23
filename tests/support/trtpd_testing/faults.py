"""What the fault matrix does to a running server: requests under way, moments of theirs, and processes struck there."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import zmq

from trtpd.build.manifest import read_engine_config, read_manifest
from trtpd.errors import TrtpdError
from trtpd.kv_transfer.pool_file import plan_file
from trtpd.runtime.worker.messages import unpack
from trtpd_testing.harness import Answer, Server, ask

OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"', "sh")
"""Runs a command with a /dev/shm of its own."""


def shm_of(server: Server) -> Path:
    """Its /dev/shm, as seen from here."""
    return Path(f"/proc/{server.process.pid}/root/dev/shm")


def rank_pid(server: Server, instance: str, rank: int = 0) -> int:
    """The process of one rank of an instance."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = child.cmdline()
            if "trtpd.runtime.worker" not in line or instance not in line or "-n" in line:
                continue
            if int(child.environ().get("OMPI_COMM_WORLD_RANK", "0")) == rank:
                return child.pid
    raise AssertionError(f"no rank {rank} of {instance} runs")


class Asking:
    """A request under way, in a thread of its own."""

    def __init__(self, server: Server, *, patience_s: float = 120.0, leave_after: int | None = None, **inputs: Any):
        self._server, self._inputs, self._patience_s, self._leave_after = server, inputs, patience_s, leave_after
        self._tokens, self._changed = 0, threading.Condition()
        self._answer = Answer(error="hung up")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(queue.Empty):  # the client's patience is over: it has hung up
            self._answer = ask(
                self._server,
                on_tokens=self._count,
                timeout_s=self._patience_s,
                leave_after=self._leave_after,
                **self._inputs,
            )
        self._count(1 << 30)

    def _count(self, tokens: int) -> None:
        with self._changed:
            self._tokens = tokens
            self._changed.notify_all()

    def wait_tokens(self, count: int) -> None:
        """Until so many have come, or the answer has ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._tokens >= count, 60)

    def placed(self) -> tuple[str, str]:
        """Waits for its placement: the prefill and the decode instance. It is the only request under way."""
        while True:
            busy = {n: i["role"] for n, i in self._server.status()["instances"].items() if i["requests"]}
            roles = {role: name for name, role in busy.items()}
            if {"prefill", "decode"} <= roles.keys():
                return roles["prefill"], roles["decode"]
            assert self._thread.is_alive(), "the answer had ended before it was seen"
            time.sleep(0.01)

    def answer(self) -> Answer:
        self._thread.join(180)
        assert not self._thread.is_alive()
        return self._answer


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end if it still lives."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def flip_kv(server: Server, build: Path, instance: str) -> None:
    """Flips a bit of every word of the KV that an instance holds, in all its ranks."""
    role = instance.split("_")[0]
    config = read_engine_config(build / read_manifest(build).roles[role].directory)
    for rank in range(config.tp):
        (pool,) = shm_of(server).glob(f"trtpd-{instance}.{rank_pid(server, instance, rank)}.*")
        plan = plan_file(config.layout, config.profile.kv_blocks, rank, 0)
        kv = np.memmap(pool, np.uint32, "r+", offset=plan.kv_at)
        np.bitwise_xor(kv, 1, out=kv)


@contextmanager
def full_shm(server: Server) -> Iterator[None]:
    """Its /dev/shm has no room meanwhile, whatever is let go of there."""
    filler, stop = shm_of(server) / "filler", threading.Event()

    def fill() -> None:
        while not stop.wait(0.01):
            stat = os.statvfs(filler)
            if stat.f_bavail:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, stat.f_bavail * stat.f_frsize)

    with filler.open("wb") as file:
        filling = threading.Thread(target=fill)
        filling.start()
        try:
            server.until(lambda _: os.statvfs(filler).f_bavail == 0)
            yield
        finally:
            stop.set()
            filling.join()
            filler.unlink()


class Meddler:
    """Stands between leaders and router, and loses or repeats numbered messages, both ways. In a thread of its own."""

    LOSES, REPEATS = 7, 5

    def __init__(self, router: str) -> None:
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address, self._router = f"tcp://127.0.0.1:{port}", router
        self.lost = self.repeated = self._numbered = 0
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(100):
                if socket is self._front:
                    who, *frames = self._front.recv_multipart()
                    if who not in self._backs:
                        self._backs[who] = self._context.socket(zmq.DEALER)
                        self._backs[who].connect(self._router)
                        poller.register(self._backs[who], zmq.POLLIN)
                    self._pass(frames, self._backs[who].send_multipart)
                else:
                    who = next(who for who, back in self._backs.items() if back is socket)
                    self._pass(socket.recv_multipart(), functools.partial(self._to_leader, who))

    def _to_leader(self, who: bytes, frames: list[bytes]) -> None:
        self._front.send_multipart([who, *frames])

    def _pass(self, frames: list[bytes], send: Callable[[list[bytes]], object]) -> None:
        self._numbered += _is_numbered(frames[-1])
        if _is_numbered(frames[-1]) and self._numbered % self.LOSES == 0:
            self.lost += 1
            return
        send(frames)
        if _is_numbered(frames[-1]) and self._numbered % self.REPEATS == 0:
            self.repeated += 1
            send(frames)


def _is_numbered(frame: bytes) -> bool:
    try:
        return unpack(frame).seq > 0
    except TrtpdError:
        return False
