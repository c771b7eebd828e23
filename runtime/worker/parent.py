"""A worker ends when its stage model does, however that dies."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

from trtpd.errors import ServeError

PR_SET_PDEATHSIG = 1
HARD_STOP_S = 20.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def signal_on_parents_death(signum: int) -> None:
    """Has the kernel send `signum` to this process when the THREAD that started it ends; may be called between fork
    and exec. Raises ServeError if the kernel refuses."""
    if _LIBC.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise ServeError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGTERM) -> None:
    """`signum` to this process when the thread that started it ends. Raises ServeError if the parent is gone already or
    the kernel refuses."""
    signal_on_parents_death(signum)
    if os.getppid() != parent_pid:
        raise ServeError("the process that started this worker has ended")


def watch_pipe(fd: int, on_end: Callable[[], None], *, hard_stop_s: float = HARD_STOP_S) -> None:
    """Calls `on_end` from a thread once the other end of `fd` is closed: nobody is left to serve.

    If the process then does not end by itself (a step that never returns), it is ended after `hard_stop_s`.
    """

    def watch() -> None:
        while os.read(fd, 4096):
            continue
        on_end()
        time.sleep(hard_stop_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-pipe", daemon=True).start()
