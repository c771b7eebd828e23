"""What changes logits before a token is drawn from them: penalties, biases, and tokens that may not come now.

All of it follows from a sequence's tokens. A failover gives those back as its prompt, so nothing else has to be
carried over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtpd.runtime.engine.base import Sampling

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

_GROWTH = 256


class History:
    """The tokens of one sequence. `ids` is its live list, of which the first `prompt_tokens` are the user's."""

    __slots__ = ("_counted", "_counts", "_distinct", "_ignored", "_slots", "_tokens", "ids")

    def __init__(self, ids: Sequence[int], *, prompt_tokens: int, sampling: Sampling) -> None:
        self.ids = ids
        self._ignored = min(prompt_tokens, sampling.prompt_ignore_length)
        self._counted = self._distinct = 0
        self._slots: dict[int, int] = {}
        self._tokens: Ids = np.empty(0, np.intp)
        self._counts: Ids = np.empty(0, np.intp)

    def counts(self) -> tuple[Ids, Ids]:
        """The distinct tokens so far, and how often each came outside of what is ignored of the prompt. Views, valid
        until the next call."""
        for position in range(self._counted, len(self.ids)):
            token = self.ids[position]
            slot = self._slots.setdefault(token, self._distinct)
            if slot == self._distinct:
                self._add(token)
            self._counts[slot] += position >= self._ignored
        self._counted = len(self.ids)
        return self._tokens[: self._distinct], self._counts[: self._distinct]

    def follows(self, start: tuple[int, ...]) -> bool:
        """Whether the sequence ends with `start`; every sequence ends with nothing."""
        return not start or tuple(self.ids[-len(start) :]) == start

    def _add(self, token: int) -> None:
        if self._distinct == len(self._tokens):
            more = np.zeros(max(_GROWTH, self._distinct), np.intp)
            self._tokens, self._counts = np.append(self._tokens, more), np.append(self._counts, more)
        self._tokens[self._distinct] = token
        self._distinct += 1


def changes(sampling: Sampling, index: int) -> bool:
    """Whether `adjust` would change anything at output index `index`."""
    ends_barred = bool(sampling.end_ids) and index < sampling.min_tokens
    return sampling.penalises or ends_barred or bool(sampling.logit_bias or sampling.bad_words)


def adjust(logits: Logits, samplings: Sequence[Sampling], indexes: Sequence[int], histories: Sequence[History]) -> None:
    """Changes `logits [rows, vocabulary]` in place, each row by its own request alone. What may not come is -inf."""
    _penalise(logits, samplings, histories)
    for row, sampling in enumerate(samplings):
        if sampling.logit_bias:
            tokens, values = zip(*sampling.logit_bias, strict=True)
            np.add.at(logits[row], np.array(tokens, np.intp), np.array(values, np.float32))
    barred = [
        (row, token)
        for row, (sampling, index, history) in enumerate(zip(samplings, indexes, histories, strict=True))
        for token in _barred(sampling, index, history)
    ]
    if barred:
        rows, tokens_barred = np.array(barred, np.intp).T
        logits[rows, tokens_barred] = -np.inf


def _penalise(logits: Logits, samplings: Sequence[Sampling], histories: Sequence[History]) -> None:
    rows = [row for row, sampling in enumerate(samplings) if sampling.penalises]
    if not rows:
        return
    found = [histories[row].counts() for row in rows]
    lengths = [len(tokens) for tokens, _ in found]
    at = np.repeat(np.array(rows, np.intp), lengths), np.concatenate([tokens for tokens, _ in found])
    counts = np.concatenate([counts for _, counts in found]).astype(np.float32)
    repetition, presence, frequency = (
        np.repeat(np.array([getattr(samplings[row], name) for row in rows], np.float32), lengths)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    values = logits[at]
    values = np.where(values > 0, values / repetition, values * repetition)
    logits[at] = values - presence * (counts > 0) - frequency * counts


def _barred(sampling: Sampling, index: int, history: History) -> list[int]:
    barred = list(sampling.end_ids) if index < sampling.min_tokens else []
    return barred + [word[-1] for word in sampling.bad_words if history.follows(word[:-1])]
