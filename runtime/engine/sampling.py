"""Drawing tokens from logits. A row's token depends on that row, its Sampling, its output index and its tokens so far.

Rows with a temperature are drawn by the Gumbel-max rule: of the tokens that top-k, top-p and min-p leave, the one whose
logit / temperature plus its own noise is largest, the noise a function of (seed, output index, token). Another order
of summation (another batch, another instance after a failover) moves logits by about 1e-5; that changes the token
only where two sums are that close, while a walk along cumulated probabilities would change it wherever the point
falls beside one of the many small steps of the tail.

All rows go together: scores over the whole vocabulary as one array, then the few tokens that are left of each row
end to end. No operation mixes rows, so a row can't feel its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.penalties import History, Ids, Logits, adjust, changes

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

_FIRST_GUESS = 64
_GROWTH = 8
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_NOISE_RANGE = 42.0  # above the largest difference of two noises drawn from 53 bits, 41.1

TopLogProbs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token. `log_prob` is its log-probability under the model's own distribution (temperature 1, nothing
    changed or cut off), None where the request did not ask for it; `top` are the likeliest tokens with theirs, as
    many as it asked for."""

    token: int
    log_prob: float | None
    top: TopLogProbs = ()


def draw(
    logits: Logits,
    samplings: Sequence[Sampling],
    indexes: Sequence[int],
    histories: Sequence[History | None] | None = None,
) -> list[Draw]:
    """One token per row of `logits [rows, vocabulary]`, at output index `indexes[row]`. Does not change `logits`.

    `histories` may be left out, or None for a row, where `needs_history` says so.
    """
    changed = [row for row, sampling in enumerate(samplings) if changes(sampling, indexes[row])]
    own = logits
    if changed:
        own = logits.copy()
        known = [_known(samplings[row], None if histories is None else histories[row]) for row in changed]
        rows = logits[changed]
        adjust(rows, [samplings[row] for row in changed], [indexes[row] for row in changed], known)
        own[changed] = rows
    tokens = own.argmax(axis=1)
    warm = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if warm:
        tokens[warm] = _sample(own[warm], [samplings[row] for row in warm], [indexes[row] for row in warm])
    log_probs = _log_probs(logits, samplings, tokens)
    return [Draw(int(token), *told) for token, told in zip(tokens, log_probs, strict=True)]


def needs_history(sampling: Sampling) -> bool:
    """Whether a draw depends on the tokens so far."""
    return sampling.penalises or bool(sampling.bad_words)


_NO_TOKENS = History((), prompt_tokens=0, sampling=Sampling())


def _known(sampling: Sampling, history: History | None) -> History:
    assert history is not None or not needs_history(sampling), "who asks for this gives the tokens so far"
    return _NO_TOKENS if history is None else history


def uniform(seed: int, index: int, tokens: Ids) -> Floats:
    """Numbers in (0, 1), one per token, that depend on (seed, output index, token) alone: the finaliser of the
    SplitMix64 generator over a state set by the three."""
    return _uniform(_words([seed]), _words([index]), tokens)


def _uniform(seeds: Words, indexes: Words, tokens: Ids) -> Floats:
    """`uniform` for tokens of several requests; seeds and indexes come mixed."""
    words = mix(mix(tokens.astype(np.uint64) ^ indexes) ^ seeds)
    points: Floats = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return points


def _words(values: Sequence[int]) -> Words:
    return mix(np.array([value & (2**64 - 1) for value in values], np.uint64))


def mix(words: Words) -> Words:
    """A well-mixed word for each word: SplitMix64's step. Arithmetic is modulo 2**64, as uint64 arrays do it."""
    words = words + _STRIDE
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def log_softmax_at(logits: Logits, tokens: Ids) -> Floats:
    """log softmax of each row at that row's token, in double precision."""
    rows = np.arange(len(logits))
    log_probs: Floats = logits[rows, tokens].astype(np.float64) - _log_sums(logits)
    return log_probs


