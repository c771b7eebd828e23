"""How a token is to be drawn, one token at a time in plain Python, sharing nothing with the engine's sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trtpd.runtime.engine.base import Sampling

WORD = (1 << 64) - 1


def reference_token(
    row: Sequence[float], sampling: Sampling, index: int, ids: Sequence[int], prompt_tokens: int
) -> int:
    """The token after `ids`, of which `prompt_tokens` are the user's."""
    logits = [adjusted(value, token, sampling, index, ids, prompt_tokens) for token, value in enumerate(row)]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.temperature == 0.0:
        return ranked[0]
    scores = [(value - logits[ranked[0]]) / sampling.temperature for value in logits]
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1.0:
        ranked = nucleus(ranked, scores, sampling.top_p)
    if sampling.min_p:
        ranked = [token for token in ranked if scores[token] >= math.log(sampling.min_p)]
    return max(sorted(ranked), key=lambda token: scores[token] + noise(sampling.seed, index, token))


def adjusted(value: float, token: int, sampling: Sampling, index: int, ids: Sequence[int], prompt_tokens: int) -> float:
    if any(word[-1] == token and ends_with(ids, word[:-1]) for word in sampling.bad_words):
        return -math.inf
    if token in sampling.end_ids and index < sampling.min_tokens:
        return -math.inf
    logit = np.float32(value)
    if token in ids:
        repetition = np.float32(sampling.repetition_penalty)
        logit = logit / repetition if logit > 0 else logit * repetition
    counted = list(ids[min(sampling.prompt_ignore_length, prompt_tokens) :])
    if token in counted:
        logit = logit - np.float32(sampling.presence_penalty)
        logit = logit - np.float32(sampling.frequency_penalty) * np.float32(counted.count(token))
    for biased, bias in sampling.logit_bias:
        if biased == token:
            logit = logit + np.float32(bias)
    return float(logit)


def ends_with(ids: Sequence[int], start: tuple[int, ...]) -> bool:
    return list(ids[len(ids) - len(start) :]) == list(start) and len(ids) >= len(start)


def nucleus(ranked: list[int], scores: list[float], top_p: float) -> list[int]:
    weights = [float(np.exp(scores[token])) for token in ranked]
    wanted, mass = top_p * sum(weights), 0.0
    for count, weight in enumerate(weights, start=1):
        mass += weight
        if mass >= wanted:
            return ranked[:count]
    return ranked


def noise(seed: int, index: int, token: int) -> float:
    word = mixed(mixed(token ^ mixed(index & WORD)) ^ mixed(seed & WORD))
    return -math.log(-math.log(((word >> 11) + 0.5) * 2.0**-53))


def mixed(word: int) -> int:
    """SplitMix64 with Python's whole numbers."""
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)
