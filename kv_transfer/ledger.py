"""HoldLedger: what any source keeps of its holds, whatever moves the bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from trtpd.errors import InternalError
from trtpd.kv_transfer.base import Key, TransferSettings
from trtpd.kv_transfer.integrity import GroupDigester, is_sampled
from trtpd.kv_transfer.leases import SourceLease
from trtpd.kv_transfer.offer import Chunk, Offer, Seal, Way
from trtpd.kv_transfer.ranks import RankPools


class Hold:
    """One offer that stands. `digested` counts blocks whose digests were told, or not wanted."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.lease = SourceLease(offer.lease_s)
        self.digested = 0
        self.sealed = False


class HoldLedger:
    """Offers, digests and leases of one source; doors (source.py) add where the bytes are and how renewals come.

    Not thread-safe. `clock` is the clock of `KVSource.lapsed`.
    """

    def __init__(self, pools: RankPools, settings: TransferSettings, *, clock: Callable[[], float]) -> None:
        self._pools, self._settings, self._clock = pools, settings, clock
        self._digester = GroupDigester(pools)
        self._holds: dict[Key, Hold] = {}

    def check(self, key: Key, prompt_tokens: int, blocks: Sequence[int]) -> tuple[int, ...]:
        """The blocks that an offer of this prompt would hold; spare ones at the end are left out. Raises
        InternalError if it can't be offered."""
        needed = self._pools.layout.blocks_for(prompt_tokens)
        if key in self._holds or not 0 < needed <= len(blocks):
            state = "holds already" if key in self._holds else f"has {len(blocks)} of {needed} blocks"
            raise InternalError(f"request {key[0]} attempt {key[1]} can't be offered: it {state}")
        return tuple(blocks[:needed])

    def offer(self, key: Key, *, prompt_tokens: int, blocks: Sequence[int], ways: Sequence[Way]) -> Offer:
        """Starts a hold over the blocks that the prompt needs."""
        held = self.check(key, prompt_tokens, blocks)
        offer = Offer(
            request_id=key[0],
            attempt=key[1],
            generation=self._settings.generation,
            instance=self._settings.instance,
            transport=ways[0].transport,
            address=ways[0].address,
            others=tuple(ways[1:]),
            layout=self._pools.layout,
            prompt_tokens=prompt_tokens,
            blocks=held,
            epochs=self._pools.control.epochs_of(held),
            lease_s=self._settings.lease_s,
        )
        self._holds[key] = Hold(offer)
        return offer

    def publish(self, key: Key, *, ready_tokens: int) -> Chunk:
        hold = self._open_hold(key)
        whole_blocks = ready_tokens // self._pools.layout.tokens_per_block
        digests = self._digests(hold, whole_blocks)
        return Chunk(request_id=key[0], attempt=key[1], ready_tokens=ready_tokens, digests=digests)

    def seal(self, key: Key, *, first_token: int, first_log_prob: float | None, seed: int) -> Seal:
        hold = self._open_hold(key)
        digests = self._digests(hold, len(hold.offer.blocks))
        hold.sealed = True
        hold.lease.sealed(self._clock())
        return Seal(
            request_id=key[0],
            attempt=key[1],
            prompt_tokens=hold.offer.prompt_tokens,
            first_token=first_token,
            first_log_prob=first_log_prob,
            seed=seed,
            digests=digests,
        )

    def end(self, key: Key) -> bool:
        return self._holds.pop(key, None) is not None

    def received(self, key: Key, *, sent_s: float, now_s: float) -> bool:
        """A renewal has come in. False if it is old or there is no such hold."""
        hold = self._holds.get(key)
        return hold is not None and hold.lease.received(sent_s=sent_s, now_s=now_s)

    def lapsed(self, now_s: float) -> list[Key]:
        """Holds whose lease has ended. They stand until `end`."""
        return [key for key, hold in self._holds.items() if hold.lease.lapsed(now_s)]

    def holds(self) -> dict[Key, int]:
        return {key: len(hold.offer.blocks) for key, hold in self._holds.items()}

    def close(self) -> None:
        """Ends every hold."""
        self._holds.clear()

    def _open_hold(self, key: Key) -> Hold:
        hold = self._holds.get(key)
        if hold is None or hold.sealed:
            state = "is sealed" if hold else "holds nothing"
            raise InternalError(f"request {key[0]} attempt {key[1]} {state}: nothing more can be published")
        return hold

    def _digests(self, hold: Hold, end: int) -> dict[int, tuple[int, ...]]:
        """Of the sampled blocks from the last one told up to `end`, and marks them told."""
        offer, per_block = hold.offer, self._pools.layout.tokens_per_block
        every = self._settings.digest_every
        indexes = [i for i in range(hold.digested, end) if is_sampled(i, every=every)]
        digests: dict[int, tuple[int, ...]] = {}
        for tokens, group in itertools.groupby(indexes, lambda i: min(per_block, offer.prompt_tokens - i * per_block)):
            alike = list(group)
            found = self._digester.digests([offer.blocks[i] for i in alike], tokens)
            digests |= zip(alike, found, strict=True)
        hold.digested = max(hold.digested, end)
        return digests
