"""What a client asks of `pd`: tensors in, a checked request out. Pure; knows nothing of Triton.

Names, types and meanings are those of the TensorRT-LLM backend's ensemble. An input we can't honour is
refused by name unless its value changes nothing; an unknown one is refused with the nearest known name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from trtpd.errors import RequestError
from trtpd.runtime.engine.base import Sampling, validate_sampling
from trtpd.runtime.serve.text import Message, TextLayer, parse_messages

Tensor = npt.NDArray[Any]

MAX_DEADLINE_S = 24 * 3600.0
MAX_STOP_WORDS = 64
MAX_STOP_CHARS = 1024
MAX_PRIORITY = 8
MAX_TENANT_CHARS = 64

HONOURED = (
    "text_input",
    "messages",
    "query",
    "max_tokens",
    "stop_words",
    "end_id",
    "pad_id",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "random_seed",
    "stream",
    "return_log_probs",
    "exclude_input_in_output",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "ttft_ms",
    "tpot_ms",
    "deadline_ms",
    "priority",
    "tenant",
)
"""`pad_id` needs no more: nothing is padded."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (0.0, 1.0),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0, 1),
    "min_length": (0, 1),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "bad_words": ("",),
    "decoder_text_input": ("",),
    "embedding_bias_words": ("",),
    "embedding_bias_weights": (0.0,),
    "prompt_embedding_table": (0.0,),
    "prompt_vocab_size": (0,),
    "prompt_table_extra_id": (0,),
    "lora_task_id": (0,),
    "lora_weights": (),
    "lora_config": (),
    "guided_decoding_guide_type": ("",),
    "guided_decoding_guide": ("",),
}
"""Inputs not honoured yet, and the values of each that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What bounds a request before the router sees it. What follows `vocab_size` is used where the client
    names none: `end_ids`, the deadline and the targets."""

    max_seq_tokens: int
    vocab_size: int
    end_ids: tuple[int, ...]
    deadline_s: float = 120.0
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One generation request, values in range, not tokenised yet. `max_tokens` is at least 1.

    `priority` above 0 goes before other requests, below 0 after them and is shed first; `tenant` is who shares with
    whom.
    """

    prompt: str | tuple[Message, ...]
    max_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    stream: bool
    echo: bool
    log_probs: bool
    count_input: bool
    count_output: bool
    deadline_s: float
    ttft_s: float | None
    tpot_s: float | None
    priority: int
    tenant: str


def parse(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, object], limits: ModelLimits, *, drawn_seed: int
) -> Asked:
    """Raises RequestError naming the input at fault. `drawn_seed` is used where the client gives none."""
    inputs = _Inputs(tensors)
    _refuse_unknown(parameters)
    _refuse_unhonoured(inputs)
    stream = inputs.flag("stream")
    deadline_s = inputs.milliseconds("deadline_ms")
    return Asked(
        prompt=_prompt(inputs),
        max_tokens=_max_tokens(inputs, limits),
        stops=_stops(inputs),
        sampling=_sampling(inputs, limits, drawn_seed),
        stream=stream,
        # As the backend does it: without streaming a raw prompt comes back unless declined; with it, never.
        echo=not stream and "text_input" in tensors and not inputs.flag("exclude_input_in_output"),
        log_probs=inputs.flag("return_log_probs"),
        count_input=inputs.flag("return_num_input_tokens"),
        count_output=inputs.flag("return_num_output_tokens"),
        deadline_s=limits.deadline_s if deadline_s is None else deadline_s,
        ttft_s=_or(inputs.milliseconds("ttft_ms"), limits.ttft_s),
        tpot_s=_or(inputs.milliseconds("tpot_ms"), limits.tpot_s),
        priority=inputs.integer("priority", low=-MAX_PRIORITY, high=MAX_PRIORITY) or 0,
        tenant=_tenant(inputs),
    )


def _tenant(inputs: _Inputs) -> str:
    tenant = inputs.text("tenant") or ""
    if len(tenant) > MAX_TENANT_CHARS:
        raise RequestError(f"tenant has {len(tenant)} characters; at most {MAX_TENANT_CHARS} are taken")
    return tenant


def _or(given: float | None, default: float | None) -> float | None:
    return default if given is None else given


def query_of(tensors: Mapping[str, Tensor]) -> str | None:
    """The input `query` if the request is a question about the service and not for an answer."""
    query = _Inputs(tensors).text("query")
    if query is None:
        return None
    if query != "status":
        raise RequestError(f"query is {query!r}; the one known query is 'status'")
    return query


def tokenise(asked: Asked, text: TextLayer, limits: ModelLimits) -> tuple[int, ...]:
    """The prompt's ids. Raises RequestError if it is empty or can't fit; a prompt that can't fit whatever its
    tokens are is refused before it is tokenised."""
    if isinstance(asked.prompt, str):
        raw_bytes = len(asked.prompt.encode())
    else:
        raw_bytes = sum(len(message.content.encode()) for message in asked.prompt)
    check_size(raw_bytes, text, limits.max_seq_tokens)
    ids = text.encode(asked.prompt) if isinstance(asked.prompt, str) else text.encode_chat(asked.prompt)
    if not ids:
        raise RequestError("the prompt is empty: text_input gives no token")
    if len(ids) + asked.max_tokens > limits.max_seq_tokens:
        raise RequestError(
            f"the prompt has {len(ids):,} tokens and max_tokens is {asked.max_tokens:,}; together they must "
            f"not exceed {limits.max_seq_tokens:,}: shorten the prompt or lower max_tokens"
        )
    return ids


def check_size(raw_bytes: int, text: TextLayer, max_seq_tokens: int) -> None:
    """Raises RequestError for a prompt of so many bytes that it can't fit whatever its tokens are."""
    bound_bytes = max_seq_tokens * text.longest_token_bytes
    if raw_bytes > bound_bytes:
        raise RequestError(
            f"the prompt has {raw_bytes:,} bytes; {max_seq_tokens:,} tokens of context hold at most "
            f"{bound_bytes:,}: shorten it"
        )