def _log_sums(logits: Logits) -> Floats:
    rows = logits.astype(np.float64)
    top = rows.max(axis=1)
    rows -= top[:, None]
    sums: Floats = top + np.log(np.exp(rows, out=rows).sum(axis=1))
    return sums


def _log_probs(logits: Logits, samplings: Sequence[Sampling], tokens: Ids) -> list[tuple[float | None, TopLogProbs]]:
    told: list[tuple[float | None, TopLogProbs]] = [(None, ())] * len(samplings)
    asked = [row for row, sampling in enumerate(samplings) if sampling.log_probs or sampling.top_log_probs]
    sums = _log_sums(logits[asked]) if asked else ()
    for row, log_sum in zip(asked, sums, strict=True):
        own = float(logits[row, tokens[row]] - log_sum) if samplings[row].log_probs else None
        count = min(samplings[row].top_log_probs, logits.shape[1])
        top = _largest(logits[row], count) if count else ()
        told[row] = own, tuple((int(token), float(logits[row, token] - log_sum)) for token in top)
    return told


def _sample(logits: Logits, samplings: Sequence[Sampling], indexes: Sequence[int]) -> list[int]:
    """A token per row; every row has a temperature. `logits` may be -inf, but in no row all of them."""
    temperatures = np.array([sampling.temperature for sampling in samplings])
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest token alone
        scores = (logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / temperatures[:, None]
    left = [_left(row, sampling) for row, sampling in zip(scores, samplings, strict=True)]
    lengths = [len(tokens) for tokens in left]
    tokens = np.concatenate(left)
    seeds = np.repeat(_words([sampling.seed for sampling in samplings]), lengths)
    noise = -np.log(-np.log(_uniform(seeds, np.repeat(_words(indexes), lengths), tokens)))
    sums = scores[np.repeat(np.arange(len(left)), lengths), tokens] + noise
    ends = np.cumsum(lengths)
    return [int(tokens[e - n + sums[e - n : e].argmax()]) for n, e in zip(lengths, ends.tolist(), strict=True)]


def _left(scores: Floats, sampling: Sampling) -> Ids:
    """Tokens that top-k, then top-p, then min-p leave and that noise could make the largest, in ascending order."""
    floor = -_NOISE_RANGE if sampling.min_p == 0.0 else max(-_NOISE_RANGE, math.log(sampling.min_p))
    limit = len(scores) if sampling.top_k == 0 else min(sampling.top_k, len(scores))
    if sampling.top_p < 1.0:
        kept = _nucleus(scores, limit, sampling.top_p)
    elif limit < len(scores):
        kept = _largest(scores, limit)
    else:
        return np.flatnonzero(scores >= floor)
    return np.sort(kept[scores[kept] >= floor])


def _nucleus(scores: Floats, limit: int, top_p: float) -> Ids:
    """Of the `limit` likeliest, as few of the likeliest as reach `top_p` of their mass; at least one."""
    with np.errstate(under="ignore"):
        whole = None if limit < len(scores) else float(np.exp(scores).sum())
        count = min(_FIRST_GUESS, limit) if whole is not None else limit
        while True:
            kept = _largest(scores, count)
            mass = np.cumsum(np.exp(scores[kept]))
            wanted = top_p * (mass[-1] if whole is None else whole)
            if count == limit or mass[-1] >= wanted:
                reached = int(np.searchsorted(mass, wanted, side="left")) + 1
                return kept[: min(reached, count)]
            count = min(count * _GROWTH, limit)


def _largest(values: npt.NDArray[np.float32] | Floats, count: int) -> Ids:
    """Where the `count` largest are, largest first, of equals the lower index first."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= threshold)
    else:
        ids = np.arange(len(values))
    largest: Ids = ids[np.argsort(-values[ids], kind="stable")[:count]]
    return largest
