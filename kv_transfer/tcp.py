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

from trtpd.errors import LeaseError, TransferError
from trtpd.kv_transfer.base import Key, TransferSettings
from trtpd.kv_transfer.convert import convert
from trtpd.kv_transfer.host import host_id, is_loopback, own_address
from trtpd.kv_transfer.integrity import Arrivals
from trtpd.kv_transfer.offer import Offer, decode_message
from trtpd.kv_transfer.pace import Pace
from trtpd.kv_transfer.pool import NUMPY_DTYPE, Words
from trtpd.kv_transfer.pull import Pull, check_offer
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.routes import Route, tiles
from trtpd.kv_transfer.runs import Run, coalesce
from trtpd.kv_transfer.sink import Plans, Sink
from trtpd.kv_transfer.source import Source
from trtpd.kv_transfer.tcp_link import TcpLink
from trtpd.kv_transfer.tcp_server import Grants, TcpServer, spans_of
from trtpd.kv_transfer.tcp_wire import Check, Read, Renew, TcpAddress

TRANSPORT = "tcp"
PIECE_BYTES = 16 << 20
TOKEN_BYTES = 32


def data_address(settings: TransferSettings) -> str:
    """Where ports of the data plane are opened. Raises TransferError where strangers could reach them."""
    host = own_address(settings.listen)
    if not is_loopback(host) and not settings.secret:
        raise TransferError(
            f"transfer.listen {settings.listen!r} is not loopback and there are no keys: anyone could read KV there;"
            " give a folder made by make_keys (--keys DIR), or use 127.0.0.1"
        )
    return host


class TcpDoor:
    """Lets sinks in that know the deployment's secret and the offer's token."""

    transport = TRANSPORT

    def __init__(self, pools: RankPools, settings: TransferSettings, clock: Callable[[], float]) -> None:
        host, token = data_address(settings), os.urandom(TOKEN_BYTES)
        self._grants = Grants()
        self.server = TcpServer(pools, self._grants, host=host, key=settings.secret + token, clock=clock)
        address = TcpAddress(machine=host_id(), host=host, port=self.server.port, token=token)
        self._address = msgspec.msgpack.encode(address)

    def open(self, key: Key, blocks: tuple[int, ...]) -> bytes:
        self._grants.open(key, blocks)
        return self._address

    def renewed_s(self, key: Key) -> float | None:
        return self._grants.renewed_s(key)

    def suspend(self, key: Key) -> None:
        self._grants.suspend(key, suspended=True)

    def resume(self, key: Key) -> None:
        self._grants.suspend(key, suspended=False)

    def shut(self, key: Key) -> None:
        self._grants.shut(key)

    def close(self) -> None:
        self.server.close()


