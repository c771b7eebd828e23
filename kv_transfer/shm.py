"""shm: KV moves between two processes of one host by one copy, from pool to pool.

The source only says where its blocks are. The sink maps the source's pool and copies into its own from a
thread (puller.py). Renewals are writes into a lease slot of the source's pool: neither side ever waits for the
other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from trtpd.errors import InternalError, LayoutError, LeaseError, TransferError
from trtpd.kv_transfer.base import Key, PullResult, TransferSettings
from trtpd.kv_transfer.integrity import BlockDigester, verify
from trtpd.kv_transfer.leases import LeaseSlots, is_granted, lease_tag, write_renewal
from trtpd.kv_transfer.ledger import HoldLedger
from trtpd.kv_transfer.offer import Chunk, Offer, Seal, decode_message
from trtpd.kv_transfer.peers import Peer, PeerPools
from trtpd.kv_transfer.pool import PoolAddress, SharedPool
from trtpd.kv_transfer.pull import Pull, check_offer
from trtpd.kv_transfer.puller import Puller
from trtpd.kv_transfer.runs import Run, coalesce, copy_run, copy_run_digesting, split, tile_blocks

PIECE_BYTES = 32 << 20
TRANSPORT = "shm"


class ShmAddress(msgspec.Struct, frozen=True, kw_only=True):
    """`Offer.address` of this transport: the pools of all ranks, and the lease slot in that of rank 0."""

    ranks: tuple[PoolAddress, ...]
    lease_slot: int


class ShmSource:
    """KVSource over shared memory. It never looks at the bytes but to digest them."""

    def __init__(
        self,
        pool: SharedPool,
        settings: TransferSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._settings = pool, settings
        self._ledger = HoldLedger(pool, settings, transport=TRANSPORT, clock=clock)
        self._slots = LeaseSlots(pool)
        self._granted: dict[Key, tuple[int, int]] = {}

    def offer(self, key: Key, *, prompt_tokens: int, blocks: Sequence[int]) -> Offer:
        if key in self._granted:
            raise InternalError(f"request {key[0]} attempt {key[1]} holds already")
        tag = lease_tag(*key, self._settings.generation)
        slot = self._slots.grant(tag)
        address = msgspec.msgpack.encode(ShmAddress(ranks=(self._pool.address,), lease_slot=slot))
        try:
            offer = self._ledger.offer(key, prompt_tokens=prompt_tokens, blocks=blocks, address=address)
        except BaseException:
            self._slots.give_back(slot)
            raise
        self._granted[key] = (slot, tag)
        return offer

    def publish(self, key: Key, *, ready_tokens: int) -> Chunk:
        return self._ledger.publish(key, ready_tokens=ready_tokens)

    def seal(self, key: Key, *, first_token: int, first_log_prob: float | None, seed: int) -> Seal:
        return self._ledger.seal(key, first_token=first_token, first_log_prob=first_log_prob, seed=seed)

    def end(self, key: Key) -> bool:
        granted = self._granted.pop(key, None)
        if granted:
            self._slots.give_back(granted[0])
        return self._ledger.end(key)

    def lapsed(self, now_s: float) -> list[Key]:
        for key in self._granted:
            self._receive(key, now_s)
        return [key for key in self._ledger.lapsed(now_s) if not self._saved_at_last(key, now_s) and self.end(key)]

    def _receive(self, key: Key, now_s: float) -> bool:
        slot, tag = self._granted[key]
        sent_s = self._slots.sent_s(slot, tag)
        return sent_s is not None and self._ledger.received(key, sent_s=sent_s, now_s=now_s)

    def _saved_at_last(self, key: Key, now_s: float) -> bool:
        """A sink counts a renewal as received if it sees the grant after its write. So the grant goes first,
        then comes a last look: whichever of the two is earlier, both sides draw the same conclusion."""
        slot, tag = self._granted[key]
        self._slots.suspend(slot)
        if self._receive(key, now_s):
            self._slots.regrant(slot, tag)
            return True
        return False

    def holds(self) -> dict[Key, int]:
        return self._ledger.holds()

    def close(self) -> None:
        for key in self.holds():
            self.end(key)
        self._slots.close()
        self._ledger.close()


class ShmSink:
    """KVSink over shared memory, for one rank. `wake` is called from the sink's thread when a pull ended."""

    def __init__(
        self,
        pool: SharedPool,
        settings: TransferSettings,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._settings = pool, settings
        self._peers = PeerPools()
        self._digester = BlockDigester(pool)
        piece_blocks = max(1, PIECE_BYTES // pool.grid[:, 0].nbytes)
        self._puller = Puller(piece_blocks=piece_blocks, wake=wake, clock=clock, idle=self._peers.tend)

    def handshake(self, offer: Offer) -> None:
        self._connect(offer)
        self._puller.start()

    def begin(self, offer: Offer, blocks: Sequence[int]) -> None:
        one_piece = offer.prompt_tokens < self._settings.one_piece_tokens
        pull = Pull(offer, blocks, one_piece=one_piece)
        if max(pull.blocks) >= self._pool.num_blocks:
            raise InternalError(f"block {max(pull.blocks)} reserved in a pool of {self._pool.num_blocks}")
        carrier = self._connect(offer)
        carrier.open()
        try:
            self._puller.begin(pull, carrier)
        except BaseException:
            carrier.close()
            raise

    def ready(self, chunk: Chunk) -> None:
        self._puller.ready(chunk)

    def sealed(self, seal: Seal) -> None:
        self._puller.sealed(seal)

    def abort(self, key: Key) -> None:
        self._puller.abort(key)

    def progress(self) -> list[PullResult]:
        return self._puller.progress()

    def busy(self) -> bool:
        return self._puller.busy()

    def close(self) -> None:
        self._puller.close()
        self._peers.close()
        self._digester.close()

    def _connect(self, offer: Offer) -> ShmCarrier:
        """A way to the source's pool, mapped if that is new. Raises LayoutError, TransferError."""
        check_offer(offer, transport=TRANSPORT, layout=self._pool.layout)
        address = decode_message(offer.address, ShmAddress)
        own = self._pool.address
        pool = next((p for p in address.ranks if (p.tp_rank, p.pp_rank) == (own.tp_rank, own.pp_rank)), None)
        if pool is None:
            raise LayoutError(f"{offer.instance} offers no pool for rank {own.tp_rank}.{own.pp_rank}")
        if pool.generation != offer.generation:
            raise LeaseError(f"{offer.instance} offers a pool of {pool.generation!r}: it has restarted")
        if max(offer.blocks) >= pool.num_blocks or not 0 <= address.lease_slot < pool.num_blocks:
            raise TransferError(
                f"{offer.instance} offers block {max(offer.blocks)} and lease slot {address.lease_slot} of"
                f" a pool of {pool.num_blocks} blocks"
            )
        peer = self._peers.get(pool, offer.layout)
        return ShmCarrier(self._pool, self._digester, self._peers, peer, offer, address.lease_slot)


class ShmCarrier:
    """Carrier over a mapped pool: copies run by run, and verifies the bytes that arrived while in cache."""

    def __init__(
        self,
        pool: SharedPool,
        digester: BlockDigester,
        peers: PeerPools,
        peer: Peer,
        offer: Offer,
        lease_slot: int,
    ) -> None:
        self._pool, self._digester, self._peers, self._peer = pool, digester, peers, peer
        self._offer, self._slot = offer, lease_slot
        self._tag = lease_tag(*offer.key, offer.generation)

    def open(self) -> None:
        """Keeps the peer's pool mapped until `close`."""
        self._peers.use(self._peer)

    def renew(self, sent_s: float) -> float | None:
        return sent_s if write_renewal(self._peer.pool, self._slot, self._tag, sent_s=sent_s) else None

    def check(self) -> None:
        offer = self._offer
        if not is_granted(self._peer.pool, self._slot, self._tag):
            raise LeaseError(f"{offer.instance} holds the KV of request {offer.request_id} no longer")
        if self._peer.pool.epochs_of(offer.blocks) != offer.epochs:
            raise LeaseError(f"{offer.instance} freed blocks of request {offer.request_id} before their copy was used")

    def gone(self) -> bool:
        return self._peer.pool.gone()

    def copy(self, pull: Pull, piece: range) -> int:
        for run in coalesce(
            pull.offer.blocks[piece.start : piece.stop],
            pull.blocks[piece.start : piece.stop],
            first_index=piece.start,
        ):
            if any(index in pull.digests for index in run.indexes):
                for part in split(run, tile_blocks(self._pool)):
                    self._copy_verifying(pull, part)
            else:
                copy_run(self._peer.pool, self._pool, run)
        return len(piece) * self._pool.grid[:, 0].nbytes

    def _copy_verifying(self, pull: Pull, run: Run) -> None:
        expected = [index for index in run.indexes if index in pull.digests]
        opened = self._digester.open((pull.blocks[i], pull.valid_tokens(i)) for i in expected)
        copy_run_digesting(self._peer.pool, self._pool, run, opened)
        verify(pull.digests, dict(zip(expected, opened.values(), strict=True)), self._offer.instance)

    def close(self) -> None:
        self._peers.leave(self._peer)
