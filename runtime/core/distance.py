"""How far apart two instances are, by what their Hellos say of their GPUs. Pure."""

from __future__ import annotations

from trtpd.runtime.core.events import Hello

LINK_BYTES_PER_S = {
    "self": 1000e9, "nvlink": 200e9, "switch": 20e9, "bridge": 16e9, "node": 10e9, "system": 8e9, "network": 12e9,
}  # fmt: skip
"""What one GPU about moves over each kind of link: published link speeds, rounded down. They order pairs; measured
times of a pair's transfers say more."""

_NEAREST_FIRST = ("self", "nvlink", "switch", "bridge", "node", "system", "network")


def link_between(source: Hello, sink: Hello) -> str | None:
    """The worst link that KV from `source` to `sink` crosses, a key of LINK_BYTES_PER_S; None if it isn't known."""
    if not source.gpus or not sink.gpus:
        return None
    if source.host != sink.host:
        return "network"
    words = dict(source.gpu_links)
    crossed = [words.get(gpu) for gpu in sink.gpus]
    known = [word for word in crossed if word in _NEAREST_FIRST]
    return max(known, key=_NEAREST_FIRST.index) if len(known) == len(crossed) else None


def transfer_s(source: Hello, sink: Hello, tokens: int) -> float:
    """About how long KV of so many tokens takes between two instances on GPUs; 0.0 where nothing is known."""
    link = link_between(source, sink)
    if link is None:
        return 0.0
    lanes = min(len(source.gpus), len(sink.gpus))
    return tokens * source.bytes_per_token / (LINK_BYTES_PER_S[link] * lanes)
