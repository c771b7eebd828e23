"""Sources and sinks as the settings ask for them, over one or several transports.

Each transport is imported when first made: a missing library hurts only who asks for it. A source opens a door per
transport; a sink takes the first way of an offer, in the order of TRANSPORTS, that leads to it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtpd.errors import TransferError
from trtpd.kv_transfer.base import Key, KVSink, PullResult, TransferSettings
from trtpd.kv_transfer.host import is_loopback, own_address
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.source import Door, Source

Clock = Callable[[], float]


class ReachingSink(KVSink, Protocol):
    """A sink of one transport."""

    def reaches(self, address: bytes) -> bool:
        """Whether an address of its transport leads to its source from here. Raises TransferError for one that is
        none."""


class MakeDoor(Protocol):
    def __call__(self, pools: RankPools, settings: TransferSettings, clock: Clock) -> Door: ...


class MakeSink(Protocol):
    def __call__(
        self, pools: RankPools, settings: TransferSettings, *, wake: Callable[[], None], clock: Clock
    ) -> ReachingSink: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How both ends are made. `wake` is called, from any thread, when a pull has ended."""

    door: MakeDoor
    sink: MakeSink


def _shm() -> Transport:
    from trtpd.kv_transfer.shm import ShmDoor, ShmSink

    return Transport(door=ShmDoor, sink=ShmSink)


def _tcp() -> Transport:
    from trtpd.kv_transfer.tcp import TcpDoor, TcpSink

    return Transport(door=TcpDoor, sink=TcpSink)


def _nixl() -> Transport:
    from trtpd.kv_transfer.nixl import NixlDoor, NixlSink

    return Transport(door=NixlDoor, sink=NixlSink)


TRANSPORTS: dict[str, Callable[[], Transport]] = {"shm": _shm, "nixl": _nixl, "tcp": _tcp}
"""In order of preference."""


def transport(name: str) -> Transport:
    """Raises TransferError for an unknown name."""
    make = TRANSPORTS.get(name)
    if make is None:
        raise TransferError(f"there is no transport {name!r}: use one of {', '.join(TRANSPORTS)}")
    return make()


def transports_of(settings: TransferSettings) -> tuple[str, ...]:
    """The transports an instance has: the one that was asked for; else shm on one host and, where the data plane may
    leave the host, all that are installed. Raises TransferError for an unknown name or address."""
    if settings.path != "auto":
        transport(settings.path)
        return (settings.path,)
    if is_loopback(own_address(settings.listen)):
        return ("shm",)
    return tuple(name for name in TRANSPORTS if name != "nixl" or importlib.util.find_spec("nixl_cu12"))


def make_source(pools: RankPools, settings: TransferSettings, *, clock: Clock = time.monotonic) -> Source:
    """Raises TransferError if a transport that was asked for can't be had here."""
    doors: list[Door] = []
    try:
        for name in transports_of(settings):
            doors.append(transport(name).door(pools, settings, clock))
        return Source(pools, settings, doors, clock=clock)
    except BaseException:
        for door in doors:
            door.close()
        raise


def make_sink(
    pools: RankPools, settings: TransferSettings, *, wake: Callable[[], None], clock: Clock = time.monotonic
) -> PairingSink:
    """Raises TransferError if a transport that was asked for can't be had here."""
    sinks: dict[str, ReachingSink] = {}
    try:
        for name in transports_of(settings):
            sinks[name] = transport(name).sink(pools, settings, wake=wake, clock=clock)
        return PairingSink(sinks)
    except BaseException:
        for sink in sinks.values():
            sink.close()
        raise


class PairingSink:
    """KVSink over several transports: each offer goes to the first that leads to its source."""

    def __init__(self, sinks: dict[str, ReachingSink]) -> None:
        """`sinks` by transport, in order of preference."""
        self._sinks = sinks
        self._by_key: dict[Key, str] = {}

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(self._sinks)

    def handshake(self, offer: Offer) -> None:
        name, narrowed = self._choose(offer)
        self._sinks[name].handshake(narrowed)

    def begin(self, offer: Offer, blocks: Sequence[int], *, present: int = 0) -> None:
        name, narrowed = self._choose(offer)
        self._sinks[self._by_key.get(offer.key, name)].begin(narrowed, blocks, present=present)
        self._by_key[offer.key] = name

    def _choose(self, offer: Offer) -> tuple[str, Offer]:
        for name, sink in self._sinks.items():
            for way in offer.ways:
                if way.transport == name and sink.reaches(way.address):
                    return name, offer.by(way)
        raise no_common_transport([way.transport for way in offer.ways], list(self._sinks))

    def ready(self, chunk: Chunk) -> None:
        if name := self._by_key.get(chunk.key):
            self._sinks[name].ready(chunk)

    def sealed(self, seal: Seal) -> None:
        if name := self._by_key.get(seal.key):
            self._sinks[name].sealed(seal)

    def abort(self, key: Key) -> None:
        if name := self._by_key.get(key):
            self._sinks[name].abort(key)

    def progress(self) -> list[PullResult]:
        results = [result for sink in self._sinks.values() for result in sink.progress()]
        for result in results:
            self._by_key.pop(result.key, None)
        return results

    def busy(self) -> bool:
        return any(sink.busy() for sink in self._sinks.values())

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()


def no_common_transport(offered: Sequence[str], accepted: Sequence[str]) -> TransferError:
    """Says what each end can do. Trying again would not help."""
    error = TransferError(
        f"no common transport: prefill offers {', '.join(offered)}, decode accepts {', '.join(accepted)};"
        " set one transfer.path for both that leads from one to the other (shm needs one host)"
    )
    error.retryable = False
    return error
