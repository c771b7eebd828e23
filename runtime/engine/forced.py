"""Logits of given texts: an engine is fed the tokens and asked for what it makes of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtpd.build.manifest import check_loadable, read_engine_config
from trtpd.errors import EngineError
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.openvino import load_part
from trtpd.runtime.engine.steps import Step

F32 = npt.NDArray[np.float32]
_DRAW = DrawAt(sampling=Sampling(), index=0)


def forced_logits(directory: Path, passages: Sequence[Sequence[int]], *, pool_name: str) -> F32:
    """A row of logits for each token but the last of each passage, in order. The passages are computed side by side, a
    token of each a step, as decoding does.

    Raises EngineError for an engine that isn't an openvino one of one rank, or has no room for all passages.
    """
    config = read_engine_config(directory)
    if config.engine != "openvino" or config.tp != 1:
        raise EngineError(
            f"{directory}: {config.engine} with tp {config.tp} can't be fed texts; give openvino with tp 1"
        )
    check_loadable(config)
    layout, profile = config.layout, config.profile
    needed = sum(layout.blocks_for(len(ids)) for ids in passages)
    if needed > profile.kv_blocks or len(passages) > profile.max_batch:
        raise EngineError(
            f"{directory}: {len(passages)} passages need {needed} KV blocks; it has {profile.kv_blocks}, and a batch "
            f"of {profile.max_batch}: give fewer"
        )
    starts = np.cumsum([0, *(len(ids) - 1 for ids in passages)])
    logits = np.empty((starts[-1], config.architecture.vocab_size), np.float32)
    loaded = load_part(config, directory, pool_name=pool_name, generation="forced")
    try:
        for at, pieces in _steps(passages, layout.tokens_per_block):
            rows = loaded.part.compute(Step([piece for _, piece in pieces], [0] * len(pieces)))
            for row, (passage, _) in zip(rows, pieces, strict=True):
                logits[starts[passage] + at] = row
    finally:
        loaded.part.close()
        loaded.pool.close()
    return logits


def _steps(passages: Sequence[Sequence[int]], block_tokens: int) -> Iterator[tuple[int, list[tuple[int, Piece]]]]:
    """(position, [(passage, its piece)]) for each step."""
    ends = np.cumsum([0, *(-(-len(ids) // block_tokens) for ids in passages)]).tolist()
    for at in range(max(len(ids) for ids in passages) - 1):
        yield (
            at,
            [
                (
                    number,
                    Piece(ids=ids[at : at + 1], start=at, blocks=range(ends[number], ends[number + 1]), draw=_DRAW),
                )
                for number, ids in enumerate(passages)
                if at < len(ids) - 1
            ],
        )
