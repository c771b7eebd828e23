"""Statistics of the stand-in's iterations, kept apart for iterations and requests as the real ones are."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class IterationRow:
    """One iteration: what IterationStats, its two parts and RequestStats say of it, by their attributes."""

    plain: dict[str, Any]
    kv: dict[str, Any]
    batch: dict[str, Any]
    requests: list[dict[str, Any]]


class Stats:
    """Keeps the newest, and writes what is held to a file of this process where a test wants it."""

    def __init__(self, iterations_kept: int, requests_kept: int) -> None:
        self._iterations: deque[IterationRow] = deque(maxlen=iterations_kept)
        self._requests: deque[IterationRow] = deque(maxlen=requests_kept)
        self._lock = threading.Lock()

    def add(self, row: IterationRow) -> None:
        with self._lock:
            self._iterations.append(row)
            self._requests.append(row)

    def take_iterations(self) -> list[IterationRow]:
        with self._lock:
            rows = list(self._iterations)
            self._iterations.clear()
            return rows

    def take_requests(self) -> list[IterationRow]:
        with self._lock:
            rows = list(self._requests)
            self._requests.clear()
            return rows


class CountsFile:
    """TRTPD_DOUBLE_COUNTS/<pid>.json: what this executor holds now."""

    def __init__(self) -> None:
        folder = os.environ.get("TRTPD_DOUBLE_COUNTS")
        self._path = Path(folder) / f"{os.getpid()}.json" if folder else None
        self._last: dict[str, int] | None = None

    def write(self, **counts: int) -> None:
        if self._path is None or counts == self._last:
            return
        self._last = counts
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(counts))
        part.rename(self._path)
