"""Executor: what an engine is once scheduling is taken out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.penalties import History
from trtpd.runtime.engine.sampling import Draw


class DrawAt(msgspec.Struct, frozen=True, kw_only=True):
    """Draw the token at output index `index`. `history` is there where the draw depends on the tokens so far."""

    sampling: Sampling
    index: int
    history: History | None = None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part in a step: compute `ids` at positions `start ...`.

    `blocks` hold the sequence's KV in order and have room for `start + len(ids)` tokens; the first `start` of
    them are there. `draw` asks for the token after the last of `ids`. `sequence` is a number that no other sequence of
    the engine has had.
    """

    ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    draw: DrawAt | None
    sequence: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Executor(Protocol):
    def run(self, pieces: Sequence[Piece]) -> list[Draw | None]:
        """Computes one step, writes its KV and draws: one entry per piece, None where none was asked for.

        Raises EngineError if the step failed; then nothing is known of the KV of the sequences in it.
        """

    def close(self) -> None:
        """Lets go of the KV pool's memory and everything else. Idempotent."""
