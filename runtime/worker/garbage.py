"""Full garbage collections, at instants of our own.

CPython begins one only once many more objects live than before. In a process that serves at a steady pace that is
hardly ever: what an error left behind in a cycle would stay for hours, and the interpreter's lists of freed tuples,
which a collection empties, would grow with every new peak. Without what was there before serving began a collection
takes a millisecond or so.
"""

from __future__ import annotations

import gc

EVERY_S = 30.0


def set_aside() -> None:
    """Once all is loaded: what is there now stays to the end, so no collection need look through it again."""
    gc.collect()
    gc.freeze()


class Collector:
    """Collects every EVERY_S, in the thread that asks. `look` costs nothing in between."""

    def __init__(self) -> None:
        self._due_s: float | None = None

    def look(self, now_s: float) -> bool:
        """True if it collected; never at the first look."""
        if self._due_s is None:
            self._due_s = now_s + EVERY_S
        if now_s < self._due_s:
            return False
        self._due_s = now_s + EVERY_S
        gc.collect()
        return True
