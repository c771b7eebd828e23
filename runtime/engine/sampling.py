"""Drawing tokens from logits. A row's token depends on that row, its Sampling and its output index alone.

Rows with a temperature are drawn by the Gumbel-max rule: of the tokens that top-k and top-p leave, the one whose
logit / temperature plus its own noise is largest, the noise a function of (seed, output index, token). Another order
of summation (another batch, another instance after a failover) moves logits by about 1e-5; that changes the token
only where two sums are that close, while a walk along cumulated probabilities would change it wherever the point
falls beside one of the many small steps of the tail.

Greedy rows and log-probabilities are computed for all rows at once. Rows with a temperature go one by one:
the work is over the vocabulary, so a batch would save nothing, and one by one a row can't feel its
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtpd.runtime.engine.base import Sampling

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

_FIRST_GUESS = 64
_GROWTH = 8
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_NOISE_RANGE = 42.0  # above the largest difference of two noises drawn from 53 bits, 41.1


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token. `log_prob` is its log-probability under the model's own distribution (temperature 1,
    nothing cut off), None where the request did not ask for it."""

    token: int
    log_prob: float | None


def draw(logits: Logits, samplings: Sequence[Sampling], indexes: Sequence[int]) -> list[Draw]:
    """One token per row of `logits [rows, vocabulary]`, at output index `indexes[row]`. Does not change
    `logits`."""
    tokens = logits.argmax(axis=1)
    for row, (sampling, index) in enumerate(zip(samplings, indexes, strict=True)):
        if sampling.temperature > 0:
            tokens[row] = _draw_row(logits[row], sampling, index)
    log_probs: list[float | None] = [None] * len(samplings)
    asked = [row for row, sampling in enumerate(samplings) if sampling.log_probs]
    if asked:
        for row, value in zip(asked, log_softmax_at(logits[asked], tokens[asked]), strict=True):
            log_probs[row] = float(value)
    return [Draw(int(token), log_prob) for token, log_prob in zip(tokens, log_probs, strict=True)]


def uniform(seed: int, index: int, tokens: Ids) -> Floats:
    """Numbers in (0, 1), one per token, that depend on (seed, output index, token) alone: the finaliser of the
    SplitMix64 generator over a state set by the three."""
    words = tokens.astype(np.uint64)
    words = mix(words ^ np.uint64(_mixed(index)))
    words = mix(words ^ np.uint64(_mixed(seed)))
    points: Floats = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return points


def _mixed(value: int) -> int:
    return int(mix(np.array([value & (2**64 - 1)], np.uint64))[0])


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A well-mixed word for each word: SplitMix64's step. Arithmetic is modulo 2**64, as uint64 arrays do it."""
    words = words + _STRIDE
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def log_softmax_at(logits: Logits, tokens: Ids) -> Floats:
    """log softmax of each row at that row's token, in double precision."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    log_probs: Floats = rows[np.arange(len(rows)), tokens] - np.log(np.exp(rows).sum(axis=1))
    return log_probs


def _draw_row(logits: Logits, sampling: Sampling, index: int) -> int:
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature leaves the likeliest token alone
        scores = (logits.astype(np.float64) - float(logits.max())) / sampling.temperature
        candidates = _candidates(np.exp(scores), sampling)
    if candidates is None:
        candidates = np.flatnonzero(scores > -_NOISE_RANGE)
    candidates = np.sort(candidates)
    noise = -np.log(-np.log(uniform(sampling.seed, index, candidates)))
    return int(candidates[np.argmax(scores[candidates] + noise)])


def _candidates(weights: Floats, sampling: Sampling) -> Ids | None:
    """Tokens that top-k and then top-p leave, likeliest first; None when they leave all."""
    limit = len(weights) if sampling.top_k == 0 else min(sampling.top_k, len(weights))
    if sampling.top_p >= 1.0:
        return None if limit == len(weights) else _likeliest(weights, limit)
    if limit < len(weights):
        kept = _likeliest(weights, limit)
        return kept[: _nucleus(weights[kept], sampling.top_p * weights[kept].sum())]
    wanted = sampling.top_p * weights.sum()
    count = min(_FIRST_GUESS, len(weights))
    while True:
        kept = _likeliest(weights, count)
        if count == len(weights) or weights[kept].sum() >= wanted:
            return kept[: _nucleus(weights[kept], wanted)]
        count = min(count * _GROWTH, len(weights))


def _nucleus(descending: Floats, wanted: float) -> int:
    """How many of the likeliest reach the `wanted` mass; at least one."""
    return min(int(np.searchsorted(np.cumsum(descending), wanted, side="left")) + 1, len(descending))


def _likeliest(weights: Floats, count: int) -> Ids:
    """The `count` likeliest tokens, likeliest first, of equals the lower id first."""
    if count < len(weights):
        threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
        ids = np.flatnonzero(weights >= threshold)
    else:
        ids = np.arange(len(weights))
    likeliest: Ids = ids[np.argsort(-weights[ids], kind="stable")[:count]]
    return likeliest
