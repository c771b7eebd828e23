"""What of a model each tensor-parallel rank computes and holds. Pure.

Attention is split by heads: a rank has the KV heads its layout gives it and the query heads that read them.
Where ranks outnumber the KV heads a head is held by several ranks, which then share out its query heads. The
MLP is split over its inner dimension and the vocabulary over the head's rows; embedding and norms, those of queries
and keys included (one per head dimension, the same for every head), are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from trtpd.build.manifest import Architecture
from trtpd.build.shapes import HEAD
from trtpd.errors import LayoutError
from trtpd.kv_transfer.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The ranges one rank has. `rank` 0 of a `tp` of 1 has everything."""

    rank: int
    tp: int
    query_heads: range
    kv_heads: range
    inner: range
    vocabulary: range


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a matrix: these rows, or these columns. Of a bias: its values for these rows."""

    axis: Literal[0, 1]
    part: range

    def of(self, matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
        where = slice(self.part.start, self.part.stop)
        return matrix[where] if self.axis == 0 else matrix[:, where]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.part), *whole[1:]) if self.axis == 0 else (whole[0], len(self.part))


def shard_of(architecture: Architecture, layout: KVLayout, rank: int) -> Shard:
    """Raises LayoutError if there are more ranks than query heads."""
    heads, kv_heads, tp = architecture.num_attention_heads, architecture.num_key_value_heads, layout.tp
    if tp > heads:
        raise LayoutError(f"tp is {tp}, but the model has {heads} attention heads to share out; set it to at most that")
    held = layout.rank_heads(rank)
    group = heads // kv_heads
    queries = range(held.start * group, held.stop * group)
    holders = [other for other in range(tp) if layout.rank_heads(other) == held]
    if len(holders) > 1:
        queries = even_part(queries, len(holders), holders.index(rank))
    return Shard(
        rank=rank,
        tp=tp,
        query_heads=queries,
        kv_heads=held,
        inner=even_part(range(architecture.intermediate_size), tp, rank),
        vocabulary=even_part(range(architecture.vocab_size), tp, rank),
    )


def even_part(whole: range, parts: int, part: int) -> range:
    """One of `parts` neighbouring ranges as equal as can be, the first ones larger."""
    small, extra = divmod(len(whole), parts)
    start = whole.start + part * small + min(part, extra)
    return range(start, start + small + (1 if part < extra else 0))


def cut_of(name: str, head_dim: int, shard: Shard) -> Cut | None:
    """How the matrix or bias of that Hugging Face name is cut for a rank; None for what every rank has whole."""
    queries, kv = _scaled(shard.query_heads, head_dim), _scaled(shard.kv_heads, head_dim)
    cuts = {
        "q_proj": Cut(0, queries),
        "k_proj": Cut(0, kv),
        "v_proj": Cut(0, kv),
        "o_proj": Cut(1, queries),
        "gate_proj": Cut(0, shard.inner),
        "up_proj": Cut(0, shard.inner),
        "down_proj": Cut(1, shard.inner),
    }
    if name == HEAD:
        return Cut(0, shard.vocabulary)
    return cuts.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2])


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