def _prompt(inputs: _Inputs) -> str | tuple[Message, ...]:
    text, messages = inputs.text("text_input"), inputs.text("messages")
    if text is not None and messages is not None:
        raise RequestError("text_input and messages are both given; send one of them")
    if messages is not None:
        return parse_messages(messages)
    if text is None:
        raise RequestError("text_input is missing; send text_input (a raw prompt) or messages (a chat as JSON)")
    if not text:
        raise RequestError("text_input is empty; send a prompt of at least one character")
    return text


def _max_tokens(inputs: _Inputs, limits: ModelLimits) -> int:
    value = inputs.integer("max_tokens", low=1, high=limits.max_seq_tokens - 1)
    if value is None:
        raise RequestError(
            f"max_tokens is missing; say how many tokens to generate at most (1 to {limits.max_seq_tokens - 1:,})"
        )
    return value


def _stops(inputs: _Inputs) -> tuple[str, ...]:
    stops = tuple(stop for stop in inputs.texts("stop_words") if stop)
    if len(stops) > MAX_STOP_WORDS:
        raise RequestError(f"stop_words holds {len(stops)} strings; at most {MAX_STOP_WORDS} are taken")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError(f"stop_words holds a string of {longest} characters; at most {MAX_STOP_CHARS} are taken")
    return stops


