"""A source and a sink over small pools, for the tests of kv_transfer."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trtpd.errors import TransferError
from trtpd.kv_transfer.base import KVSink, KVSource, PullResult, TransferSettings
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.memory import MemorySink, MemorySource
from trtpd.kv_transfer.nixl import NixlSink, NixlSource
from trtpd.kv_transfer.offer import Offer
from trtpd.kv_transfer.pool import Array, SharedPool
from trtpd.kv_transfer.pool_file import PREFIX, SHM_DIR
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.shm import ShmSink, ShmSource
from trtpd.kv_transfer.source import Source
from trtpd.kv_transfer.tcp import TcpSink, TcpSource

LAYOUT = KVLayout(num_layers=2, kv_heads=3, head_dim=8, tokens_per_block=4, dtype="f32")
BLOCKS = 16
NAMES = itertools.count()
ENDS: dict[str, tuple[type[ShmSource | TcpSource | NixlSource], type[ShmSink | TcpSink | NixlSink]]] = {
    "shm": (ShmSource, ShmSink),
    "tcp": (TcpSource, TcpSink),
    "nixl": (NixlSource, NixlSink),
}


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
    source_pools: RankPools
    sink_pools: RankPools
    clock: Clock
    woken: threading.Event
    _seen: list[PullResult] = field(default_factory=list)

    @property
    def of(self) -> SharedPool:
        return self.source_pools.control

    @property
    def to(self) -> SharedPool:
        return self.sink_pools.control

    def seal(self, offer: Offer) -> None:
        self.sink.sealed(self.source.seal(offer.key, first_token=7, first_log_prob=None, seed=0))

    def result(self) -> PullResult:
        """Waits for the next pull to end."""
        while not self._seen:
            self.woken.clear()
            self._seen += self.sink.progress()
            assert self._seen or self.woken.wait(20)
        return self._seen.pop(0)

    def refusal(self, offer: Offer, blocks: list[int]) -> str:
        """Begins a pull that can't succeed: the code and message of its refusal, at once or as its result."""
        try:
            self.sink.begin(offer, blocks)
        except TransferError as error:
            return f"{error.code}: {error}"
        result = self.result()
        return f"{result.code}: {result.error}"

    def wait_renewed(self, offer: Offer) -> None:
        """Waits until the source has a renewal of the pull that was begun."""
        assert isinstance(self.source, Source)
        pause = threading.Event()
        for _ in range(2000):
            if any(door.renewed_s(offer.key) is not None for door in self.source._doors):
                return
            pause.wait(0.01)
        raise AssertionError("no renewal has come")

    def close(self) -> None:
        self.sink.close()
        self.source.close()
        for pool in (*self.source_pools, *self.sink_pools):
            pool.close()

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


def make_group(name: str, layout: KVLayout, generation: str) -> RankPools:
    """One pool per rank, all in this process."""
    ranks = itertools.product(range(layout.tp), range(layout.pp))
    return RankPools(
        [
            SharedPool.create(f"{name}{tp}.{pp}", layout, BLOCKS, generation=generation, tp_rank=tp, pp_rank=pp)
            for tp, pp in ranks
        ]
    )


def fill_group(pools: RankPools) -> None:
    """Every rank gets its part of one model's KV, in which every element is another number (in bf16: of the numbers
    that there are)."""
    layout = pools.layout
    shape = (2 * layout.num_layers, BLOCKS, layout.kv_heads, layout.tokens_per_block, layout.head_dim)
    numbers = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    for (tp_rank, pp_rank), pool in pools.by_rank.items():
        layers, heads = layout.rank_layers(pp_rank), layout.rank_heads(tp_rank)
        mine = numbers[2 * layers.start : 2 * layers.stop, :, heads.start : heads.stop]
        for i, array in enumerate(a for pair in zip(pool.keys, pool.values, strict=True) for a in pair):
            array[:] = (mine[i] % 0x7F00).astype(array.dtype) if layout.dtype == "bf16" else mine[i]


def whole(pools: RankPools) -> Array:
    """The KV of all ranks put together, `[array, block, head, token, dim]`; every holder of a head has the same."""
    layout = pools.layout
    first = pools.control.keys[0]
    shape = (2 * layout.num_layers, BLOCKS, layout.kv_heads, layout.tokens_per_block, layout.head_dim)
    together: npt.NDArray[np.generic] = np.zeros(shape, first.dtype)
    seen = np.zeros((2 * layout.num_layers, layout.kv_heads), bool)
    for (tp_rank, pp_rank), pool in pools.by_rank.items():
        layers, heads = layout.rank_layers(pp_rank), layout.rank_heads(tp_rank)
        for i, array in enumerate(a for pair in zip(pool.keys, pool.values, strict=True) for a in pair):
            place = 2 * layers.start + i
            for j, head in enumerate(heads):
                assert not seen[place, head] or np.array_equal(together[place, :, head], array[:, j])
                together[place, :, head] = array[:, j]
                seen[place, head] = True
    assert seen.all()
    return together


def make_pair(
    transport: str,
    *,
    layout: KVLayout = LAYOUT,
    sink_layout: KVLayout | None = None,
    lease_s: float = 10.0,
    digest_every: int = 1,
    convert_dtype: bool = False,
    still: bool = True,
) -> Pair:
    """Prompts of any length move by chunks, but over "memory". `still`: by a clock that only tests move."""
    generation = f"g{next(NAMES)}"
    of, to = make_group("source", layout, generation), make_group("sink", sink_layout or layout, generation)
    fill_group(of)
    clock, woken = Clock(), threading.Event()
    settings = TransferSettings(
        instance="prefill_0",
        generation=generation,
        lease_s=lease_s,
        digest_every=digest_every,
        one_piece_tokens=0,
        convert_dtype=convert_dtype,
    )
    source: KVSource
    sink: KVSink
    if transport == "memory":
        hub: dict[str, MemorySource] = {}
        source = MemorySource(of, settings, hub, clock=clock)
        sink = MemorySink(to, hub, wake=woken.set, clock=clock)
    else:
        make_source, make_sink = ENDS[transport]
        source = make_source(of, settings, clock=clock if still else time.monotonic)
        sink = make_sink(to, settings, wake=woken.set, clock=clock if still else time.monotonic)
    return Pair(source=source, sink=sink, source_pools=of, sink_pools=to, clock=clock, woken=woken)


def leftovers(name: str) -> list[str]:
    """Pools of that name that lie in /dev/shm."""
    return [path.name for path in SHM_DIR.glob(f"{PREFIX}{name}*")]
