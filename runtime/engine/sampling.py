"""Drawing tokens from logits. A row's token depends on that row, its Sampling and its output index alone.

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
            tokens[row] = _draw_row(logits[row], sampling, uniform(sampling.seed, index))
    log_probs: list[float | None] = [None] * len(samplings)
    asked = [row for row, sampling in enumerate(samplings) if sampling.log_probs]
    if asked:
        for row, value in zip(asked, log_softmax_at(logits[asked], tokens[asked]), strict=True):
            log_probs[row] = float(value)
    return [Draw(int(token), log_prob) for token, log_prob in zip(tokens, log_probs, strict=True)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, output index) alone: one Philox block, keyed by the seed,
    with the index as its counter."""
    word = np.random.Philox(key=seed & (2**128 - 1), counter=index).random_raw()
    return float(int(word) >> 11) * 2.0**-53


def log_softmax_at(logits: Logits, tokens: Ids) -> Floats:
    """log softmax of each row at that row's token, in double precision."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    log_probs: Floats = rows[np.arange(len(rows)), tokens] - np.log(np.exp(rows).sum(axis=1))
    return log_probs


def _draw_row(logits: Logits, sampling: Sampling, point: float) -> int:
    distance = logits.astype(np.float64)
    distance -= distance.max()
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature leaves the likeliest token alone
        weights = np.exp(distance / sampling.temperature)
    candidates = _candidates(weights, sampling)
    if candidates is None:
        return _pick(weights, point)
    return int(candidates[_pick(weights[candidates], point)])


def _pick(weights: Floats, point: float) -> int:
    """The index at which the running sum passes `point` of the whole; never one of weight 0."""
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, min(point * sums[-1], np.nextafter(sums[-1], 0.0)), side="right"))


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