def _sampling(inputs: _Inputs, limits: ModelLimits, drawn_seed: int) -> Sampling:
    """As the backend does: without temperature, top_k and top_p (or with 0 for "unset") decoding is greedy.

    Only temperature above 0 given: samples over the whole vocabulary.
    """
    temperature, top_p = inputs.number("temperature"), inputs.number("top_p") or None
    top_k = inputs.integer("top_k", low=0, high=1 << 31) or None
    sampled = (temperature, top_k, top_p) != (None, None, None) and top_k != 1
    sampling = Sampling(
        temperature=(1.0 if temperature is None else temperature) if sampled else 0.0,
        top_k=top_k or 0 if sampled else 0,
        top_p=1.0 if top_p is None else top_p,
        seed=_seed(inputs, drawn_seed),
        end_ids=_end_ids(inputs, limits),
        log_probs=inputs.flag("return_log_probs"),
    )
    faults = validate_sampling(sampling)
    if temperature is not None and not 0.0 <= temperature <= 100.0 and not sampled:
        faults = [f"temperature is {temperature}; it must lie between 0 (greedy) and 100", *faults]
    if faults:
        raise RequestError("; ".join(faults))
    return sampling


def _seed(inputs: _Inputs, drawn_seed: int) -> int:
    seed, older = inputs.integer("seed"), inputs.integer("random_seed")
    if seed is not None and older is not None and seed != older:
        raise RequestError(f"seed is {seed} and random_seed is {older}; they mean the same: send one of them")
    given = seed if seed is not None else older
    return drawn_seed if given is None else given


def _end_ids(inputs: _Inputs, limits: ModelLimits) -> tuple[int, ...]:
    """-1 asks for an answer that nothing but max_tokens and stop_words ends."""
    end_id = inputs.integer("end_id", low=-1, high=limits.vocab_size - 1)
    if end_id is None:
        return limits.end_ids
    return () if end_id == -1 else (end_id,)


def _refuse_unknown(parameters: Mapping[str, object]) -> None:
    """Triton hands over as parameters what a client sent under a name that is no input."""
    for name in parameters:
        if name.startswith("triton_"):
            continue
        near = difflib.get_close_matches(name, [*HONOURED, *NEUTRAL], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"{name} is no input of this model{hint}")


def _refuse_unhonoured(inputs: _Inputs) -> None:
    for name, neutral in NEUTRAL.items():
        values = inputs.values(name)
        odd = next((value for value in values if value not in neutral), None)
        if odd is not None:
            leave_out = f"leave it out or send {neutral[-1]!r}" if neutral else "leave it out"
            raise RequestError(f"{name} is not supported yet (got {_short(odd)}); {leave_out}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Inputs:
    """Typed access to the tensors of one request; [1], [1, 1] and the like are one value."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def values(self, name: str) -> Sequence[object]:
        """All elements as plain Python values; none if the input is absent."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return ()
        return [self._decode(name, value) for value in tensor.reshape(-1).tolist()]

    def texts(self, name: str) -> list[str]:
        return [str(value) for value in self.values(name)]

    def text(self, name: str) -> str | None:
        value = self._single(name)
        return None if value is None else str(value)

    def number(self, name: str) -> float | None:
        value = self._single(name)
        return None if value is None else float(value)

    def flag(self, name: str) -> bool:
        return bool(self._single(name))

    def integer(self, name: str, *, low: int | None = None, high: int | None = None) -> int | None:
        value = self._single(name)
        if value is None:
            return None
        number = int(value)
        if (low is not None and number < low) or (high is not None and number > high):
            raise RequestError(f"{name} is {number}; it must lie between {low} and {high}")
        return number

    def milliseconds(self, name: str) -> float | None:
        """In seconds."""
        value = self.number(name)
        if value is None:
            return None
        if not (math.isfinite(value) and 0 < value <= MAX_DEADLINE_S * 1e3):
            raise RequestError(f"{name} is {value:g}; it must lie above 0 and up to {MAX_DEADLINE_S * 1e3:g}")
        return value / 1e3

    def _single(self, name: str) -> Any:
        values = self.values(name)
        if len(values) > 1:
            raise RequestError(f"{name} holds {len(values)} values; send one")
        return values[0] if values else None

    @staticmethod
    def _decode(name: str, value: object) -> object:
        if not isinstance(value, bytes):
            return value
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"{name} is not valid UTF-8 (byte {error.start} of {len(value)})") from error
