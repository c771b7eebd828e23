"""Processes by identity: a pid alone may have been given to another process meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Identity(msgspec.Struct, frozen=True):
    """One process of this boot. `start_ticks` is when it began, in the kernel's clock ticks."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When the process began; None if there is none, or only its unreaped remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def own_identity() -> Identity:
    ticks = start_ticks(os.getpid())
    assert ticks is not None, "a running process has a start time"
    return Identity(os.getpid(), ticks)


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """The kernel sends `signum` to this process when the THREAD that started it ends. Call it after fork."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)


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
