"""A source and a sink within one process, for tests of what uses them. They keep the contracts of base.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trtpd.errors import InternalError, LeaseError, TransferError
from trtpd.kv_transfer.base import Key, PullResult, TransferSettings
from trtpd.kv_transfer.integrity import BlockDigester, verify
from trtpd.kv_transfer.ledger import HoldLedger
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.pool import SharedPool
from trtpd.kv_transfer.pull import Pull, check_offer
from trtpd.kv_transfer.runs import coalesce, copy_run

Hub = dict[str, "MemorySource"]
"""Sources by instance, shared by the sources and sinks of one test."""


class MemorySource:
    """Keeps holds as any source does; sinks of the same hub find it by its instance's name."""

    def __init__(
        self,
        pool: SharedPool,
        settings: TransferSettings,
        hub: Hub,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self._clock = pool, clock
        self._ledger = HoldLedger(pool, settings, transport="memory", clock=clock)
        hub[settings.instance] = self

    def offer(self, key: Key, *, prompt_tokens: int, blocks: Sequence[int]) -> Offer:
        return self._ledger.offer(key, prompt_tokens=prompt_tokens, blocks=blocks, address=b"")

    def publish(self, key: Key, *, ready_tokens: int) -> Chunk:
        return self._ledger.publish(key, ready_tokens=ready_tokens)

    def seal(self, key: Key, *, first_token: int, first_log_prob: float | None, seed: int) -> Seal:
        return self._ledger.seal(key, first_token=first_token, first_log_prob=first_log_prob, seed=seed)

    def renew(self, key: Key) -> None:
        now_s = self._clock()
        self._ledger.received(key, sent_s=now_s, now_s=now_s)

    def end(self, key: Key) -> bool:
        return self._ledger.end(key)

    def lapsed(self, now_s: float) -> list[Key]:
        return [key for key in self._ledger.lapsed(now_s) if self._ledger.end(key)]

    def holds(self) -> dict[Key, int]:
        return self._ledger.holds()

    def close(self) -> None:
        self._ledger.close()


class MemorySink:
    """Copies everything at the seal, in the caller's thread."""

    def __init__(
        self,
        pool: SharedPool,
        hub: Hub,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._hub, self._wake, self._clock = pool, hub, wake, clock
        self._pulls: dict[Key, Pull] = {}
        self._results: list[PullResult] = []

    def handshake(self, offer: Offer) -> None:
        check_offer(offer, transport="memory", layout=self._pool.layout)
        held_source(self._hub, offer)

    def begin(self, offer: Offer, blocks: Sequence[int]) -> None:
        self.handshake(offer)
        if offer.key in self._pulls:
            raise InternalError(f"request {offer.request_id} is being pulled already")
        self._pulls[offer.key] = Pull(offer, blocks, one_piece=True)
        held_source(self._hub, offer).renew(offer.key)

    def ready(self, chunk: Chunk) -> None:
        if pull := self._pulls.get(chunk.key):
            pull.ready(chunk)

    def sealed(self, seal: Seal) -> None:
        if pull := self._pulls.get(seal.key):
            pull.seal(seal, self._clock())
            try:
                copy_all(self._hub, pull, self._pool)
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
    if source is None or offer.key not in source.holds() or source.pool.gone():
        raise LeaseError(f"{offer.instance} holds nothing of request {offer.request_id} any more")
    if source.pool.address.generation != offer.generation:
        raise LeaseError(f"{offer.instance} has restarted: its offer of request {offer.request_id} is void")
    if source.pool.epochs_of(offer.blocks) != offer.epochs:
        raise LeaseError(f"blocks of request {offer.request_id} were freed before their copy was used")
    return source


def copy_all(hub: Hub, pull: Pull, pool: SharedPool) -> None:
    """Copies a sealed pull into `pool` and verifies it. Raises TransferError."""
    if pull.fault:
        raise pull.fault
    source, digester = held_source(hub, pull.offer), BlockDigester(pool)
    piece, began_s = pull.piece(len(pull.blocks)), time.monotonic()
    for run in coalesce(pull.offer.blocks, pull.blocks):
        copy_run(source.pool, pool, run)
    found = {i: digester.digest(pull.blocks[i], pull.valid_tokens(i)) for i in pull.digests}
    held_source(hub, pull.offer)
    verify(pull.digests, found, pull.offer.instance)
    moved_bytes = len(pull.blocks) * pool.grid[:, 0].nbytes
    pull.copied(piece, bytes_moved=moved_bytes, seconds=time.monotonic() - began_s)
