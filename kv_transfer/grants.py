"""Grants: which holds sinks may read and renew, where the source has a thread that answers them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from trtpd.kv_transfer.base import Key


@dataclass(slots=True)
class Grant:
    """One hold that sinks may read. `renewed_s` is when the newest renewal was received."""

    blocks: tuple[int, ...]
    allowed: frozenset[int]
    renewed_s: float | None = None
    suspended: bool = False


class Grants:
    """Holds by key, shared by the engine thread (which grants) and the server's (which renews)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: dict[Key, Grant] = {}

    def open(self, key: Key, blocks: tuple[int, ...]) -> None:
        with self._lock:
            self._grants[key] = Grant(blocks, frozenset(blocks))

    def shut(self, key: Key) -> None:
        with self._lock:
            self._grants.pop(key, None)

    def suspend(self, key: Key, *, suspended: bool) -> None:
        with self._lock:
            self._grants[key].suspended = suspended

    def renewed_s(self, key: Key) -> float | None:
        with self._lock:
            return self._grants[key].renewed_s

    def held(self, key: Key) -> Grant | None:
        with self._lock:
            grant = self._grants.get(key)
            return None if grant is None or grant.suspended else grant

    def renew(self, key: Key, now_s: float) -> bool:
        """False, and no effect, if it isn't held: then no renewal is confirmed."""
        with self._lock:
            grant = self._grants.get(key)
            if grant is None or grant.suspended:
                return False
            grant.renewed_s = now_s
            return True


class GrantingDoor:
    """The part of a door (source.py) that such a source has in common. `address` goes into every offer."""

    def __init__(self, grants: Grants) -> None:
        self.grants = grants
        self.address = b""

    def open(self, key: Key, blocks: tuple[int, ...]) -> bytes:
        self.grants.open(key, blocks)
        return self.address

    def renewed_s(self, key: Key) -> float | None:
        return self.grants.renewed_s(key)

    def suspend(self, key: Key) -> None:
        self.grants.suspend(key, suspended=True)

    def resume(self, key: Key) -> None:
        self.grants.suspend(key, suspended=False)

    def shut(self, key: Key) -> None:
        self.grants.shut(key)
