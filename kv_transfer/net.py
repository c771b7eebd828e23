"""What sinks have in common whose sources answer from a thread: one link, one thread and one pace per source, so
that one source that hangs holds up nobody else's KV."""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from trtpd.errors import LeaseError, TransferError
from trtpd.kv_transfer.asks import Check, Renew
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.integrity import Arrivals
from trtpd.kv_transfer.offer import Offer
from trtpd.kv_transfer.pace import Pace
from trtpd.kv_transfer.pull import Pull, check_offer
from trtpd.kv_transfer.puller import Carrier
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.routes import Route
from trtpd.kv_transfer.runs import Run, coalesce
from trtpd.kv_transfer.sink import Plans, Sink


class Link(Protocol):
    """The way to one source, used by one thread."""

    name: str

    def connect(self) -> None:
        """If it isn't connected. Raises TransferError."""

    def ask(self, request: Renew | Check, size_bytes: int, interrupted: Callable[[], bool]) -> bytes | None:
        """The answer, of exactly so many bytes; None if the source doesn't hold what it is asked about. Raises
        PeerGoneError, TransferError, Interrupted."""

    def gone(self) -> bool:
        """True if the source is known to be dead."""

    def close(self) -> None:
        """Nothing is written into the sink's pools by way of it any more."""


AnyLink = TypeVar("AnyLink", bound=Link)


class NetPeer(Generic[AnyLink]):
    """One source as a sink knows it."""

    def __init__(self, link: AnyLink) -> None:
        self.link = link
        self.pace = Pace()
        self._connecting = True

    def tend(self) -> bool:
        """Connects before the first pull needs it. What fails here fails again, and is told, there."""
        if self._connecting:
            self._connecting = False
            try:
                self.link.connect()
            except TransferError:
                return False
        return False


class NetSink(Sink, Generic[AnyLink]):
    """A sink that makes a link per source and a carrier per pull."""

    transport: str
    piece_bytes: int

    def __init__(
        self, pools: RankPools, settings: TransferSettings, *, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        super().__init__(pools, settings, piece_bytes=self.piece_bytes, wake=wake, clock=clock)
        self.plans = Plans(pools)
        self._peers: dict[str, NetPeer[AnyLink]] = {}

    @abstractmethod
    def make_link(self, offer: Offer) -> AnyLink:
        """Without connecting. Raises TransferError for an address that is none."""

    @abstractmethod
    def make_carrier(self, peer: NetPeer[AnyLink], pull: Pull) -> Carrier: ...

    def handshake(self, offer: Offer) -> None:
        name, peer = self._peer(offer)
        self.puller(name, peer.tend)

    def begin(self, offer: Offer, blocks: Sequence[int], *, present: int = 0) -> None:
        pull = self.new_pull(offer, blocks, present)
        name, peer = self._peer(offer)
        puller = self.puller(name, peer.tend)
        self.start_pull(name, puller, pull, self.make_carrier(peer, pull))

    def close(self) -> None:
        self.close_pullers()
        for peer in self._peers.values():
            peer.link.close()

    def _peer(self, offer: Offer) -> tuple[str, NetPeer[AnyLink]]:
        """Raises LayoutError, TransferError for an offer that can't be pulled."""
        convert_dtype = self.settings.convert_dtype
        check_offer(offer, transport=self.transport, layout=self.pools.layout, convert_dtype=convert_dtype)
        address = hashlib.sha256(offer.address + offer.layout.fingerprint.encode()).hexdigest()
        name = f"{offer.generation}@{address}"
        if name not in self._peers:
            link = self.make_link(offer)
            self._forget_former(offer.instance)
            self._peers[name] = NetPeer(link)
        return name, self._peers[name]

    def _forget_former(self, instance: str) -> None:
        """A source has come anew: those of its name from which nothing is pulled are dead, or soon will be."""
        for name, peer in list(self._peers.items()):
            if peer.link.name == instance and self.drop_puller(name):
                peer.link.close()
                del self._peers[name]


class NetCarrier(Generic[AnyLink]):
    """A carrier that asks its source."""

    def __init__(self, peer: NetPeer[AnyLink], pull: Pull, plans: Plans) -> None:
        self.peer, self.pull, self.offer = peer, pull, pull.offer
        self._plans, self._routes = plans, plans.routes(pull.offer)

    def interrupted(self) -> bool:
        return self.pull.aborted

    def renew(self, sent_s: float) -> float | None:
        held = self.peer.link.ask(Renew(*self.offer.key), 0, self.interrupted) is not None
        return sent_s if held else None

    def check(self) -> None:
        offer = self.offer
        epochs = self.peer.link.ask(Check(*offer.key), 8 * len(offer.blocks), self.interrupted)
        if epochs is None:
            raise self.no_longer_held()
        if tuple(np.frombuffer(epochs, "<u8").tolist()) != offer.epochs:
            raise LeaseError(f"{offer.instance} freed blocks of request {offer.request_id} before their copy was used")

    def no_longer_held(self) -> LeaseError:
        return LeaseError(f"{self.offer.instance} holds the KV of request {self.offer.request_id} no longer")

    def gone(self) -> bool:
        return self.peer.link.gone()

    def copy(self, pull: Pull, piece: range) -> int:
        arrivals = self._plans.arrivals(pull, piece)
        source, sink = pull.offer.blocks[piece.start : piece.stop], pull.blocks[piece.start : piece.stop]
        runs = coalesce(source, sink, first_index=piece.start)
        moved_bytes = sum(self._timed_route(route, runs, arrivals) for route in self._routes)
        arrivals.verify()
        return moved_bytes

    def _timed_route(self, route: Route, runs: Sequence[Run], arrivals: Arrivals) -> int:
        began_s = time.monotonic()
        moved_bytes = self.copy_route(route, runs, arrivals)
        self.peer.pace.measured(moved_bytes, time.monotonic() - began_s)
        return moved_bytes

    @abstractmethod
    def copy_route(self, route: Route, runs: Sequence[Run], arrivals: Arrivals) -> int:
        """Brings these runs and adds them to `arrivals`; the bytes that came. Raises as Carrier.copy."""

    def close(self) -> None:
        """The link is the peer's, and stays."""
