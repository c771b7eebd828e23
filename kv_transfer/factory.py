"""Transports by name. Each is imported when first made: a missing library hurts only who asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtpd.errors import TransferError
from trtpd.kv_transfer.base import KVSink, KVSource, TransferSettings
from trtpd.kv_transfer.ranks import RankPools


class MakeSource(Protocol):
    def __call__(self, pools: RankPools, settings: TransferSettings) -> KVSource: ...


class MakeSink(Protocol):
    def __call__(self, pools: RankPools, settings: TransferSettings, *, wake: Callable[[], None]) -> KVSink: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How both ends are made. `wake` is called, from any thread, when a pull has ended."""

    source: MakeSource
    sink: MakeSink


def _shm() -> Transport:
    from trtpd.kv_transfer.shm import ShmSink, ShmSource

    return Transport(source=ShmSource, sink=ShmSink)


TRANSPORTS: dict[str, Callable[[], Transport]] = {"shm": _shm}
"""In order of preference."""


def transport(name: str) -> Transport:
    """Raises TransferError for an unknown name."""
    make = TRANSPORTS.get(name)
    if make is None:
        raise TransferError(f"there is no transport {name!r}: use one of {', '.join(TRANSPORTS)}")
    return make()


def choose(offered: Sequence[str], accepted: Sequence[str], forced: str | None = None) -> str:
    """The transport for a pair: `forced` if given, else the first of TRANSPORTS that both ends can do.

    Raises TransferError, saying what each end can do, when nothing fits.
    """
    wanted = list(TRANSPORTS) if forced is None else [forced]
    for name in wanted:
        if name in offered and name in accepted:
            return name
    rule = "" if forced is None else f", and the pipeline file asks for {forced!r}"
    raise TransferError(
        f"no common transport: prefill offers {', '.join(offered) or 'none'}, decode accepts"
        f" {', '.join(accepted) or 'none'}{rule}; enable one transport at both ends (shm needs one host)"
    )
