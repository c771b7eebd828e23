"""A step as the ranks of a group tell it each other: one run of int32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtpd.kv_transfer.layout import KVLayout
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.batching import StepLimits
from trtpd.runtime.engine.executor import DrawAt, Piece

I32 = npt.NDArray[np.int32]

_SOMEHOW = DrawAt(sampling=Sampling(), index=0)
_HEAD_WORDS = 7
_HALF = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Step:
    """What every rank computes. `epochs[i]` is that of the first block of piece i, in the leader's pool: with block and
    sequence it names what lies there, also where the sequence had the block before."""

    pieces: Sequence[Piece]
    epochs: Sequence[int]

    @property
    def tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)


class StepWire:
    """Packs steps into a buffer of its own, which holds any step within the limits, and back.

    The run: how many pieces; for each its start, the numbers of its ids and blocks, whether it draws, its epoch in
    two halves, its sequence; then all ids; then all blocks. How a token is drawn is not told: rank 0 draws.
    """

    def __init__(self, layout: KVLayout, limits: StepLimits, *, max_seq_tokens: int) -> None:
        self._layout = layout
        blocks = limits.max_running * layout.blocks_for(max_seq_tokens)
        self.buffer: I32 = np.zeros(1 + _HEAD_WORDS * limits.max_running + limits.max_step_tokens + blocks, np.int32)

    def pack(self, step: Step) -> I32:
        """A view of the buffer, valid until the next call."""
        pieces = step.pieces
        blocks = [piece.blocks[: self._layout.blocks_for(piece.end)] for piece in pieces]
        head = np.empty((len(pieces), _HEAD_WORDS), np.int64)
        for row, piece, held, epoch in zip(head, pieces, blocks, step.epochs, strict=True):
            draws = piece.draw is not None
            number = piece.sequence & _HALF
            row[:] = piece.start, len(piece.ids), len(held), draws, epoch & _HALF, epoch >> 31, number
        at = 1 + head.size
        self.buffer[0] = len(pieces)
        self.buffer[1:at] = head.reshape(-1)
        for part in (*(piece.ids for piece in pieces), *blocks):
            self.buffer[at : at + len(part)] = part
            at += len(part)
        return self.buffer[:at]

    def unpack(self, length: int) -> Step:
        """The step whose run lies in the first `length` words of the buffer; views of it, valid until the next."""
        count = int(self.buffer[0])
        at = 1 + _HEAD_WORDS * count
        head = self.buffer[1:at].reshape(count, _HEAD_WORDS).tolist()
        ids_end = at + sum(row[1] for row in head)
        ids, blocks = self.buffer[at:ids_end], self.buffer[ids_end:length]
        pieces = []
        for start, id_count, block_count, draws, _, _, number in head:
            piece = Piece(
                ids=ids[:id_count].tolist(),
                start=start,
                blocks=blocks[:block_count].tolist(),
                draw=_SOMEHOW if draws else None,
                sequence=number,
            )
            pieces.append(piece)
            ids, blocks = ids[id_count:], blocks[block_count:]
        return Step(pieces, [low | high << 31 for *_, low, high, _ in head])
