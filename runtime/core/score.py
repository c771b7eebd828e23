"""The terms of the placement score and their weights. Lower is better; a score reads as seconds of regret."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trtpd.errors import InputError
from trtpd.runtime.core.cluster import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Published weights, each in seconds.

    ttft_s: per second of predicted time to the first token · kv_s: a decode pool that would be full, falling
    off with the square of its use · batch_s: a batch that would be full · fallback_s: an instance doing the
    other role's work beside its own · transfer_s: per second that KV takes over the link between a pair's GPUs, where
    that link is known (see distance.py).
    """

    ttft_s: float = 1.0
    kv_s: float = 0.5
    batch_s: float = 0.25
    fallback_s: float = 0.5
    transfer_s: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 0.0:
                raise InputError(f"scheduler weight {item.name} is {getattr(self, item.name)}; it must be at least 0")


def first_token_s(instance: Instance, tokens: int) -> float:
    """Predicted seconds until `tokens` more prompt tokens are computed there, those queued before
    included."""
    return (instance.queued_tokens + tokens) / instance.hello.prefill_tokens_per_s


def kv_use(instance: Instance, blocks: int) -> float:
    """The part of the pool that is promised once `blocks` more are."""
    return (instance.committed_blocks + blocks) / instance.hello.kv_blocks


def batch_use(instance: Instance) -> float:
    """The part of the batch that is taken once one more sequence joins; above 1 sequences wait for each
    other."""
    return (instance.placed + 1) / instance.hello.max_batch


def prefill_score(instance: Instance, tokens: int, weights: Weights) -> float:
    return weights.ttft_s * first_token_s(instance, tokens)


def decode_score(instance: Instance, blocks: int, weights: Weights) -> float:
    return weights.kv_s * kv_use(instance, blocks) ** 2 + weights.batch_s * batch_use(instance)
