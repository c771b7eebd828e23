"""An asyncio loop in a thread of its own, out of which nothing escapes unseen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


class GuardedLoop:
    """Runs functions one at a time. One that raises is fatal: `on_fatal` is called with what it raised, once and in the
    loop, and no other runs any more."""

    def __init__(self, name: str, on_fatal: Callable[[Exception], None]) -> None:
        self._on_fatal = on_fatal
        self._dead = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what was handed over and has not begun is dropped. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def call(self, function: Callable[..., None], *args: Any) -> bool:
        """From any thread; returns at once. False: it will not run."""
        try:
            self._loop.call_soon_threadsafe(self._guarded, function, *args)
        except RuntimeError:  # the loop is closed
            return False
        return not self._dead

    def later(self, delay_s: float, function: Callable[..., None], *args: Any) -> None:
        """From within the loop."""
        self._loop.call_later(max(0.0, delay_s), self._guarded, function, *args)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        if self._dead:
            return
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - nothing may escape into the loop unseen
            self._dead = True
            self._on_fatal(error)
