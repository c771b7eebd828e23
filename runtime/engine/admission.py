"""Whether an engine can run a request at all, and the most KV it will need."""

from __future__ import annotations

from collections.abc import Iterator

from trtpd.errors import RequestError
from trtpd.runtime.engine.base import EngineLimits, EngineRequest, RequestKind
from trtpd.runtime.engine.sampling_limits import validate_sampling


def peak_kv_tokens(request: EngineRequest, max_seq_tokens: int) -> int:
    """Tokens whose KV the request holds when it is longest: its last token's KV is never computed."""
    prompt_tokens = len(request.prompt_ids)
    if request.kind is RequestKind.CONTEXT_ONLY:
        return prompt_tokens
    new_tokens = min(request.max_tokens - request.first_index, max_seq_tokens - prompt_tokens)
    return prompt_tokens + new_tokens - 1


def check_request(request: EngineRequest, limits: EngineLimits) -> None:
    """Raises RequestError, naming every fault, for a request this engine could never run."""
    faults = [*_faults(request, limits), *validate_sampling(request.sampling, vocab_size=limits.vocab_size)]
    if faults:
        raise RequestError(f"request {request.request_id}: {'; '.join(faults)}")
    blocks = -(-peak_kv_tokens(request, limits.max_seq_tokens) // limits.tokens_per_block)
    if blocks > limits.kv_blocks:
        raise RequestError(
            f"request {request.request_id}: prompt ({len(request.prompt_ids)} tokens) and max_tokens "
            f"({request.max_tokens}) need {blocks} KV blocks, the pool has {limits.kv_blocks}; "
            "lower max_tokens or build with a larger kv_blocks"
        )


def _faults(request: EngineRequest, limits: EngineLimits) -> Iterator[str]:
    prompt_tokens = len(request.prompt_ids)
    if not prompt_tokens:
        yield "the prompt is empty; it must have at least one token"
    if prompt_tokens >= limits.max_seq_tokens:
        yield (
            f"the prompt has {prompt_tokens} tokens and the engine's longest sequence "
            f"{limits.max_seq_tokens}; shorten the prompt so that at least one token can follow it"
        )
    ids = request.prompt_ids if request.first_token is None else (*request.prompt_ids, request.first_token)
    if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
        yield f"token id {wrong} is not in the vocabulary of {limits.vocab_size}"
    if request.max_tokens < 1:
        yield f"max_tokens is {request.max_tokens}; it must be at least 1"
    if not 0 <= request.first_index <= max(prompt_tokens - 1, 0):
        yield f"first_index is {request.first_index}, with {prompt_tokens} prompt tokens before it"
    elif request.max_tokens >= 1:
        yield from _end_faults(request, limits)


def _end_faults(request: EngineRequest, limits: EngineLimits) -> Iterator[str]:
    """The first token this engine would draw must lie within the answer."""
    if request.kind is not RequestKind.GENERATION_ONLY:
        if request.first_token is not None:
            yield f"first_token is given ({request.first_token}), which only generation_only takes"
        drawn = request.first_index
    elif request.first_token is None:
        yield "first_token is missing, which generation_only needs"
        drawn = request.first_index
    else:
        drawn = request.first_index + 1
        if request.first_token in request.sampling.end_ids:
            yield f"first_token {request.first_token} already ends the answer"
        if len(request.prompt_ids) + 1 >= limits.max_seq_tokens:
            yield f"prompt and first token already are the longest sequence of {limits.max_seq_tokens} tokens"
    if drawn >= request.max_tokens:
        yield f"the next token has output index {drawn}, and max_tokens is {request.max_tokens}"
