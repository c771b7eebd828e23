"""StepInputs: the integers that tell the graph what a step's tokens are and where their KV lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtpd.kv_transfer.layout import KVLayout
from trtpd.runtime.engine.batching import StepLimits
from trtpd.runtime.engine.executor import Piece
from trtpd.runtime.engine.graph import INT_INPUTS, MAX_CONTEXT_INPUT

I32 = npt.NDArray[np.int32]


class StepInputs:
    """Fills buffers that are allocated once and reused by every step."""

    def __init__(self, layout: KVLayout, limits: StepLimits, *, max_seq_tokens: int) -> None:
        self._layout = layout
        sequences, tokens = limits.max_running, limits.max_step_tokens
        sizes = {
            "ids": tokens,
            "positions": tokens,
            "past_lens": sequences,
            "subsequence_begins": sequences + 1,
            "block_indices": sequences * layout.blocks_for(max_seq_tokens),
            "block_indices_begins": sequences + 1,
            "sample_rows": sequences,
        }
        self._buffers: dict[str, I32] = {name: np.zeros(sizes[name], np.int32) for name in INT_INPUTS}
        self._max_context = np.zeros((), np.int32)

    def fill(self, pieces: Sequence[Piece]) -> dict[str, I32]:
        """Views of the buffers, valid until the next call. `sample_rows` are the last rows of the pieces that
        draw, in order; where none does it is the last row of all, so that a step always has a row to
        check."""
        buffers = self._buffers
        row = block = 0
        sample_rows: list[int] = []
        for i, piece in enumerate(pieces):
            end_row = row + len(piece.ids)
            buffers["ids"][row:end_row] = piece.ids
            buffers["positions"][row:end_row] = np.arange(piece.start, piece.end)
            buffers["past_lens"][i] = piece.start
            buffers["subsequence_begins"][i + 1] = row = end_row
            blocks = piece.blocks[: self._layout.blocks_for(piece.end)]
            buffers["block_indices"][block : block + len(blocks)] = blocks
            buffers["block_indices_begins"][i + 1] = block = block + len(blocks)
            if piece.draw is not None:
                sample_rows.append(row - 1)
        sample_rows = sample_rows or [row - 1]
        buffers["sample_rows"][: len(sample_rows)] = sample_rows
        self._max_context[...] = max(piece.end for piece in pieces)
        lengths = (row, row, len(pieces), len(pieces) + 1, block, len(pieces) + 1, len(sample_rows))
        views = {name: buffers[name][:length] for name, length in zip(INT_INPUTS, lengths, strict=True)}
        return {**views, MAX_CONTEXT_INPUT: self._max_context}
