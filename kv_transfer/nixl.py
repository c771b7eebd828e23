"""nixl: KV moves between groups anywhere through NIXL and UCX: RDMA where there is, else over TCP or shared memory.

The sink asks (nixl_link.py), the source writes (nixl_server.py), and a note tells the sink that a piece has come.
UCX lets in whoever reaches it, so it is opened on loopback, or where keys say that the network is the deployment's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from trtpd.kv_transfer.asks import Open
from trtpd.kv_transfer.base import TransferSettings, Visits
from trtpd.kv_transfer.convert import convert
from trtpd.kv_transfer.grants import GrantingDoor, Grants
from trtpd.kv_transfer.host import data_address, host_id, is_loopback
from trtpd.kv_transfer.integrity import Arrivals
from trtpd.kv_transfer.net import NetCarrier, NetPeer, NetSink
from trtpd.kv_transfer.nixl_agent import load
from trtpd.kv_transfer.nixl_link import NixlLink
from trtpd.kv_transfer.nixl_server import NixlServer
from trtpd.kv_transfer.nixl_wire import NixlAddress, Push
from trtpd.kv_transfer.offer import Offer, decode_message
from trtpd.kv_transfer.pool import Words
from trtpd.kv_transfer.pull import Pull
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.routes import Route
from trtpd.kv_transfer.runs import Run, split
from trtpd.kv_transfer.source import Source

TRANSPORT = "nixl"
PIECE_BYTES = 32 << 20
TOKEN_BYTES = 32
BUFFER_BYTES = 16 << 20
FEW_BLOCKS = 64


class NixlDoor(GrantingDoor):
    """Serves sinks that know the offer's token."""

    transport = TRANSPORT

    def __init__(self, pools: RankPools, settings: TransferSettings, clock: Callable[[], float]) -> None:
        super().__init__(Grants())
        host, token = data_address(settings), os.urandom(TOKEN_BYTES)
        name = f"{settings.instance}-{settings.generation}-{os.urandom(4).hex()}"
        self.server = NixlServer(pools, self.grants, name=name, address=host, token=token, clock=clock)
        address = NixlAddress(machine=host_id(), loopback=is_loopback(host), metadata=self.server.metadata, token=token)
        self.address = msgspec.msgpack.encode(address)

    def visits(self) -> Visits:
        counters = self.server.counters
        return Visits(strangers=counters["strangers"], refused=counters["bad_asks"])

    def check(self) -> None:
        self.server.check()

    def close(self) -> None:
        self.server.close()


