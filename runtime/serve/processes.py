"""Processes by identity: a pid alone may have been given to another process meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable

import msgspec
import psutil

from trtpd.kv_transfer.pool_file import start_ticks


class Identity(msgspec.Struct, frozen=True):
    """One process of this boot. `start_ticks` is when it began, in the kernel's clock ticks."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def own_identity() -> Identity:
    ticks = start_ticks(os.getpid())
    assert ticks is not None, "a running process has a start time"
    return Identity(os.getpid(), ticks)


def is_stopped(pid: int) -> bool:
    """Whether a process stands still (SIGSTOP, Ctrl-Z): of all signals only SIGKILL ends it. False if there is none."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def end_with_parent(*, look_every_s: float = 1.0) -> None:
    """From now on this process ends soon after its parent has. For Triton's stubs: one that is in a call to its
    server when that dies would wait for ever. (A parent-death signal would not do: it follows the thread that
    started the stub, and Triton's may end.)"""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(look_every_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`, as they are now."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: Iterable[psutil.Process], *, wait_s: float = 5.0) -> None:
    """SIGKILL to those still there (never to one that got their pid since), and waits for them to go."""
    listed = list(processes)
    for process in listed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(listed, timeout=wait_s)
