from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

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


def make_pair(transport: str, *, layout: KVLayout = LAYOUT, **settings: float) -> Pair:
    generation = f"g{next(NAMES)}"
    of = SharedPool.create("source", layout, BLOCKS, generation=generation)
    to = SharedPool.create("sink", layout, BLOCKS, generation=generation)
    fill(of)
    clock, woken = Clock(), threading.Event()
    chosen = TransferSettings(instance="prefill_0", generation=generation, **{"one_piece_tokens": 0, **settings})  # type: ignore[arg-type]
    source: KVSource
    sink: KVSink
    if transport == "memory":
        hub: dict[str, MemorySource] = {}
        source = MemorySource(of, chosen, hub, clock=clock)
        sink = MemorySink(to, hub, wake=woken.set, clock=clock)
    else:
        source = ShmSource(of, chosen, clock=clock)
        sink = ShmSink(to, chosen, wake=woken.set, clock=clock)
    return Pair(source=source, sink=sink, of=of, to=to, clock=clock, woken=woken)


def close_pair(pair: Pair) -> None:
    pair.sink.close()
    pair.source.close()
    pair.of.close()
    pair.to.close()


@pytest.fixture(params=["shm", "memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = make_pair(request.param)
    yield made
    close_pair(made)


@pytest.fixture
def shm() -> Iterator[Pair]:
    made = make_pair("shm")
    yield made
    close_pair(made)
