"""Processes by identity: a pid alone may have been given to another process meanwhile."""

from __future__ import annotations

import contextlib
import os
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
