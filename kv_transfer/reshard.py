"""Who sends which layers and heads to whom, when two groups split one model differently. Pure.

Every rank of the sink's group gets each (layer, head) it holds from exactly one rank of the source's. Where a
head has several holders (tp > kv_heads), those who want it are spread evenly over them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtpd.errors import LayoutError
from trtpd.kv_transfer.layout import CONVERTIBLE, KVLayout


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank of a source has for one rank of a sink: these layers of these heads, counted as the model
    counts them."""

    tp_rank: int
    pp_rank: int
    layers: range
    heads: range


def slices_for(source: KVLayout, sink: KVLayout, tp_rank: int, pp_rank: int) -> tuple[Slice, ...]:
    """What rank (tp_rank, pp_rank) of a group laid out as `sink` takes from which ranks of `source`.

    Both have the same layers and heads (`check_convertible`). Together the slices are all that the rank holds,
    without overlap.
    """
    return tuple(
        Slice(tp, pp, layers, heads)
        for pp, layers in _stages(source, sink.rank_layers(pp_rank))
        for tp, heads in _senders(source, sink, tp_rank)
    )


def _stages(source: KVLayout, wanted: range) -> list[tuple[int, range]]:
    """(pp rank, layers) of the source's stages that hold any of the layers wanted."""
    stages = []
    for pp_rank in range(source.pp):
        held = source.rank_layers(pp_rank)
        layers = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
        if layers:
            stages.append((pp_rank, layers))
    return stages


def _senders(source: KVLayout, sink: KVLayout, tp_rank: int) -> list[tuple[int, range]]:
    """(tp rank, heads) of the source's ranks that send; heads that lie side by side with one sender go as one."""
    senders: list[tuple[int, range]] = []
    for head in sink.rank_heads(tp_rank):
        sender = _sender(source, sink, tp_rank, head)
        if senders and senders[-1][0] == sender:
            senders[-1] = (sender, range(senders[-1][1].start, head + 1))
        else:
            senders.append((sender, range(head, head + 1)))
    return senders


def _sender(source: KVLayout, sink: KVLayout, tp_rank: int, head: int) -> int:
    """The n-th of those who want a head goes to the holder as far along among the holders."""
    holders, wanting = holders_of(source, head), holders_of(sink, head)
    return holders[wanting.index(tp_rank) * len(holders) // len(wanting)]


def holders_of(layout: KVLayout, head: int) -> list[int]:
    """The tp ranks that hold a head: one, or several where there are more ranks than heads."""
    return [rank for rank in range(layout.tp) if head in layout.rank_heads(rank)]


def check_convertible(source: KVLayout, sink: KVLayout, *, who: str, convert_dtype: bool = False) -> None:
    """Whether KV of `source` can become KV of `sink`; TP and PP may differ. Raises LayoutError."""
    fields = ("num_layers", "kv_heads", "head_dim", "tokens_per_block")
    differing = [name for name in fields if getattr(source, name) != getattr(sink, name)]
    if source.dtype != sink.dtype and not (convert_dtype and {source.dtype, sink.dtype} == CONVERTIBLE):
        differing.append("dtype")
    if differing:
        pairs = ", ".join(f"{name} {getattr(source, name)} and {getattr(sink, name)}" for name in differing)
        raise LayoutError(
            f"{who} holds KV that can't become this engine's ({pairs}): build both roles from one pipeline file"
        )
