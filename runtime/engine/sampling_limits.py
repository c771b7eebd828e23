"""What a Sampling may ask for: the ranges that requests are held to before an engine sees them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trtpd.runtime.engine.base import Sampling

TOP_LOG_PROBS_AT_MOST = 32
BIASED_TOKENS_AT_MOST = 1024
BAD_WORDS_AT_MOST = 256
BAD_WORD_TOKENS_AT_MOST = 64
END_IDS_AT_MOST = 256

_RANGES = {
    "temperature": (0.0, 100.0, "0 is greedy"),
    "min_p": (0.0, 1.0, "0 keeps all"),
    "presence_penalty": (-100.0, 100.0, "0 asks for nothing"),
    "frequency_penalty": (-100.0, 100.0, "0 asks for nothing"),
    "top_log_probs": (0, TOP_LOG_PROBS_AT_MOST, "0 asks for none"),
}


def validate_sampling(sampling: Sampling, *, vocab_size: int | None = None) -> list[str]:
    """What is wrong with it, one phrase each; empty if nothing is. Without `vocab_size` token ids are not looked
    at."""
    faults = [
        f"{name} is {value}; it must lie between {low} and {high} ({hint})"
        for name, (low, high, hint) in _RANGES.items()
        if not low <= (value := getattr(sampling, name)) <= high
    ]
    if sampling.top_k < 0:
        faults.append(f"top_k is {sampling.top_k}; it must be at least 0 (0 keeps all)")
    if not 0.0 < sampling.top_p <= 1.0:
        faults.append(f"top_p is {sampling.top_p}; it must lie above 0 and up to 1 (1 keeps all)")
    if not 0.0 < sampling.repetition_penalty <= 100.0:
        faults.append(
            f"repetition_penalty is {sampling.repetition_penalty}; "
            "it must lie above 0 and up to 100 (1 asks for nothing)"
        )
    for name in ("min_tokens", "prompt_ignore_length"):
        if getattr(sampling, name) < 0:
            faults.append(f"{name} is {getattr(sampling, name)}; it must be at least 0")
    faults += _size_faults(sampling)
    if vocab_size is not None and not faults:
        faults += _token_faults(sampling, vocab_size)
    return faults


def _size_faults(sampling: Sampling) -> Iterator[str]:
    limits = {
        "logit_bias": BIASED_TOKENS_AT_MOST,
        "bad_words": BAD_WORDS_AT_MOST,
        "end_ids": END_IDS_AT_MOST,
    }
    for name, most in limits.items():
        count = len(getattr(sampling, name))
        if count > most:
            yield f"{name} has {count} entries; at most {most} are taken"
    longest = max(map(len, sampling.bad_words), default=1)
    if longest > BAD_WORD_TOKENS_AT_MOST:
        yield f"bad_words has an entry of {longest} tokens; at most {BAD_WORD_TOKENS_AT_MOST} are taken"
    if () in sampling.bad_words:
        yield "bad_words has an entry without a token"
    if odd := next((bias for _, bias in sampling.logit_bias if not math.isfinite(bias)), None):
        yield f"logit_bias adds {odd}; it must be a finite number"


def _token_faults(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    named = {
        "end_ids": sampling.end_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "bad_words": [token for word in sampling.bad_words for token in word],
    }
    for name, tokens in named.items():
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            yield f"{name} names token id {wrong}, which is not in the vocabulary of {vocab_size}"
    barred = {word[-1] for word in sampling.bad_words} | set(sampling.end_ids)
    if len(barred) >= vocab_size:
        yield f"bad_words and end_ids together could leave none of the {vocab_size} tokens to draw"
