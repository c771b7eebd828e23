"""A source and a sink within one process, for tests of what uses them. They keep the contracts of base.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trtpd.errors import InternalError, LeaseError, TransferError
from trtpd.kv_transfer.base import Key, PullResult, TransferSettings, Visits
from trtpd.kv_transfer.integrity import Arrivals
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.pull import Pull, check_offer
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.routes import copy_run, plan_routes
from trtpd.kv_transfer.runs import coalesce
from trtpd.kv_transfer.source import Source

Hub = dict[str, "MemorySource"]
"""Sources by instance, shared by the sources and sinks of one test."""


class MemoryDoor:
    """Remembers when each hold was renewed."""

    transport = "memory"

    def __init__(self) -> None:
        self._renewed_s: dict[Key, float | None] = {}

    def open(self, key: Key, blocks: tuple[int, ...]) -> bytes:
        self._renewed_s[key] = None
        return b""

    def renew(self, key: Key, now_s: float) -> None:
        self._renewed_s[key] = now_s

    def renewed_s(self, key: Key) -> float | None:
        return self._renewed_s[key]

    def suspend(self, key: Key) -> None:
        """Renewals come from the thread that looks for them."""

    def resume(self, key: Key) -> None:
        """See `suspend`."""

    def shut(self, key: Key) -> None:
        del self._renewed_s[key]

    def visits(self) -> Visits:
        return Visits()

    def check(self) -> None:
        """Nothing serves this door but its caller."""

    def close(self) -> None:
        self._renewed_s.clear()


class MemorySource(Source):
    """Keeps holds as any source does; sinks of the same hub find it by its instance's name."""

    def __init__(
        self,
        pools: RankPools,
        settings: TransferSettings,
        hub: Hub,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._door, self._own_clock = MemoryDoor(), clock
        super().__init__(pools, settings, [self._door], clock=clock)
        self.pools = pools
        hub[settings.instance] = self

    def renew(self, key: Key) -> None:
        self._door.renew(key, self._own_clock())


class MemorySink:
    """Copies everything at the seal, in the caller's thread."""

    def __init__(
        self,
        pools: RankPools,
        hub: Hub,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools, self._hub, self._wake, self._clock = pools, hub, wake, clock
        self._pulls: dict[Key, Pull] = {}
        self._results: list[PullResult] = []

    def handshake(self, offer: Offer) -> None:
        check_offer(offer, transport="memory", layout=self._pools.layout)
        held_source(self._hub, offer)

    def begin(self, offer: Offer, blocks: Sequence[int], *, present: int = 0) -> None:
        self.handshake(offer)
        if offer.key in self._pulls:
            raise InternalError(f"request {offer.request_id} is being pulled already")
        self._pulls[offer.key] = Pull(offer, blocks, one_piece=True, present=present)
        held_source(self._hub, offer).renew(offer.key)

    def ready(self, chunk: Chunk) -> None:
        if pull := self._pulls.get(chunk.key):
            pull.ready(chunk)

    def sealed(self, seal: Seal) -> None:
        if pull := self._pulls.get(seal.key):
            pull.seal(seal, self._clock())
            try:
                copy_all(self._hub, pull, self._pools)
                self._finish(pull.key, pull.result(self._clock()))
            except TransferError as error:
                self._finish(pull.key, pull.result(self._clock(), error))

    def abort(self, key: Key) -> None:
        if pull := self._pulls.get(key):
            self._finish(key, pull.result(self._clock(), code="aborted"))

    def _finish(self, key: Key, result: PullResult) -> None:
        del self._pulls[key]
        self._results.append(result)
        self._wake()

    def progress(self) -> list[PullResult]:
        results, self._results = self._results, []
        return results

    def busy(self) -> bool:
        return bool(self._pulls)

    def close(self) -> None:
        for key in list(self._pulls):
            self.abort(key)


def held_source(hub: Hub, offer: Offer) -> MemorySource:
    """The source that still holds the offer, its blocks unchanged. Raises LeaseError."""
    source = hub.get(offer.instance)
    if source is None or offer.key not in source.holds() or source.pools.control.gone():
        raise LeaseError(f"{offer.instance} holds nothing of request {offer.request_id} any more")
    if source.pools.control.address.generation != offer.generation:
        raise LeaseError(f"{offer.instance} has restarted: its offer of request {offer.request_id} is void")
    if source.pools.control.epochs_of(offer.blocks) != offer.epochs:
        raise LeaseError(f"blocks of request {offer.request_id} were freed before their copy was used")
    return source


def copy_all(hub: Hub, pull: Pull, pools: RankPools) -> None:
    """Copies a sealed pull into `pools` and verifies it. Raises TransferError."""
    if pull.fault:
        raise pull.fault
    source, began_s = held_source(hub, pull.offer), time.monotonic()
    piece, moved_bytes = pull.piece(len(pull.blocks)), 0
    arrivals = Arrivals(pull, piece, pools.layout)
    blocks = pull.offer.blocks[piece.start :], pull.blocks[piece.start :]
    for route in plan_routes(pull.offer.layout, pools):
        for run in coalesce(*blocks, first_index=piece.start):
            copy_run(route, source.pools.by_rank[route.source_rank], run, arrivals)
        moved_bytes += len(piece) * len(route.arrays) * route.block_bytes()
    held_source(hub, pull.offer)
    arrivals.verify()
    pull.copied(piece, bytes_moved=moved_bytes, seconds=time.monotonic() - began_s)
