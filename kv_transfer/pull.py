"""Pull: how far one pull has come, whatever moves the bytes. No I/O, no clock, no thread."""

from __future__ import annotations

from collections.abc import Sequence

from trtpd.errors import InternalError, TransferError
from trtpd.kv_transfer.base import Key, PullResult
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.reshard import check_convertible


class Pull:
    """One offer on its way into `blocks`. Indexes count blocks of the prompt."""

    def __init__(self, offer: Offer, blocks: Sequence[int], *, one_piece: bool, present: int = 0) -> None:
        """`one_piece`: nothing is to be copied before the seal. `present`: the first blocks, which hold their KV
        already. Raises InternalError for too few blocks."""
        self.offer = offer
        self.blocks = tuple(blocks[: len(offer.blocks)])
        if len(self.blocks) < len(offer.blocks) or len(set(blocks)) < len(blocks):
            raise InternalError(f"request {offer.request_id} was given blocks {blocks} for {len(offer.blocks)} offered")
        if not 0 <= present <= offer.prompt_tokens // offer.layout.tokens_per_block:
            raise InternalError(f"request {offer.request_id}: {present} blocks of {len(offer.blocks)} are to be full")
        self.digests: dict[int, tuple[int, ...]] = {}
        self.fault: TransferError | None = None
        self.aborted = False
        self.done = present
        self._one_piece = one_piece
        self._available = 0
        self._sealed_s: float | None = None
        self._pieces, self._bytes_moved, self._seconds = 0, 0, 0.0

    @property
    def key(self) -> Key:
        return self.offer.key

    @property
    def sealed(self) -> bool:
        return self._sealed_s is not None

    @property
    def complete(self) -> bool:
        return self.sealed and self.done == len(self.blocks)

    def ready(self, chunk: Chunk) -> None:
        """Whole blocks of the chunk may be copied. One that says less than an earlier one changes nothing."""
        if chunk.ready_tokens > self.offer.prompt_tokens:
            self.fault = self._mismatch(f"a chunk of {chunk.ready_tokens} tokens")
            return
        self.digests.update(chunk.digests)
        if not self._one_piece:
            self._available = max(self._available, chunk.ready_tokens // self.offer.layout.tokens_per_block)

    def seal(self, seal: Seal, now_s: float) -> None:
        """All blocks may be copied."""
        if seal.prompt_tokens != self.offer.prompt_tokens:
            self.fault = self._mismatch(f"a seal of {seal.prompt_tokens} tokens")
            return
        self.digests.update(seal.digests)
        self._available = len(self.blocks)
        if self._sealed_s is None:
            self._sealed_s = now_s

    def _mismatch(self, what: str) -> TransferError:
        tokens = self.offer.prompt_tokens
        return TransferError(f"request {self.offer.request_id} got {what} for an offer of {tokens} tokens")

    def piece(self, max_blocks: int) -> range:
        """What to copy next; empty if nothing may be copied now."""
        return range(self.done, min(self._available, self.done + max_blocks))

    def copied(self, piece: range, *, bytes_moved: int, seconds: float) -> None:
        """The piece is in the sink's blocks."""
        self.done = piece.stop
        self._pieces += 1
        self._bytes_moved += bytes_moved
        self._seconds += seconds

    def valid_tokens(self, index: int) -> int:
        """Tokens of the prompt that the block at `index` holds."""
        per_block = self.offer.layout.tokens_per_block
        return min(per_block, self.offer.prompt_tokens - index * per_block)

    def result(self, now_s: float, error: TransferError | None = None, *, code: str = "") -> PullResult:
        """The end of it: success if neither an error nor a code is given."""
        exposed_s = 0.0 if self._sealed_s is None else now_s - self._sealed_s
        message = str(error) if error else f"the pull was {code}" if code else None
        return PullResult(
            key=self.key,
            bytes_moved=self._bytes_moved,
            chunks=self._pieces,
            seconds=self._seconds,
            exposed_s=exposed_s,
            path=self.offer.transport,
            error=message,
            code=error.code if error else code,
            retryable=error.retryable if error else False,
        )


def check_offer(offer: Offer, *, transport: str, layout: KVLayout, convert_dtype: bool = False) -> None:
    """Whether a sink of this transport and layout can pull the offer. Raises LayoutError, TransferError."""
    if offer.transport != transport:
        raise TransferError(
            f"{offer.instance} offers KV over {offer.transport!r}, this sink pulls over {transport!r}:"
            " let both use one transport"
        )
    check_convertible(offer.layout, layout, who=offer.instance, convert_dtype=convert_dtype)
