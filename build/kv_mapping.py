"""Who sends which KV to whom inside TensorRT-LLM: its peer selection, replayed. Pure.

Ranks count as pp * tp_size + tp. A rank of the receiver asks the senders that its TP rank maps to, in every
pipeline stage whose layers overlap its own. Where the sender holds each head on more ranks than the receiver does,
only the first of so many neighbours sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One instance of a pair."""

    layers: int
    kv_heads: int
    tp: int
    pp: int = 1

    def rank_layers(self, pp_rank: int) -> range:
        small, extra = divmod(self.layers, self.pp)
        start = pp_rank * small + min(pp_rank, extra)
        return range(start, start + small + (1 if pp_rank < extra else 0))

    def rank_heads(self, tp_rank: int) -> range:
        if self.tp > self.kv_heads:
            head = tp_rank * self.kv_heads // self.tp
            return range(head, head + 1)
        each = self.kv_heads // self.tp
        return range(tp_rank * each, (tp_rank + 1) * each)

    @property
    def copies(self) -> int:
        """Heads over all ranks, those that several ranks hold counted as often."""
        return self.tp * len(self.rank_heads(0))


def tp_peers(own_tp: int, peer_tp: int, tp_rank: int) -> range:
    """The peer's TP ranks that one of ours exchanges KV with; both sizes are powers of two."""
    if own_tp <= peer_tp:
        domain = peer_tp // own_tp
        return range(tp_rank * domain, (tp_rank + 1) * domain)
    first = tp_rank // (own_tp // peer_tp)
    return range(first, first + 1)


def _senders(source: Side, sink: Side, tp_rank: int) -> Iterator[int]:
    duplicates = max(1, source.copies // sink.copies)
    for slot, peer in enumerate(tp_peers(sink.tp, source.tp, tp_rank)):
        if slot % duplicates == 0:
            yield peer


def received(source: Side, sink: Side, *, tp_rank: int, pp_rank: int) -> Counter[tuple[int, int]]:
    """How often each (layer, head) of one receiving rank arrives."""
    wanted = {(layer, head) for layer in sink.rank_layers(pp_rank) for head in sink.rank_heads(tp_rank)}
    found: Counter[tuple[int, int]] = Counter(dict.fromkeys(wanted, 0))
    for stage in range(source.pp):
        for peer in _senders(source, sink, tp_rank):
            for layer in source.rank_layers(stage):
                for head in source.rank_heads(peer):
                    if (layer, head) in wanted:
                        found[layer, head] += 1
    return found


def mapping_fault(source: Side, sink: Side) -> str | None:
    """The first (layer, head) that doesn't arrive exactly once at a rank that needs it, None if all do."""
    for pp_rank in range(sink.pp):
        for tp_rank in range(sink.tp):
            for (layer, head), times in sorted(received(source, sink, tp_rank=tp_rank, pp_rank=pp_rank).items()):
                if times != 1:
                    return f"layer {layer}, KV head {head} reaches rank {pp_rank * sink.tp + tp_rank} {times} times"
    return None
