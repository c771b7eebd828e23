"""shm: KV moves between two groups of one host by one copy, from pool to pool.

The source only says where its blocks are. The sink maps the pools of the source's ranks and copies into those of its
own from a thread (puller.py). Renewals are writes into a lease slot of the source's first pool: neither side
ever waits for the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from trtpd.errors import LayoutError, LeaseError, TransferError
from trtpd.kv_transfer.base import Key, TransferSettings, Visits
from trtpd.kv_transfer.hands import Hands, cores_here
from trtpd.kv_transfer.host import host_id
from trtpd.kv_transfer.leases import LeaseSlots, is_granted, lease_tag, write_renewal
from trtpd.kv_transfer.offer import Offer, decode_message
from trtpd.kv_transfer.peers import Peer, PeerPools
from trtpd.kv_transfer.pool import PoolAddress
from trtpd.kv_transfer.pull import Pull, check_offer
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.routes import Route, copy_jobs
from trtpd.kv_transfer.runs import coalesce
from trtpd.kv_transfer.sink import Plans, Sink
from trtpd.kv_transfer.source import Source

PIECE_BYTES = 128 << 20
SHARED_BYTES = 4 << 20
"""Waking another thread takes longer than to copy less than this."""
TRANSPORT = "shm"


class ShmAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of this transport: the pools of all ranks, the lease slot in the first of them, and which host
    they are on."""

    ranks: tuple[PoolAddress, ...]
    lease_slot: int
    host: str


class ShmDoor:
    """Lets sinks of the same host in, who map the pools by themselves."""

    transport = TRANSPORT

    def __init__(self, pools: RankPools, settings: TransferSettings, clock: Callable[[], float]) -> None:
        self._pools = pools
        self._slots = LeaseSlots(pools.control)
        self._granted: dict[Key, tuple[int, int]] = {}
        self._host = host_id()

    def open(self, key: Key, blocks: tuple[int, ...]) -> bytes:
        tag = lease_tag(*key, self._pools.control.address.generation)
        slot = self._slots.grant(tag)
        self._granted[key] = (slot, tag)
        address = ShmAddress(ranks=self._pools.addresses, lease_slot=slot, host=self._host)
        return msgspec.msgpack.encode(address)

    def renewed_s(self, key: Key) -> float | None:
        return self._slots.sent_s(*self._granted[key])

    def suspend(self, key: Key) -> None:
        self._slots.suspend(self._granted[key][0])

    def resume(self, key: Key) -> None:
        self._slots.regrant(*self._granted[key])

    def shut(self, key: Key) -> None:
        self._slots.give_back(self._granted.pop(key)[0])

    def visits(self) -> Visits:
        return Visits()

    def check(self) -> None:
        """Nothing serves this door but the file system."""

    def close(self) -> None:
        self._slots.close()


