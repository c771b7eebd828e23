"""Lets the measuring client run before what it measures, where the system allows that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NICE = -10


@contextmanager
def before_others(nice: int = NICE) -> Iterator[int]:
    """This thread, and those it starts meanwhile, at `nice`; gives the value in force, which is the former one where
    raising it isn't allowed."""
    former = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(nice, former))
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, former)
