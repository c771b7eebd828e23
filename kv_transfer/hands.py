"""Hands: how copies between pools get as fast as the memory: several threads, and stores that bypass the cache."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]

HANDS_LIMIT = 2
"""Two cores come close to what the memory gives; more would take cores from the engine beside them."""

NON_TEMPORAL_BYTES = 128 << 10
_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"


def cores_here() -> int:
    """On how many cores this process may run."""
    return len(os.sched_getaffinity(0))


class Hands:
    """The caller's thread and up to HANDS_LIMIT - 1 others, which share jobs that let go of the interpreter."""

    def __init__(self, cores: int) -> None:
        """`cores` of this process; with one, the caller does all by himself."""
        others = min(HANDS_LIMIT, cores) - 1
        self._pool = ThreadPoolExecutor(others, thread_name_prefix="kv-hand") if others > 0 else None
        self._others = max(0, others)

    def share(self, jobs: Iterable[Job], *, worth: bool) -> None:
        """Runs all jobs, in any order and side by side; without `worth` one after the other here. Once it has returned
        or raised, none runs any more. Raises what a job raised; those not begun by then are left out."""
        left = deque(jobs)
        if self._pool is None or not worth or len(left) < 2:
            _work(left)
            return
        others = [self._pool.submit(_work, left) for _ in range(self._others)]
        try:
            _work(left)
        finally:
            errors = [error for other in others if (error := other.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()


def _work(left: deque[Job]) -> None:
    """Takes jobs until there are none. One hand that is slow, its core being busy, holds up no more than its job."""
    while left:
        try:
            job = left.popleft()
        except IndexError:
            return
        try:
            job()
        except BaseException:
            left.clear()
            raise


def copying_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a process that copies KV: memcpy of NON_TEMPORAL_BYTES and more writes past the cache.

    By itself glibc does so from 3/4 of the last cache's size on, which virtual machines overstate (192 MB where there
    are 16); below that every copied byte is first read where it goes to. Who sets the tunable himself keeps his value.
    """
    env = dict(base)
    given = env.get("GLIBC_TUNABLES", "")
    if _TUNABLE not in given:
        env["GLIBC_TUNABLES"] = ":".join(filter(None, [given, f"{_TUNABLE}={NON_TEMPORAL_BYTES}"]))
    return env