class ShmSource(Source):
    """KVSource over shared memory alone."""

    def __init__(
        self, pools: RankPools, settings: TransferSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(pools, settings, [ShmDoor(pools, settings, clock)], clock=clock)


class ShmSink(Sink):
    """KVSink over shared memory. `wake` is called from the sink's thread when a pull ended."""

    def __init__(
        self,
        pools: RankPools,
        settings: TransferSettings,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pools, settings, piece_bytes=PIECE_BYTES, wake=wake, clock=clock)
        self._peers = PeerPools()
        self._plans = Plans(pools)
        self._hands = Hands(cores_here())

    def reaches(self, address: bytes) -> bool:
        """Whether it is an address on this host."""
        return decode_message(address, ShmAddress).host == host_id()

    def handshake(self, offer: Offer) -> None:
        self._connect(offer)
        self.puller(TRANSPORT, self._peers.tend)

    def begin(self, offer: Offer, blocks: Sequence[int], *, present: int = 0) -> None:
        pull = self.new_pull(offer, blocks, present)
        puller = self.puller(TRANSPORT, self._peers.tend)
        carrier = self._connect(offer)
        confirmed_s = carrier.open(self._clock())
        self.start_pull(TRANSPORT, puller, pull, carrier, confirmed_s=confirmed_s)

    def close(self) -> None:
        self.close_pullers()
        self._hands.close()
        self._peers.close()

    def _connect(self, offer: Offer) -> ShmCarrier:
        """A way to the source's pools, mapped if they are new. Raises LayoutError, TransferError."""
        convert = self.settings.convert_dtype
        check_offer(offer, transport=TRANSPORT, layout=self.pools.layout, convert_dtype=convert)
        address = decode_message(offer.address, ShmAddress)
        by_rank = {(pool.tp_rank, pool.pp_rank): pool for pool in address.ranks}
        routes = self._plans.routes(offer)
        needed = {route.source_rank for route in routes}
        if missing := needed - by_rank.keys():
            raise LayoutError(f"{offer.instance} offers no pool for its ranks {missing}")
        for pool in address.ranks:
            if pool.generation != offer.generation:
                raise LeaseError(f"{offer.instance} offers a pool of {pool.generation!r}: it has restarted")
            if max(offer.blocks) >= pool.num_blocks or not 0 <= address.lease_slot < pool.num_blocks:
                raise TransferError(
                    f"{offer.instance} offers block {max(offer.blocks)} and lease slot {address.lease_slot} of"
                    f" a pool of {pool.num_blocks} blocks"
                )
        control = self._peers.get(address.ranks[0], offer.layout)
        peers = {rank: self._peers.get(by_rank[rank], offer.layout) for rank in needed}
        ways = Ways(control, peers, routes, address.lease_slot)
        return ShmCarrier(self._plans, self._peers, self._hands, offer, ways)


@dataclass(frozen=True, slots=True)
class Ways:
    """Where the KV of one offer is: the first pool, with the lease slot in it, and the pools it comes from by rank."""

    control: Peer
    ranks: dict[tuple[int, int], Peer]
    routes: Sequence[Route]
    lease_slot: int


class ShmCarrier:
    """Carrier over mapped pools: copies run by run, and verifies the bytes that arrived while in cache."""

    def __init__(self, plans: Plans, peers: PeerPools, hands: Hands, offer: Offer, ways: Ways) -> None:
        self._plans, self._peers, self._hands, self._offer = plans, peers, hands, offer
        self._control, self._ranks = ways.control, ways.ranks
        self._routes, self._slot = ways.routes, ways.lease_slot
        self._tag = lease_tag(*offer.key, offer.generation)
        self._used: list[Peer] = []

    def open(self, now_s: float) -> float | None:
        """Keeps the peer's pools mapped until `close`, and renews at once, as `renew`. Raises LeaseError if the
        hold is over."""
        try:
            for peer in (self._control, *self._ranks.values()):
                self._peers.use(peer)
                self._used.append(peer)
            confirmed_s = self.renew(now_s)
            self.check()
            return confirmed_s
        except BaseException:
            self.close()
            raise

    def renew(self, sent_s: float) -> float | None:
        return sent_s if write_renewal(self._control.pool, self._slot, self._tag, sent_s=sent_s) else None

    def check(self) -> None:
        offer, control = self._offer, self._control.pool
        if not is_granted(control, self._slot, self._tag):
            raise LeaseError(f"{offer.instance} holds the KV of request {offer.request_id} no longer")
        if control.epochs_of(offer.blocks) != offer.epochs:
            raise LeaseError(f"{offer.instance} freed blocks of request {offer.request_id} before their copy was used")

    def gone(self) -> bool:
        return any(peer.pool.gone() for peer in self._used)

    def copy(self, pull: Pull, piece: range) -> int:
        arrivals = self._plans.arrivals(pull, piece)
        source, sink = pull.offer.blocks[piece.start : piece.stop], pull.blocks[piece.start : piece.stop]
        runs = coalesce(source, sink, first_index=piece.start)
        size_bytes = len(piece) * sum(len(route.arrays) * route.block_bytes() for route in self._routes)
        jobs = (
            job
            for route in self._routes
            for run in runs
            for job in copy_jobs(route, self._ranks[route.source_rank].pool, run, arrivals)
        )
        self._hands.share(jobs, worth=size_bytes >= SHARED_BYTES)
        arrivals.verify()
        return size_bytes

    def close(self) -> None:
        for peer in self._used:
            self._peers.leave(peer)
        self._used = []
