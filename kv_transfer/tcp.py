"""tcp: KV moves between groups anywhere by a connection per pair, read by the sink, straight from pool to pool.

The source serves its blocks from a thread (tcp_server.py). The sink has a thread per source, so that one source that
hangs holds up nobody else's KV; it receives into its pools without a buffer between, unless KV is converted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from trtpd.kv_transfer.base import TransferSettings, Visits
from trtpd.kv_transfer.convert import convert
from trtpd.kv_transfer.grants import GrantingDoor, Grants
from trtpd.kv_transfer.host import data_address, host_id, is_loopback
from trtpd.kv_transfer.integrity import Arrivals
from trtpd.kv_transfer.net import NetCarrier, NetPeer, NetSink
from trtpd.kv_transfer.offer import Offer, decode_message
from trtpd.kv_transfer.pool import NUMPY_DTYPE, Words
from trtpd.kv_transfer.pull import Pull
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.routes import Route, tiles
from trtpd.kv_transfer.runs import Run
from trtpd.kv_transfer.sink import Plans
from trtpd.kv_transfer.source import Source
from trtpd.kv_transfer.tcp_link import TcpLink
from trtpd.kv_transfer.tcp_server import TcpServer, spans_of
from trtpd.kv_transfer.tcp_wire import Read, TcpAddress

TRANSPORT = "tcp"
PIECE_BYTES = 16 << 20
TOKEN_BYTES = 32


class TcpDoor(GrantingDoor):
    """Lets sinks in that know the deployment's secret and the offer's token."""

    transport = TRANSPORT

    def __init__(self, pools: RankPools, settings: TransferSettings, clock: Callable[[], float]) -> None:
        super().__init__(Grants())
        host, token = data_address(settings), os.urandom(TOKEN_BYTES)
        self.server = TcpServer(pools, self.grants, host=host, key=settings.secret + token, clock=clock)
        address = TcpAddress(machine=host_id(), host=host, port=self.server.port, token=token)
        self.address = msgspec.msgpack.encode(address)

    def visits(self) -> Visits:
        counters = self.server.counters
        return Visits(strangers=counters["strangers"], stalled=counters["stalled"], refused=counters["bad_requests"])

    def check(self) -> None:
        self.server.check()

    def close(self) -> None:
        self.server.close()


class TcpSource(Source):
    """KVSource over TCP alone. Raises TransferError if it may not or can't listen."""

    def __init__(
        self, pools: RankPools, settings: TransferSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(pools, settings, [TcpDoor(pools, settings, clock)], clock=clock)


class TcpSink(NetSink[TcpLink]):
    """KVSink over TCP. `wake` is called from a thread of the sink's when a pull ended."""

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
        super().__init__(pools, settings, wake=wake, clock=clock)
        self._memory = SinkMemory(pools)

    def reaches(self, address: bytes) -> bool:
        """A loopback address leads nowhere from another host."""
        tcp = decode_message(address, TcpAddress)
        return tcp.machine == host_id() or not is_loopback(tcp.host)

    def make_link(self, offer: Offer) -> TcpLink:
        return TcpLink(
            decode_message(offer.address, TcpAddress),
            name=offer.instance,
            generation=offer.generation,
            fingerprint=offer.layout.fingerprint,
            secret=self.settings.secret,
        )

    def make_carrier(self, peer: NetPeer[TcpLink], pull: Pull) -> TcpCarrier:
        return TcpCarrier(peer, pull, self.plans, self._memory)

    def close(self) -> None:
        super().close()
        self._memory.close()


class SinkMemory:
    """The sink's pools as bytes to receive into."""

    def __init__(self, pools: RankPools) -> None:
        self._arrays = {id(pool): [memoryview(a.reshape(-1).view("u1")) for a in pool.grid] for pool in pools}

    def views(self, route: Route, runs: Sequence[Run], arrays: range) -> list[memoryview]:
        """Where the bytes of runs go, in the order array, run, block, head."""
        heads, head_bytes = route.sink.cells.shape[2], route.sink.cells[0, 0, 0].nbytes
        places = [(run.sink, run.count) for run in runs]
        spans = spans_of(places, route.sink_heads, heads, head_bytes)
        first = route.sink_arrays.start
        into = self._arrays[id(route.sink)][first + arrays.start : first + arrays.stop]
        return [array[span] for array in into for span in spans]

    def close(self) -> None:
        self._arrays.clear()


class TcpCarrier(NetCarrier[TcpLink]):
    """Carrier over a connection."""

    def __init__(self, peer: NetPeer[TcpLink], pull: Pull, plans: Plans, memory: SinkMemory) -> None:
        super().__init__(peer, pull, plans)
        self._memory = memory

    def copy_route(self, route: Route, runs: Sequence[Run], arrivals: Arrivals) -> int:
        """Asks for all that one rank has to send, and sees to each tile as it arrives."""
        offer, blocks = self.offer, sum(run.count for run in runs)
        steps = tiles(route, blocks)
        inlet = (
            _Direct(route, runs, self._memory)
            if offer.layout.dtype == route.sink.layout.dtype
            else _Converting(route, runs, offer, len(steps[0]))
        )
        size_bytes = blocks * len(route.arrays) * inlet.block_bytes
        request = Read(
            *offer.key,
            *route.source_rank,
            route.source_arrays.start,
            route.source_arrays.stop,
            route.source_heads.start,
            route.source_heads.stop,
            tuple((run.source, run.count) for run in runs),
        )

        def arrived(number: int) -> None:
            for part in (part for run in runs for part in arrivals.parts(run)):
                cells = inlet.cells(part, steps[number])
                if arrivals.wanted(part):
                    weights = route.weights[steps[number].start : steps[number].stop]
                    arrivals.add(route.sink.address.tp_rank, part, route.heads, cells, weights)
                inlet.settle(part, steps[number], cells)

        held = self.peer.link.read(
            request,
            (inlet.views(step) for step in steps),
            size_bytes,
            timeout_s=self.peer.pace.timeout_s(size_bytes, lease_s=offer.lease_s),
            interrupted=self.interrupted,
            arrived=arrived,
        )
        if not held:
            raise self.no_longer_held()
        return blocks * len(route.arrays) * route.block_bytes()


class _Direct:
    """Bytes go straight into the sink's pool."""

    def __init__(self, route: Route, runs: Sequence[Run], memory: SinkMemory) -> None:
        self._route, self._runs, self._memory = route, runs, memory
        self.block_bytes = route.block_bytes()

    def views(self, arrays: range) -> list[memoryview]:
        return self._memory.views(self._route, self._runs, arrays)

    def cells(self, part: Run, arrays: range) -> Words:
        """The bytes of a part, as the source has them."""
        return self._route.sink_cells(part, arrays)

    def settle(self, part: Run, arrays: range, cells: Words) -> None:
        """They are where they belong."""


class _Converting:
    """Bytes go into a buffer, and are converted into the sink's pool."""

    def __init__(self, route: Route, runs: Sequence[Run], offer: Offer, arrays: int) -> None:
        self._route, self._source = route, offer.layout
        self._place: dict[int, int] = {}
        for run in runs:
            self._place |= {index: len(self._place) + i for i, index in enumerate(run.indexes)}
        elements = offer.layout.tokens_per_block * offer.layout.head_dim
        shape = (arrays, len(self._place), len(route.heads), elements)
        word = np.dtype(NUMPY_DTYPE[offer.layout.dtype]).itemsize
        self._buffer: Words = np.zeros(shape, np.dtype(f"u{word}"))
        self.block_bytes = len(route.heads) * elements * word

    def views(self, arrays: range) -> list[memoryview]:
        return [self._buffer[: len(arrays)].reshape(-1).view(np.uint8).data]

    def cells(self, part: Run, arrays: range) -> Words:
        first = self._place[part.index]
        return self._buffer[: len(arrays), first : first + part.count]

    def settle(self, part: Run, arrays: range, cells: Words) -> None:
        convert(cells, self._source.dtype, self._route.sink_cells(part, arrays), self._route.sink.layout.dtype)
