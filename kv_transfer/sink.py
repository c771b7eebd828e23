"""Sink: what KVSinks of all transports share: pullers, one per peer where a peer can make its thread wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trtpd.errors import InternalError
from trtpd.kv_transfer.base import Key, PullResult, TransferSettings
from trtpd.kv_transfer.integrity import Arrivals
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.pull import Pull
from trtpd.kv_transfer.puller import Carrier, Puller
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.routes import Route, plan_routes

LAYOUTS_KEPT = 64


class Sink:
    """Routes calls to the puller of a pull's peer. A transport makes carriers and names peers.

    `pools` are those of the ranks whose KV this sink brings: all ranks of a group, or those of one host.
    """

    def __init__(
        self,
        pools: RankPools,
        settings: TransferSettings,
        *,
        piece_bytes: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_whole_layers(pools)
        self.pools, self.settings = pools, settings
        self._piece_blocks = max(1, piece_bytes // pools.bytes_per_block())
        self._wake, self._clock = wake, clock
        self._pullers: dict[str, Puller] = {}
        self._peer_of: dict[Key, str] = {}
        self._closed_results: list[PullResult] = []
        self._closed = False

    def new_pull(self, offer: Offer, blocks: Sequence[int], present: int) -> Pull:
        """Raises InternalError for blocks that can't take it."""
        one_piece = offer.prompt_tokens < self.settings.one_piece_tokens
        pull = Pull(offer, blocks, one_piece=one_piece, present=present)
        if max(pull.blocks) >= self.pools.num_blocks:
            raise InternalError(f"block {max(pull.blocks)} reserved in a pool of {self.pools.num_blocks}")
        return pull

    def puller(self, peer: str, idle: Callable[[], bool]) -> Puller:
        """The puller of a peer, with its thread running. `idle` as for Puller. Raises InternalError."""
        if self._closed:
            raise InternalError("this sink is closed")
        puller = self._pullers.get(peer)
        if puller is None:
            puller = Puller(piece_blocks=self._piece_blocks, wake=self._wake, clock=self._clock, idle=idle)
            self._pullers[peer] = puller
        puller.start()
        return puller

    def start_pull(
        self, peer: str, puller: Puller, pull: Pull, carrier: Carrier, *, confirmed_s: float | None = None
    ) -> None:
        """As Puller.begin. Raises InternalError if the key is being pulled, from whatever peer; `carrier` is closed
        then."""
        try:
            if pull.key in self._peer_of:
                raise InternalError(f"request {pull.key[0]} attempt {pull.key[1]} is being pulled already")
            puller.begin(pull, carrier, confirmed_s=confirmed_s)
        except BaseException:
            carrier.close()
            raise
        self._peer_of[pull.key] = peer

    def ready(self, chunk: Chunk) -> None:
        if puller := self._of(chunk.key):
            puller.ready(chunk)

    def sealed(self, seal: Seal) -> None:
        if puller := self._of(seal.key):
            puller.sealed(seal)

    def abort(self, key: Key) -> None:
        if puller := self._of(key):
            puller.abort(key)

    def _of(self, key: Key) -> Puller | None:
        peer = self._peer_of.get(key)
        return None if peer is None else self._pullers[peer]

    def progress(self) -> list[PullResult]:
        results, self._closed_results = self._closed_results, []
        for puller in self._pullers.values():
            results += puller.progress()
        for result in results:
            self._peer_of.pop(result.key, None)
        return results

    def busy(self) -> bool:
        return any(puller.busy() for puller in self._pullers.values())

    def drop_puller(self, peer: str) -> bool:
        """Ends the thread of a peer that nothing is pulled from; False if something is. Its results stay."""
        puller = self._pullers.get(peer)
        if puller is None:
            return True
        if puller.busy():
            return False
        puller.close()
        self._closed_results += puller.progress()
        del self._pullers[peer]
        for key in [key for key, of in self._peer_of.items() if of == peer]:
            del self._peer_of[key]
        return True

    def close_pullers(self) -> None:
        """Aborts every pull and waits for the threads."""
        self._closed = True
        for puller in self._pullers.values():
            puller.close()


def check_whole_layers(pools: RankPools) -> None:
    """Digests are over all layers of a head, so a sink that verifies must have them all. Raises InternalError."""
    layout = pools.layout
    for tp_rank in {tp_rank for tp_rank, _ in pools.by_rank}:
        stages = [pp_rank for tp, pp_rank in pools.by_rank if tp == tp_rank]
        if len(stages) != layout.pp:
            raise InternalError(f"rank {tp_rank} is here with stages {stages} of {layout.pp}: give one sink all stages")


class Plans:
    """Routes from every layout that was seen."""

    def __init__(self, pools: RankPools) -> None:
        self._pools = pools
        self._routes: dict[str, tuple[Route, ...]] = {}

    def routes(self, offer: Offer) -> tuple[Route, ...]:
        """The offer's layout is convertible."""
        key = offer.layout.fingerprint
        if key not in self._routes:
            if len(self._routes) >= LAYOUTS_KEPT:
                self._routes.clear()
            self._routes[key] = plan_routes(offer.layout, self._pools)
        return self._routes[key]

    def arrivals(self, pull: Pull, piece: range) -> Arrivals:
        return Arrivals(pull, piece, self._pools.layout)