class NixlSource(Source):
    """KVSource over NIXL alone. Raises TransferError if it may not or can't be had."""

    def __init__(
        self, pools: RankPools, settings: TransferSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(pools, settings, [NixlDoor(pools, settings, clock)], clock=clock)


class NixlSink(NetSink[NixlLink]):
    """KVSink over NIXL. `wake` is called from a thread of the sink's when a pull ended."""

    transport = TRANSPORT
    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        pools: RankPools,
        settings: TransferSettings,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises TransferError if NIXL can't be had."""
        load()
        self._own_address = data_address(settings)
        super().__init__(pools, settings, wake=wake, clock=clock)

    def reaches(self, address: bytes) -> bool:
        """A loopback address leads nowhere from another host."""
        nixl = decode_message(address, NixlAddress)
        return nixl.machine == host_id() or not nixl.loopback

    def make_link(self, offer: Offer) -> NixlLink:
        converts = offer.layout.dtype != self.pools.layout.dtype
        layout = offer.layout
        few_bytes = FEW_BLOCKS * layout.tokens_per_block * layout.head_dim * layout.itemsize_bytes * layout.kv_heads
        size_bytes = max(BUFFER_BYTES, few_bytes)
        return NixlLink(
            decode_message(offer.address, NixlAddress),
            name=offer.instance,
            own_address=self._own_address,
            opening=Open(offer.generation, offer.layout.fingerprint),
            pools=self.pools,
            buffer=np.zeros(-(-size_bytes // 8), np.uint64) if converts else None,
        )

    def make_carrier(self, peer: NetPeer[NixlLink], pull: Pull) -> NixlCarrier:
        return NixlCarrier(peer, pull, self.plans)


class NixlCarrier(NetCarrier[NixlLink]):
    """Carrier that has its source write."""

    def copy_route(self, route: Route, runs: Sequence[Run], arrivals: Arrivals) -> int:
        if self.offer.layout.dtype != route.sink.layout.dtype:
            return self._convert_route(route, runs, arrivals)
        heads_bytes = route.sink.cells[0, 0, 0].nbytes
        first = route.sink.grid.ctypes.data + route.sink_heads.start * heads_bytes
        into = tuple(first + array * route.sink.grid.strides[0] for array in route.sink_arrays)
        places = [(run.source, run.sink, run.count) for run in runs]
        moved_bytes = sum(run.count for run in runs) * len(route.arrays) * route.block_bytes()
        self._push(route, places, route.arrays, into, route.sink.grid.strides[1], moved_bytes)
        for part in (part for run in runs for part in arrivals.parts(run)):
            if arrivals.wanted(part):
                cells = route.sink_cells(part, route.arrays)
                arrivals.add(route.sink.address.tp_rank, part, route.heads, cells, route.weights)
        return moved_bytes

    def _push(
        self,
        route: Route,
        runs: Sequence[tuple[int, int, int]],
        arrays: range,
        into: tuple[int, ...],
        stride_bytes: int,
        size_bytes: int,
    ) -> None:
        """Raises LeaseError if it is held no longer; else as NixlLink.push."""
        first = route.source_arrays.start
        request = Push(
            *self.offer.key,
            *route.source_rank,
            first + arrays.start,
            first + arrays.stop,
            route.source_heads.start,
            route.source_heads.stop,
            tuple(runs),
            into,
            stride_bytes,
        )
        timeout_s = self.peer.pace.timeout_s(size_bytes, lease_s=self.offer.lease_s)
        if not self.peer.link.push(request, timeout_s=timeout_s, interrupted=self.interrupted):
            raise self.no_longer_held()

    def _convert_route(self, route: Route, runs: Sequence[Run], arrivals: Arrivals) -> int:
        """By way of a buffer, as many blocks and arrays at a time as it holds."""
        buffer = self.peer.link.buffer
        assert buffer is not None
        elements = self.offer.layout.tokens_per_block * self.offer.layout.head_dim
        word = np.dtype(f"u{self.offer.layout.itemsize_bytes}")
        block_bytes = len(route.heads) * elements * word.itemsize
        moved_bytes = 0
        for part in (part for run in runs for alike in arrivals.parts(run) for part in split(alike, FEW_BLOCKS)):
            step = max(1, buffer.nbytes // (part.count * block_bytes))
            for arrays in (range(i, min(i + step, len(route.arrays))) for i in route.arrays[::step]):
                size_bytes = len(arrays) * part.count * block_bytes
                into = tuple(buffer.ctypes.data + i * part.count * block_bytes for i in range(len(arrays)))
                self._push(route, [(part.source, 0, part.count)], arrays, into, block_bytes, size_bytes)
                shape = (len(arrays), part.count, len(route.heads), elements)
                cells = buffer.view(np.uint8)[:size_bytes].view(word).reshape(shape)
                self._settle(route, part, arrays, cells, arrivals)
            moved_bytes += part.count * len(route.arrays) * route.block_bytes()
        return moved_bytes

    def _settle(self, route: Route, part: Run, arrays: range, cells: Words, arrivals: Arrivals) -> None:
        """Digests what has come into the buffer, and converts it into the sink's pool."""
        if arrivals.wanted(part):
            weights = route.weights[arrays.start : arrays.stop]
            arrivals.add(route.sink.address.tp_rank, part, route.heads, cells, weights)
        convert(cells, self.offer.layout.dtype, route.sink_cells(part, arrays), route.sink.layout.dtype)
