"""Decode's side of a hand-off: reserve, pull, join the batch. The leader calls this from the engine thread.

An engine that moves its KV itself has no blocks to reserve here. It gets the request as soon as the hand-off is sealed
and fetches the KV alone; until it says KVArrived the transfer isn't over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from trtpd.errors import CapacityError, EngineError, LayoutError, RequestError, TransferError
from trtpd.kv_transfer.base import Key, KVSink, PullResult
from trtpd.kv_transfer.offer import Chunk, Offer, Seal, decode_chunk, decode_offer, decode_seal
from trtpd.runtime.engine.base import Engine, EngineRequest, PagedKV, RequestKind, SelfMovingEngine
from trtpd.runtime.worker.messages import PullWork

T = TypeVar("T", Offer, Chunk, Seal)


class NoKVError(CapacityError):
    """The decode engine has no KV blocks free for this prompt now."""

    code = "no_kv"


class HandOffError(TransferError):
    """What the router passed on of a hand-off can't be used; trying again would not help."""

    retryable = False


class Pulls:
    """The pulls under way. Each key is in one of: pulling, or joined (and forgotten here), or failed
    (likewise)."""

    def __init__(self, engine: Engine, sink: KVSink) -> None:
        """Raises EngineError for an engine that neither has KV blocks nor moves its KV itself."""
        if engine.kv is None and not isinstance(engine, SelfMovingEngine):
            raise EngineError(
                f"{type(engine).__name__} has no KV blocks and doesn't move its KV itself (transport opaque): "
                "nothing can be pulled into it"
            )
        self._engine = engine
        self._sink = sink
        self._requests: dict[Key, EngineRequest] = {}
        self._seals: dict[Key, Seal] = {}
        self._faults: dict[Key, TransferError] = {}
        self._present: dict[Key, int] = {}

    def keys(self) -> set[Key]:
        return set(self._requests)

    def busy(self) -> bool:
        return bool(self._requests) or self._sink.busy()

    def begin(self, work: PullWork) -> EngineRequest:
        """Reserves blocks and starts the pull; the request it is for. Raises NoKVError, RequestError or
        TransferError; then nothing is held."""
        key = (work.request_id, work.attempt)
        offer = _decode(decode_offer, work.offer or b"", key)
        request = msgspec.structs.replace(_checked_request(work, offer), hand_off=offer.opaque)
        blocks = self._reserve(request)
        kv = self._engine.kv
        present = 0 if kv is None else kv.present_blocks(key)
        try:
            self._sink.begin(offer, blocks, present=present)
        except BaseException:
            self._free(key)
            raise
        self._requests[key] = request
        self._present[key] = present * self._engine.limits.tokens_per_block
        return request

    def _reserve(self, request: EngineRequest) -> tuple[int, ...]:
        kv = self._engine.kv
        if kv is not None:
            return reserve(self._engine, kv, request)
        assert isinstance(self._engine, SelfMovingEngine), "checked when this was made"
        tokens = len(request.prompt_ids)
        if not self._engine.has_room(tokens + request.max_tokens - request.first_index):
            raise no_room(tokens)
        return ()

    def _free(self, key: Key) -> None:
        if self._engine.kv is not None:
            self._engine.kv.free(key)

    def more(self, work: PullWork) -> None:
        """Passes on new chunks and the seal. What can't be read fails the pull, as `ended` will say."""
        key = (work.request_id, work.attempt)
        try:
            for data in work.chunks:
                self._sink.ready(_decode(decode_chunk, data, key))
            if work.seal is not None:
                seal = _decode(decode_seal, work.seal, key)
                self._seals[key] = seal
                self._sink.sealed(seal)
        except HandOffError as error:
            self._faults[key] = error
            self._sink.abort(key)

    def abort(self, key: Key) -> None:
        """Stops a pull; its blocks are free once `ended` has returned it."""
        self._sink.abort(key)

    def ended(self) -> list[PullResult]:
        """Pulls that are over. For each, `join` or `drop` must follow."""
        results = []
        for result in self._sink.progress():
            fault = self._faults.pop(result.key, None)
            if fault is not None:
                result = PullResult(
                    key=result.key,
                    bytes_moved=result.bytes_moved,
                    chunks=result.chunks,
                    seconds=result.seconds,
                    exposed_s=result.exposed_s,
                    path=result.path,
                    error=str(fault),
                    code=fault.code,
                    retryable=False,
                )
            results.append(result)
        return results

    def join(self, key: Key) -> int:
        """The KV is there, or can be fetched by the engine: the sequence joins decode's batch. Returns of how many
        tokens it was there before the pull. Raises RequestError, TransferError, with the blocks given back."""
        request, seal, present_tokens = self._requests.pop(key), self._seals.pop(key), self._present.pop(key)
        try:
            self._engine.submit(msgspec.structs.replace(request, first_token=seal.first_token))
        except BaseException:
            self._free(key)
            raise
        return present_tokens

    def drop(self, key: Key) -> None:
        """The KV is not wanted, or did not come: gives the blocks back."""
        del self._requests[key], self._present[key]
        self._seals.pop(key, None)
        self._free(key)


def reserve(engine: Engine, kv: PagedKV, request: EngineRequest) -> tuple[int, ...]:
    """Blocks for a sequence whose KV comes from elsewhere. Raises NoKVError, RequestError if they could never be
    had; then nothing is reserved."""
    tokens, limits = len(request.prompt_ids), engine.limits
    if tokens >= limits.max_seq_tokens or kv.layout.blocks_for(tokens + 1) > limits.kv_blocks:
        raise RequestError(
            f"KV of {tokens} tokens can't be decoded here: the longest sequence has {limits.max_seq_tokens} tokens "
            f"and the pool {limits.kv_blocks} blocks of {limits.tokens_per_block}"
        )
    peak_tokens = tokens + request.max_tokens - request.first_index
    prompt_ids = request.prompt_ids if request.reuse else ()
    blocks = kv.reserve(request.key, tokens, peak_tokens=peak_tokens, prompt_ids=prompt_ids)
    if blocks is None:
        raise no_room(tokens)
    return blocks


def no_room(tokens: int) -> NoKVError:
    return NoKVError(f"no room for the KV of {tokens} tokens on this instance now")


def _checked_request(work: PullWork, offer: Offer) -> EngineRequest:
    request, key = work.request, (work.request_id, work.attempt)
    if request is None or request.kind is not RequestKind.GENERATION_ONLY:
        raise HandOffError(f"the offer of request {key} came without a generation_only request")
    if request.key != key:
        raise HandOffError(f"the pull of request {key} carries request {request.key}")
    if len(request.prompt_ids) != offer.prompt_tokens:
        raise HandOffError(
            f"request {key} has {len(request.prompt_ids)} prompt tokens, its offer {offer.prompt_tokens}"
        )
    return request


def _decode(decoder: Callable[[bytes], T], data: bytes, key: Key) -> T:
    try:
        value = decoder(data)
    except LayoutError:
        raise
    except TransferError as error:
        raise HandOffError(f"the hand-off of request {key} can't be read: {error}") from error
    if value.key != key:
        raise HandOffError(f"the hand-off of request {key} carries a part of {value.key}")
    return value
