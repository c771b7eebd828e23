"""A source and a sink over small pools, for the tests of kv_transfer."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import numpy as np

from trtpd.kv_transfer.base import KVSink, KVSource, PullResult, TransferSettings
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.memory import MemorySink, MemorySource
from trtpd.kv_transfer.offer import Offer
from trtpd.kv_transfer.pool import SharedPool
from trtpd.kv_transfer.shm import ShmSink, ShmSource

LAYOUT = KVLayout(num_layers=2, kv_heads=3, head_dim=8, tokens_per_block=4, dtype="f32")
BLOCKS = 16
NAMES = itertools.count()


class Clock:
    """Stands still until a test moves `now_s`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(kw_only=True)
class Pair:
    """A source and a sink over pools of their own, the source's full of distinct numbers."""

    source: KVSource
    sink: KVSink
    of: SharedPool
    to: SharedPool
    clock: Clock
    woken: threading.Event
    _seen: list[PullResult] = field(default_factory=list)

    def seal(self, offer: Offer) -> None:
        self.sink.sealed(self.source.seal(offer.key, first_token=7, first_log_prob=None, seed=0))

    def result(self) -> PullResult:
        """Waits for the next pull to end."""
        while not self._seen:
            self.woken.clear()
            self._seen += self.sink.progress()
            assert self._seen or self.woken.wait(20)
        return self._seen.pop(0)

    def close(self) -> None:
        self.sink.close()
        self.source.close()
        self.of.close()
        self.to.close()

    def moved(self, offer: Offer, blocks: list[int]) -> bool:
        """Whether the sink's blocks hold the source's, and every other block of the sink is still zero."""
        others = np.setdiff1d(np.arange(self.to.num_blocks), blocks[: len(offer.blocks)])
        same = np.array_equal(self.to.grid[:, blocks[: len(offer.blocks)]], self.of.grid[:, list(offer.blocks)])
        return same and not self.to.grid[:, others].any()


def fill(pool: SharedPool) -> None:
    """A different number in every element."""
    arrays = pool.keys + pool.values
    for i, array in enumerate(arrays):
        array[:] = np.arange(1 + i * array.size, 1 + (i + 1) * array.size).reshape(array.shape)


def make_pair(transport: str, *, layout: KVLayout = LAYOUT, lease_s: float = 10.0, digest_every: int = 1) -> Pair:
    """`transport` is "shm" or "memory". Prompts of any length move by chunks over shm."""
    generation = f"g{next(NAMES)}"
    of = SharedPool.create("source", layout, BLOCKS, generation=generation)
    to = SharedPool.create("sink", layout, BLOCKS, generation=generation)
    fill(of)
    clock, woken = Clock(), threading.Event()
    settings = TransferSettings(
        instance="prefill_0",
        generation=generation,
        lease_s=lease_s,
        digest_every=digest_every,
        one_piece_tokens=0,
    )
    source: KVSource
    sink: KVSink
    if transport == "memory":
        hub: dict[str, MemorySource] = {}
        source = MemorySource(of, settings, hub, clock=clock)
        sink = MemorySink(to, hub, wake=woken.set, clock=clock)
    else:
        source = ShmSource(of, settings, clock=clock)
        sink = ShmSink(to, settings, wake=woken.set, clock=clock)
    return Pair(source=source, sink=sink, of=of, to=to, clock=clock, woken=woken)
