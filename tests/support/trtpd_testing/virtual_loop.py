"""An event loop whose clock stands still while anything runs and jumps when all wait: durations come out exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: time passes instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "all tasks wait for ever"
            self.now_s += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def block(self, seconds: float) -> None:
        """As a callback does that computes for so long."""
        self._jumping.now_s += seconds


def run_virtually(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
