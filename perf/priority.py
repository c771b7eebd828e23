"""Lets the measuring client run before what it measures, where the system allows that.

Linux schedules sessions as groups where `sched_autogroup_enabled` is set: nice then counts inside a session only, and
the session has a nice value of its own. A server is in a session of its own, so both are set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NICE = -10
AUTOGROUP = Path("/proc/self/autogroup")


@contextmanager
def before_others(nice: int = NICE) -> Iterator[int]:
    """This thread, those it starts meanwhile, and the session's group at `nice`; gives the thread's value in force,
    which is the former one where raising it isn't allowed."""
    former, group = os.getpriority(os.PRIO_PROCESS, 0), _group_nice()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(nice, former))
    if group is not None:
        _set_group_nice(min(nice, group))
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, former)
        if group is not None:
            _set_group_nice(group)


def _group_nice() -> int | None:
    """None where sessions are not groups. The file reads `/autogroup-7 nice 0`."""
    try:
        return int(AUTOGROUP.read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


def _set_group_nice(nice: int) -> None:
    with suppress(OSError):  # not allowed, or too often: the thread's own priority stands all the same
        AUTOGROUP.write_text(f"{nice}\n")
