"""opaque: an engine that moves its KV itself (TensorRT-LLM's ranks do). Only its own hand-off state travels.

The states in between are skipped: chunks carry no digests, nothing is copied here, and a pull has succeeded once the
seal is there, since the engine waits for its KV by itself. Held KV counts in `holds` as the blocks that the prompt
would need, until the engine says that it is gone and `end` is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trtpd.errors import InternalError, TransferError
from trtpd.kv_transfer.base import Key, PullResult, TransferSettings, Visits
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.leases import SourceLease
from trtpd.kv_transfer.offer import OPAQUE_LIMIT_BYTES, Chunk, Offer, Seal
from trtpd.kv_transfer.pull import check_offer

TRANSPORT = "opaque"


class _Hold:
    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.lease = SourceLease(offer.lease_s)
        self.sealed = False


class OpaqueSource:
    """KVSource of such an engine. `state_of` gives the engine's hand-off state of a request, at its offer."""

    def __init__(
        self,
        layout: KVLayout,
        settings: TransferSettings,
        *,
        state_of: Callable[[Key], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout, self._settings, self._state_of, self._clock = layout, settings, state_of, clock
        self._holds: dict[Key, _Hold] = {}

    def offer(self, key: Key, *, prompt_tokens: int, blocks: Sequence[int]) -> Offer:
        """Raises TransferError for a state that can't travel."""
        if key in self._holds:
            raise InternalError(f"request {key[0]} attempt {key[1]} can't be offered: it holds already")
        _no_blocks(blocks)
        state = self._state_of(key)
        if not 0 < len(state) <= OPAQUE_LIMIT_BYTES:
            raise TransferError(
                f"{self._settings.instance} has {len(state)} bytes of hand-off state for request {key[0]}; it must"
                f" be 1 to {OPAQUE_LIMIT_BYTES}"
            )
        offer = Offer(
            request_id=key[0],
            attempt=key[1],
            generation=self._settings.generation,
            instance=self._settings.instance,
            transport=TRANSPORT,
            layout=self._layout,
            prompt_tokens=prompt_tokens,
            blocks=(),
            epochs=(),
            address=b"",
            lease_s=self._settings.lease_s,
            opaque=state,
        )
        self._holds[key] = _Hold(offer)
        return offer

    def publish(self, key: Key, *, ready_tokens: int) -> Chunk:
        self._open_hold(key)
        return Chunk(request_id=key[0], attempt=key[1], ready_tokens=ready_tokens)

    def seal(self, key: Key, *, first_token: int, first_log_prob: float | None, seed: int) -> Seal:
        hold = self._open_hold(key)
        hold.sealed = True
        hold.lease.sealed(self._clock())
        return Seal(
            request_id=key[0],
            attempt=key[1],
            prompt_tokens=hold.offer.prompt_tokens,
            first_token=first_token,
            first_log_prob=first_log_prob,
            seed=seed,
        )

    def _open_hold(self, key: Key) -> _Hold:
        hold = self._holds.get(key)
        if hold is None or hold.sealed:
            state = "is sealed" if hold else "holds nothing"
            raise InternalError(f"request {key[0]} attempt {key[1]} {state}: nothing more can be published")
        return hold

    def end(self, key: Key) -> bool:
        return self._holds.pop(key, None) is not None

    def visits(self) -> Visits:
        """The engine's ports are its own."""
        return Visits()

    def lapsed(self, now_s: float) -> list[Key]:
        return [key for key, hold in list(self._holds.items()) if hold.lease.lapsed(now_s) and self.end(key)]

    def holds(self) -> dict[Key, int]:
        return {key: self._layout.blocks_for(hold.offer.prompt_tokens) for key, hold in self._holds.items()}

    def close(self) -> None:
        self._holds.clear()


class OpaqueSink:
    """KVSink of such an engine, which gets the state by `state` and fetches its KV itself."""

    def __init__(self, layout: KVLayout, *, wake: Callable[[], None] = lambda: None) -> None:
        self._layout, self._wake = layout, wake
        self._offers: dict[Key, Offer] = {}
        self._results: list[PullResult] = []

    def handshake(self, offer: Offer) -> None:
        check_offer(offer, transport=TRANSPORT, layout=self._layout)
        if not offer.opaque:
            raise TransferError(f"{offer.instance} offers request {offer.request_id} without its engine's state")

    def begin(self, offer: Offer, blocks: Sequence[int], *, present: int = 0) -> None:
        del present  # what the engine finds of a prompt is its own affair
        self.handshake(offer)
        _no_blocks(blocks)
        if offer.key in self._offers:
            raise InternalError(f"request {offer.request_id} attempt {offer.attempt} is being pulled already")
        self._offers[offer.key] = offer

    def state(self, key: Key) -> bytes:
        """The engine's hand-off state of a pull under way."""
        return self._offers[key].opaque

    def ready(self, chunk: Chunk) -> None:
        """The engine sees to its chunks."""

    def sealed(self, seal: Seal) -> None:
        self._end(seal.key)

    def abort(self, key: Key) -> None:
        self._end(key, code="aborted")

    def _end(self, key: Key, *, code: str = "") -> None:
        if self._offers.pop(key, None) is None:
            return
        self._results.append(
            PullResult(
                key=key,
                bytes_moved=0,
                chunks=0,
                seconds=0.0,
                exposed_s=0.0,
                path=TRANSPORT,
                error=f"the pull was {code}" if code else None,
                code=code,
            )
        )
        self._wake()

    def progress(self) -> list[PullResult]:
        results, self._results = self._results, []
        return results

    def busy(self) -> bool:
        return bool(self._offers)

    def close(self) -> None:
        for key in list(self._offers):
            self.abort(key)


def _no_blocks(blocks: Sequence[int]) -> None:
    if blocks:
        raise InternalError(f"blocks {tuple(blocks)[:8]} given for an engine that moves its KV itself")