class TcpSource(Source):
    """KVSource over TCP alone. Raises TransferError if it may not or can't listen."""

    def __init__(
        self, pools: RankPools, settings: TransferSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(pools, settings, [TcpDoor(pools, settings, clock)], clock=clock)


class TcpPeer:
    """One source as a sink knows it."""

    def __init__(self, link: TcpLink) -> None:
        self.link = link
        self.pace = Pace()
        self.wanted = True

    def tend(self) -> bool:
        """Connects before the first pull needs it. What fails here fails again, and is told, there."""
        if self.wanted:
            self.wanted = False
            try:
                self.link.connect()
            except TransferError:
                return False
        return False


class TcpSink(Sink):
    """KVSink over TCP. `wake` is called from a thread of the sink's when a pull ended."""

    def __init__(
        self,
        pools: RankPools,
        settings: TransferSettings,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pools, settings, piece_bytes=PIECE_BYTES, wake=wake, clock=clock)
        self._peers: dict[str, TcpPeer] = {}
        self._plans = Plans(pools)
        self._memory = SinkMemory(pools)

    def reaches(self, address: bytes) -> bool:
        """A loopback address leads nowhere from another host."""
        tcp = decode_message(address, TcpAddress)
        return tcp.machine == host_id() or not is_loopback(tcp.host)

    def handshake(self, offer: Offer) -> None:
        name, peer = self._peer(offer)
        self.puller(name, peer.tend)

    def begin(self, offer: Offer, blocks: Sequence[int]) -> None:
        pull = self.new_pull(offer, blocks)
        name, peer = self._peer(offer)
        puller = self.puller(name, peer.tend)
        carrier = TcpCarrier(peer, pull, self._plans, self._memory)
        self.start_pull(name, puller, pull, carrier)

    def close(self) -> None:
        self.close_pullers()
        for peer in self._peers.values():
            peer.link.close()
        self._memory.close()

    def _peer(self, offer: Offer) -> tuple[str, TcpPeer]:
        """Raises LayoutError, TransferError for an offer that can't be pulled."""
        convert_dtype = self.settings.convert_dtype
        check_offer(offer, transport=TRANSPORT, layout=self.pools.layout, convert_dtype=convert_dtype)
        address = decode_message(offer.address, TcpAddress)
        name = f"{offer.generation}@{address.host}:{address.port}"
        if name not in self._peers:
            self._forget_older(offer.instance)
            link = TcpLink(
                address,
                name=offer.instance,
                generation=offer.generation,
                fingerprint=offer.layout.fingerprint,
                secret=self.settings.secret,
            )
            self._peers[name] = TcpPeer(link)
        return name, self._peers[name]

    def _forget_older(self, instance: str) -> None:
        """A source of a new generation has come: those of the same name are dead, or soon will be."""
        for name, peer in list(self._peers.items()):
            if peer.link.name == instance and self.drop_puller(name):
                peer.link.close()
                del self._peers[name]


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


class TcpCarrier:
    """Carrier over a connection."""

    def __init__(self, peer: TcpPeer, pull: Pull, plans: Plans, memory: SinkMemory) -> None:
        self._peer, self._pull, self._plans, self._memory = peer, pull, plans, memory
        self._offer = pull.offer
        self._routes = plans.routes(pull.offer)

    def _interrupted(self) -> bool:
        return self._pull.aborted

    def renew(self, sent_s: float) -> float | None:
        held = self._peer.link.ask(Renew(*self._offer.key), 0, self._interrupted) is not None
        return sent_s if held else None

    def check(self) -> None:
        offer = self._offer
        epochs = self._peer.link.ask(Check(*offer.key), 8 * len(offer.blocks), self._interrupted)
        if epochs is None:
            raise LeaseError(f"{offer.instance} holds the KV of request {offer.request_id} no longer")
        if tuple(np.frombuffer(epochs, "<u8").tolist()) != offer.epochs:
            raise LeaseError(f"{offer.instance} freed blocks of request {offer.request_id} before their copy was used")

    def gone(self) -> bool:
        return self._peer.link.gone()

    def copy(self, pull: Pull, piece: range) -> int:
        arrivals = self._plans.arrivals(pull, piece)
        source, sink = pull.offer.blocks[piece.start : piece.stop], pull.blocks[piece.start : piece.stop]
        runs = coalesce(source, sink, first_index=piece.start)
        moved_bytes = sum(self._copy_route(route, runs, arrivals) for route in self._routes)
        arrivals.verify()
        return moved_bytes

    def _copy_route(self, route: Route, runs: Sequence[Run], arrivals: Arrivals) -> int:
        """Asks for all that one rank has to send, and sees to each tile as it arrives."""
        offer, blocks = self._offer, sum(run.count for run in runs)
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

        began_s = time.monotonic()
        held = self._peer.link.read(
            request,
            (inlet.views(step) for step in steps),
            size_bytes,
            timeout_s=self._peer.pace.timeout_s(size_bytes, lease_s=offer.lease_s),
            interrupted=self._interrupted,
            arrived=arrived,
        )
        if not held:
            raise LeaseError(f"{offer.instance} holds the KV of request {offer.request_id} no longer")
        self._peer.pace.measured(size_bytes, time.monotonic() - began_s)
        return blocks * len(route.arrays) * route.block_bytes()

    def close(self) -> None:
        """The connection is the peer's, and stays."""


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
