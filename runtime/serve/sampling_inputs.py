"""How a client says how its tokens are to be drawn: tensors in, a Sampling out, words still as text. Pure.

Names and meanings are those of the TensorRT-LLM backend's ensemble: penalties count the prompt's tokens as well
(less the first `prompt_ignore_length`), and `top_k` 0 and `top_p` 0 stand for an input that was not given.
`logit_bias_ids`, `logit_bias_values`, `stop_token_ids` and `top_log_probs` are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from trtpd.errors import RequestError
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.sampling_limits import (
    BAD_WORDS_AT_MOST,
    BIASED_TOKENS_AT_MOST,
    TOP_LOG_PROBS_AT_MOST,
    validate_sampling,
)
from trtpd.runtime.serve.inputs import Inputs
from trtpd.runtime.serve.text import TextLayer

SAMPLING_INPUTS = (
    "end_id",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "random_seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prompt_ignore_length",
    "min_tokens",
    "min_length",
    "bad_words",
    "embedding_bias_words",
    "embedding_bias_weights",
    "logit_bias_ids",
    "logit_bias_values",
    "return_log_probs",
    "top_log_probs",
)
WORD_CHARS_AT_MOST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Texts that mean tokens: none of `barred` may come, and each of `biased` is made likelier by its number."""

    barred: tuple[str, ...] = ()
    biased: tuple[tuple[str, float], ...] = ()


def sampling_of(inputs: Inputs, *, end_ids: tuple[int, ...], vocab_size: int, drawn_seed: int) -> Sampling:
    """Without temperature, top_k and top_p (or with 0 for "not given") decoding is greedy; with a temperature above 0
    alone it samples over the whole vocabulary. `end_ids` and `drawn_seed` are used where the client gives none.
    Raises RequestError naming the inputs at fault."""
    temperature, top_p = inputs.number("temperature"), inputs.number("top_p") or None
    top_k = inputs.integer("top_k", low=0, high=1 << 31) or None
    sampled = (temperature, top_k, top_p) != (None, None, None) and top_k != 1
    sampling = Sampling(
        temperature=(1.0 if temperature is None else temperature) if sampled else 0.0,
        top_k=top_k or 0 if sampled else 0,
        top_p=1.0 if top_p is None else top_p,
        min_p=inputs.number("min_p") or 0.0,
        seed=_or(inputs.either("seed", "random_seed"), drawn_seed),
        end_ids=_end_ids(inputs, end_ids, vocab_size),
        log_probs=inputs.flag("return_log_probs"),
        top_log_probs=_or(inputs.integer("top_log_probs", low=0, high=TOP_LOG_PROBS_AT_MOST), 0),
        repetition_penalty=_penalty(inputs, "repetition_penalty", 1.0),
        presence_penalty=_penalty(inputs, "presence_penalty", 0.0),
        frequency_penalty=_penalty(inputs, "frequency_penalty", 0.0),
        prompt_ignore_length=_or(inputs.integer("prompt_ignore_length", low=0, high=1 << 31), 0),
        logit_bias=_bias_of_ids(inputs),
        min_tokens=_or(inputs.either("min_tokens", "min_length", low=0, high=1 << 31), 0),
    )
    faults = validate_sampling(sampling, vocab_size=vocab_size)
    if temperature is not None and not 0.0 <= temperature <= 100.0 and not sampled:
        faults = [f"temperature is {temperature}; it must lie between 0 (greedy) and 100", *faults]
    if faults:
        raise RequestError("; ".join(faults))
    return sampling


def words_of(inputs: Inputs) -> Words:
    """Raises RequestError naming the input at fault."""
    barred = tuple(word for word in inputs.texts("bad_words") if word)
    biased = [word for word in inputs.texts("embedding_bias_words") if word]
    weights = inputs.numbers("embedding_bias_weights")
    if biased and len(weights) != len(biased):
        raise RequestError(
            f"embedding_bias_words holds {len(biased)} words and embedding_bias_weights {len(weights)} numbers; "
            "send one number for each word"
        )
    for name, words, most in (
        ("bad_words", barred, BAD_WORDS_AT_MOST),
        ("embedding_bias_words", biased, BIASED_TOKENS_AT_MOST),
    ):
        if len(words) > most:
            raise RequestError(f"{name} holds {len(words)} words; at most {most} are taken")
        if max(map(len, words), default=0) > WORD_CHARS_AT_MOST:
            raise RequestError(f"{name} holds a word of more than {WORD_CHARS_AT_MOST} characters; shorten it")
    return Words(barred=barred, biased=tuple(zip(biased, weights, strict=False)))


def with_words(sampling: Sampling, words: Words, text: TextLayer, *, vocab_size: int) -> Sampling:
    """The words as their tokens. A biased word of several tokens biases each of them. Raises RequestError."""
    if words == Words():
        return sampling
    bias: dict[int, float] = dict(sampling.logit_bias)
    for word, weight in words.biased:
        for token in text.encode_word(word):
            bias[token] = bias.get(token, 0.0) + weight
    barred = tuple(ids for word in words.barred if (ids := text.encode_word(word)))
    found = replace(sampling, logit_bias=tuple(bias.items()), bad_words=barred)
    if faults := validate_sampling(found, vocab_size=vocab_size):
        raise RequestError("; ".join(faults))
    return found


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _penalty(inputs: Inputs, name: str, nothing: float) -> float:
    value = inputs.number(name)
    return nothing if value is None else value


def _bias_of_ids(inputs: Inputs) -> tuple[tuple[int, float], ...]:
    ids, values = inputs.integers("logit_bias_ids"), inputs.numbers("logit_bias_values")
    if len(ids) != len(values):
        raise RequestError(
            f"logit_bias_ids holds {len(ids)} token ids and logit_bias_values {len(values)} numbers; "
            "send one number for each"
        )
    if len(set(ids)) < len(ids):
        raise RequestError("logit_bias_ids names a token twice; send one number for each token")
    return tuple(zip(ids, values, strict=True))


def _end_ids(inputs: Inputs, default: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """`end_id` takes the place of the model's own; -1 asks for an answer that nothing but max_tokens and what stops it
    ends. `stop_token_ids` are further ones."""
    end_id = inputs.integer("end_id", low=-1, high=vocab_size - 1)
    known = tuple(token for token in default if token < vocab_size)  # what can't be drawn needs no looking out for
    own = known if end_id is None else () if end_id == -1 else (end_id,)
    return tuple(dict.fromkeys([*own, *inputs.integers("stop_token_ids")]))
