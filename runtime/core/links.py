"""What moving KV costs between two instances: by distance, by what has been seen, by what else is moving."""

from __future__ import annotations

from trtpd.runtime.core.distance import link_between, transfer_s
from trtpd.runtime.core.events import Hello, TransferDone
from trtpd.runtime.core.instance import Instance

SAME_HOST_BYTES_PER_S = 5e9
OTHER_HOST_BYTES_PER_S = 1e9
"""Until transfers have been seen: a copy in memory, and ten-gigabit Ethernet."""

RATE = 0.1
SHARE_EXPOSED = 0.1
"""Part of an overlapped transfer that lies behind the seal: its last chunk."""

ONE_PIECE_TOKENS = 256
PAIRS_KEPT = 100_000

SMALLEST_SAMPLE_BYTES = 1 << 20


Move = tuple[float, float, float]
"""Seconds that a client would wait for the move of one prompt's KV within a host, and between two, and what every other
flow at either end adds to it. `near` is at most `far`."""


class Links:
    """Bandwidth within a host and between hosts, and the fixed cost of a hand-off. `near_bytes_per_s`: what was
    measured within a host."""

    def __init__(self, handoff_s: float, near_bytes_per_s: float | None = None) -> None:
        self._handoff_s = handoff_s
        self._known: dict[tuple[str, str, str, str], float | None] = {}
        self._bytes_per_s = {True: near_bytes_per_s or SAME_HOST_BYTES_PER_S, False: OTHER_HOST_BYTES_PER_S}

    def move(self, hello: Hello, tokens: int, *, hosts: int) -> Move:
        """Flows share their ends. A long prompt moves while it is computed, where the engine (that of `hello`) says
        how far it is."""
        moved_bytes = float(tokens * hello.bytes_per_token)
        if tokens > ONE_PIECE_TOKENS and hello.capabilities.chunk_events:
            moved_bytes *= SHARE_EXPOSED
        near_s, far_s = moved_bytes / self._bytes_per_s[True], moved_bytes / self._bytes_per_s[False]
        return self._handoff_s + min(near_s, far_s), self._handoff_s + far_s, far_s if hosts > 1 else near_s

    def known_s(self, source: Instance, sink: Instance, tokens: int) -> float | None:
        """The same over the link between their GPUs, where that is known (see distance.py)."""
        if not source.hello.gpus:
            return None
        key = (source.name, source.hello.generation, sink.name, sink.hello.generation)
        if key not in self._known:
            if len(self._known) >= PAIRS_KEPT:
                self._known.clear()
            known = link_between(source.hello, sink.hello) is not None
            self._known[key] = transfer_s(source.hello, sink.hello, 1) if known else None
        token_s = self._known[key]
        return None if token_s is None else self._handoff_s + tokens * token_s

    @property
    def least_s(self) -> float:
        """What any hand-off costs."""
        return self._handoff_s

    def note(self, source: Instance, sink: Instance, event: TransferDone) -> None:
        """Learns from transfers that moved in one piece: others include the wait for what is yet to be
        computed."""
        if event.chunks > 1 or event.seconds <= 0.0 or event.bytes_moved < SMALLEST_SAMPLE_BYTES:
            return
        near = source.hello.host == sink.hello.host
        self._bytes_per_s[near] += RATE * (event.bytes_moved / event.seconds - self._bytes_per_s[near])
