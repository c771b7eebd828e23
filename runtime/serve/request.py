"""What a client asks of `pd`: tensors in, a checked request out. Pure; knows nothing of Triton.

Names, types and meanings are those of the TensorRT-LLM backend's ensemble. An input we can't honour is
refused by name unless its value changes nothing; an unknown one is refused with the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from trtpd.errors import RequestError
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.serve.inputs import Inputs, Tensor
from trtpd.runtime.serve.sampling_inputs import SAMPLING_INPUTS, Words, sampling_of, words_of
from trtpd.runtime.serve.text import Message, TextLayer, parse_messages

MAX_STOP_WORDS = 64
MAX_STOP_CHARS = 1024
ANSWERS_AT_MOST = 16
MAX_PRIORITY = 8
MAX_TENANT_CHARS = 64

HONOURED = (
    "text_input",
    "messages",
    "query",
    "max_tokens",
    "stop_words",
    "pad_id",
    *SAMPLING_INPUTS,
    "num_return_sequences",
    "stream",
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
    "length_penalty": (0.0, 1.0),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "decoder_text_input": ("",),
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
    """One generation request, values in range, not tokenised yet. `max_tokens` is at least 1. `words` belong to
    `sampling` once they are tokens; `answers` of it are wanted.

    `priority` above 0 goes before other requests, below 0 after them and is shed first; `tenant` is who shares with
    whom.
    """

    prompt: str | tuple[Message, ...]
    max_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    words: Words
    answers: int
    stream: bool
    echo: bool
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
    inputs = Inputs(tensors)
    _refuse_unknown(parameters)
    _refuse_unhonoured(inputs)
    stream = inputs.flag("stream")
    deadline_s = inputs.milliseconds("deadline_ms")
    max_tokens = _max_tokens(inputs, limits)
    sampling = sampling_of(inputs, end_ids=limits.end_ids, vocab_size=limits.vocab_size, drawn_seed=drawn_seed)
    if sampling.min_tokens > max_tokens:
        raise RequestError(f"min_tokens is {sampling.min_tokens} and max_tokens {max_tokens}; it must not be above it")
    return Asked(
        prompt=_prompt(inputs),
        max_tokens=max_tokens,
        stops=_stops(inputs),
        sampling=sampling,
        words=words_of(inputs),
        answers=inputs.integer("num_return_sequences", low=1, high=ANSWERS_AT_MOST) or 1,
        stream=stream,
        # As the backend does it: without streaming a raw prompt comes back unless declined; with it, never.
        echo=not stream and "text_input" in tensors and not inputs.flag("exclude_input_in_output"),
        count_input=inputs.flag("return_num_input_tokens"),
        count_output=inputs.flag("return_num_output_tokens"),
        deadline_s=limits.deadline_s if deadline_s is None else deadline_s,
        ttft_s=_or(inputs.milliseconds("ttft_ms"), limits.ttft_s),
        tpot_s=_or(inputs.milliseconds("tpot_ms"), limits.tpot_s),
        priority=inputs.integer("priority", low=-MAX_PRIORITY, high=MAX_PRIORITY) or 0,
        tenant=_tenant(inputs),
    )


def _tenant(inputs: Inputs) -> str:
    tenant = inputs.text("tenant") or ""
    if len(tenant) > MAX_TENANT_CHARS:
        raise RequestError(f"tenant has {len(tenant)} characters; at most {MAX_TENANT_CHARS} are taken")
    return tenant


def _or(given: float | None, default: float | None) -> float | None:
    return default if given is None else given


def query_of(tensors: Mapping[str, Tensor]) -> str | None:
    """The input `query` if the request is a question about the service and not for an answer."""
    query = Inputs(tensors).text("query")
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


def _prompt(inputs: Inputs) -> str | tuple[Message, ...]:
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


def _max_tokens(inputs: Inputs, limits: ModelLimits) -> int:
    value = inputs.integer("max_tokens", low=1, high=limits.max_seq_tokens - 1)
    if value is None:
        raise RequestError(
            f"max_tokens is missing; say how many tokens to generate at most (1 to {limits.max_seq_tokens - 1:,})"
        )
    return value


def _stops(inputs: Inputs) -> tuple[str, ...]:
    stops = tuple(stop for stop in inputs.texts("stop_words") if stop)
    if len(stops) > MAX_STOP_WORDS:
        raise RequestError(f"stop_words holds {len(stops)} strings; at most {MAX_STOP_WORDS} are taken")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError(f"stop_words holds a string of {longest} characters; at most {MAX_STOP_CHARS} are taken")
    return stops


def _refuse_unknown(parameters: Mapping[str, object]) -> None:
    """Triton hands over as parameters what a client sent under a name that is no input."""
    for name in parameters:
        if name.startswith("triton_"):
            continue
        near = difflib.get_close_matches(name, [*HONOURED, *NEUTRAL], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"{name} is no input of this model{hint}")


def _refuse_unhonoured(inputs: Inputs) -> None:
    for name, neutral in NEUTRAL.items():
        values = inputs.values(name)
        odd = next((value for value in values if value not in neutral), None)
        if odd is not None:
            leave_out = f"leave it out or send {neutral[-1]!r}" if neutral else "leave it out"
            raise RequestError(f"{name} is not supported yet (got {_short(odd)}); {leave_out}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
