"""Source: KVSource for any group, over one or several doors through which sinks reach its blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from trtpd.errors import InternalError
from trtpd.kv_transfer.base import Key, TransferSettings, Visits
from trtpd.kv_transfer.ledger import HoldLedger
from trtpd.kv_transfer.offer import Chunk, Offer, Seal, Way
from trtpd.kv_transfer.ranks import RankPools


class Door(Protocol):
    """How sinks of one transport reach a source: its side of addresses and leases. Called from the engine
    thread; what a door does in threads of its own is its affair."""

    transport: str

    def open(self, key: Key, blocks: tuple[int, ...]) -> bytes:
        """Lets sinks in to these blocks; the address that goes into the offer. Raises CapacityError."""

    def renewed_s(self, key: Key) -> float | None:
        """When the newest renewal was sent or received, by the source's clock; None if there was none."""

    def suspend(self, key: Key) -> None:
        """From here on renewals are not confirmed. One that was confirmed before shows in `renewed_s` now."""

    def resume(self, key: Key) -> None:
        """Undoes `suspend`."""

    def shut(self, key: Key) -> None:
        """The hold is over: whoever asks is told so."""

    def visits(self) -> Visits:
        """Who came in vain."""

    def check(self) -> None:
        """Raises TrtpdError if what serves this door has ended by itself."""

    def close(self) -> None:
        """Lets nobody in any more."""


class Source:
    """KVSource of a group: one ledger of holds, reached through every door alike."""

    def __init__(
        self,
        pools: RankPools,
        settings: TransferSettings,
        doors: Sequence[Door],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`doors` are in order of preference. Raises InternalError if ranks of the group are missing."""
        if not pools.complete:
            raise InternalError(f"a source needs the pools of all ranks, it has {sorted(pools.by_rank)}")
        self._doors = tuple(doors)
        self._ledger = HoldLedger(pools, settings, clock=clock)

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(door.transport for door in self._doors)

    def offer(self, key: Key, *, prompt_tokens: int, blocks: Sequence[int]) -> Offer:
        held = self._ledger.check(key, prompt_tokens, blocks)
        opened: list[Door] = []
        ways: list[Way] = []
        try:
            for door in self._doors:
                ways.append(Way(transport=door.transport, address=door.open(key, held)))
                opened.append(door)
        except BaseException:
            for door in opened:
                door.shut(key)
            raise
        return self._ledger.offer(key, prompt_tokens=prompt_tokens, blocks=held, ways=ways)

    def publish(self, key: Key, *, ready_tokens: int) -> Chunk:
        return self._ledger.publish(key, ready_tokens=ready_tokens)

    def seal(self, key: Key, *, first_token: int, first_log_prob: float | None, seed: int) -> Seal:
        return self._ledger.seal(key, first_token=first_token, first_log_prob=first_log_prob, seed=seed)

    def end(self, key: Key) -> bool:
        if not self._ledger.end(key):
            return False
        for door in self._doors:
            door.shut(key)
        return True

    def visits(self) -> Visits:
        return sum((door.visits() for door in self._doors), Visits())

    def lapsed(self, now_s: float) -> list[Key]:
        for door in self._doors:
            door.check()
        for key in self._ledger.holds():
            self._receive(key, now_s)
        return [key for key in self._ledger.lapsed(now_s) if not self._saved_at_last(key, now_s) and self.end(key)]

    def _receive(self, key: Key, now_s: float) -> bool:
        """Whether a renewal has come in since the last look."""
        renewals = [sent_s for door in self._doors if (sent_s := door.renewed_s(key)) is not None]
        return bool(renewals) and self._ledger.received(key, sent_s=max(renewals), now_s=now_s)

    def _saved_at_last(self, key: Key, now_s: float) -> bool:
        """A sink counts a renewal as received if it was confirmed. So confirmations stop first, then comes a last
        look: whichever of the two is earlier, both sides draw the same conclusion."""
        for door in self._doors:
            door.suspend(key)
        if not self._receive(key, now_s):
            return False
        for door in self._doors:
            door.resume(key)
        return True

    def holds(self) -> dict[Key, int]:
        return self._ledger.holds()

    def close(self) -> None:
        for key in self.holds():
            self.end(key)
        for door in self._doors:
            door.close()
        self._ledger.close()
