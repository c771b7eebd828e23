"""From a request of the seam to one for the executor, or the reason why it can't be one. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trtpd.build.manifest import EngineConfig
from trtpd.errors import InternalError, RequestError
from trtpd.runtime.engine.base import EngineRequest, RequestKind, Sampling
from trtpd.runtime.engine.tensorrt_llm.backend import Start
from trtpd.runtime.engine.tensorrt_llm.hand_off import decode


def check_start(request: EngineRequest, config: EngineConfig) -> None:
    """Raises RequestError, naming every fault, for what an executor of this build in particular could never do."""
    if faults := list(_faults(request, config)):
        raise RequestError(f"request {request.request_id}: {'; '.join(faults)}")


def _sampling_faults(sampling: Sampling, *, llm_api: bool) -> Iterator[str]:
    """Settings that TensorRT-LLM has no like of, or means otherwise."""
    if sampling.logit_bias:
        yield "logit_bias is not available on TensorRT-LLM: leave it out"
    if sampling.top_log_probs:
        yield f"top_log_probs is {sampling.top_log_probs}; TensorRT-LLM reports the drawn token's only: set it to 0"
    if sampling.prompt_ignore_length:
        yield f"prompt_ignore_length is {sampling.prompt_ignore_length}; TensorRT-LLM has none: set it to 0"
    if sampling.min_tokens and sampling.end_ids:
        yield f"min_tokens is {sampling.min_tokens}; TensorRT-LLM can't hold back what ends an answer: leave it out"
    if sampling.bad_words and llm_api:
        yield "bad_words are not available through TensorRT-LLM's LLM class: leave them out"


def _faults(request: EngineRequest, config: EngineConfig) -> Iterator[str]:
    if config.tensorrt_llm is None:
        raise InternalError("an engine without a tensorrt_llm section was loaded")
    yield from _sampling_faults(request.sampling, llm_api=config.tensorrt_llm.mode == "llm_api")
    trt, tokens, step_tokens = config.tensorrt_llm, len(request.prompt_ids), config.profile.max_step_tokens
    if request.kind is RequestKind.GENERATION_ONLY:
        if not request.hand_off:
            yield "hand_off is missing, which generation_only needs on an engine that moves its KV itself"
    elif not trt.chunked_context and tokens > step_tokens:
        yield (
            f"the prompt has {tokens} tokens and this engine computes at most {step_tokens} in one step, which it "
            "can't split: raise max_step_tokens of the pool, or use a precision with fused attention"
        )
    moved = request.kind is not RequestKind.CONTEXT_AND_GENERATION
    if moved and trt.transceiver.upper() == "NIXL" and tokens > trt.max_tokens_in_buffer:
        yield (
            f"the prompt has {tokens} tokens and NIXL's buffer {trt.max_tokens_in_buffer}, beyond which it fails: "
            "raise tensorrt_llm.max_tokens_in_buffer"
        )


def start_of(request: EngineRequest, config: EngineConfig, *, version: str) -> Start:
    """Raises TransferError for a hand-off that can't be used, RequestError for one of another request.

    A context request whose one token is the whole answer hands nothing off: it would hold KV for nobody.
    """
    kind, max_tokens, hand_off = request.kind, request.max_tokens - request.first_index, None
    if kind is RequestKind.CONTEXT_ONLY:
        kind = kind if max_tokens > 1 else RequestKind.CONTEXT_AND_GENERATION
        max_tokens = 1
    elif kind is RequestKind.GENERATION_ONLY:
        hand_off = decode(request.hand_off, version=version)
        if hand_off.first_token != request.first_token:
            raise RequestError(
                f"request {request.request_id}: its first token is {request.first_token}, the hand-off says "
                f"{hand_off.first_token}"
            )
    return Start(
        kind=kind,
        prompt_ids=request.prompt_ids,
        max_tokens=min(max_tokens, config.max_seq_tokens - len(request.prompt_ids)),
        sampling=request.sampling,
        hand_off=hand_off,
    )
