"""CompiledBackend: `tensorrt_llm.bindings.executor.Executor` over engines that trtllm-build compiled (1.0 to 1.2).

The executor runs in LEADER mode: one process a rank, rank 0 leads and answers, the others stay in `shutdown()` until it
shuts down. What its ranks tell each other is its own affair; nothing of ours uses MPI beside it.
"""

from __future__ import annotations

import datetime
import importlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtpd.build.manifest import EngineConfig, TensorRTConfig
from trtpd.errors import EngineError
from trtpd.runtime.engine.base import RequestKind, Sampling
from trtpd.runtime.engine.tensorrt_llm.backend import (
    Answer,
    Finish,
    Iteration,
    Stage,
    Start,
    Use,
    one_line,
    translated,
    translated_request,
)
from trtpd.runtime.engine.tensorrt_llm.hand_off import HandOff

ENGINE_DIR = "engine"
STATS_KEPT = 1000
"""Iterations that the executor keeps between two looks; older ones it drops."""

_TYPES = {
    RequestKind.CONTEXT_ONLY: "REQUEST_TYPE_CONTEXT_ONLY",
    RequestKind.GENERATION_ONLY: "REQUEST_TYPE_GENERATION_ONLY",
    RequestKind.CONTEXT_AND_GENERATION: "REQUEST_TYPE_CONTEXT_AND_GENERATION",
}
_FINISHES: dict[str, Finish | None] = {
    "NOT_FINISHED": None,
    "END_ID": "stop",
    "STOP_WORDS": "stop",
    "LENGTH": "length",
    "TIMED_OUT": "timed_out",
    "CANCELLED": "cancelled",
}
_STAGES: dict[str, Stage] = {
    "QUEUED": "queued",
    "ENCODER_IN_PROGRESS": "active",
    "CONTEXT_IN_PROGRESS": "active",
    "GENERATION_IN_PROGRESS": "active",
    "GENERATION_COMPLETE": "complete",
}


def import_bindings() -> Any:
    """tensorrt_llm.bindings.executor. Raises EngineError if it can't be had."""
    try:
        return importlib.import_module("tensorrt_llm.bindings.executor")
    except Exception as error:
        raise EngineError(
            f"TensorRT-LLM's executor can't be imported ({one_line(error)}): run in an image that has the release this "
            "was built with, 1.0 to 1.2, on a machine with its GPUs"
        ) from error


def make_executor(bindings: Any, config: EngineConfig, directory: Path) -> Any:
    """On every rank. Raises EngineError."""
    with translated(f"loading {directory / ENGINE_DIR}"):
        executor_config = executor_config_of(bindings, config)
        return bindings.Executor(directory / ENGINE_DIR, bindings.ModelType.DECODER_ONLY, executor_config)


def executor_config_of(bindings: Any, config: EngineConfig) -> Any:
    """Everything that matters is said and nothing left to a default that releases differ in.

    Blocks aren't reused between requests: reuse has sent blocks that were evicted under the transfer, and without it
    the executor's count of used blocks tells what is held for others.
    """
    trt, profile = _settings(config), config.profile
    chunking = bindings.ContextChunkingPolicy.FIRST_COME_FIRST_SERVED if trt.chunked_context else None
    return bindings.ExecutorConfig(
        max_beam_width=1,
        scheduler_config=bindings.SchedulerConfig(
            capacity_scheduler_policy=bindings.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            context_chunking_policy=chunking,
        ),
        kv_cache_config=bindings.KvCacheConfig(
            enable_block_reuse=False,
            max_tokens=profile.kv_blocks * config.layout.tokens_per_block,
            free_gpu_memory_fraction=trt.free_gpu_memory_fraction,
        ),
        enable_chunked_context=trt.chunked_context,
        iter_stats_max_iterations=STATS_KEPT,
        request_stats_max_iterations=STATS_KEPT,
        batching_type=bindings.BatchingType.INFLIGHT,
        max_batch_size=profile.max_batch,
        max_num_tokens=profile.max_step_tokens,
        parallel_config=bindings.ParallelConfig(
            communication_type=bindings.CommunicationType.MPI, communication_mode=bindings.CommunicationMode.LEADER
        ),
        cache_transceiver_config=_transceiver(bindings, trt),
    )


def _settings(config: EngineConfig) -> TensorRTConfig:
    if config.tensorrt_llm is None:
        raise EngineError(f"config.json of the {config.role} engine has no tensorrt_llm section: build this role again")
    return config.tensorrt_llm


def _transceiver(bindings: Any, trt: TensorRTConfig) -> Any:
    limits: dict[str, int] = {}
    if trt.kv_transfer_timeout_ms is not None:
        limits["kv_transfer_timeout_ms"] = trt.kv_transfer_timeout_ms
    backend = bindings.CacheTransceiverBackendType.from_string(trt.transceiver)
    return bindings.CacheTransceiverConfig(backend=backend, max_tokens_in_buffer=trt.max_tokens_in_buffer, **limits)


class ParamsCodec:
    """ContextPhaseParams from and to HandOff, in the form this release has: of four arguments, or from 1.3 on six."""

    def __init__(self, bindings: Any, version: str) -> None:
        """Raises EngineError if it has neither form."""
        self._make = bindings.ContextPhaseParams
        self._version = version
        self.arguments = next((count for count in (6, 4) if self._takes(count)), 0)
        if not self.arguments:
            raise EngineError(f"ContextPhaseParams of TensorRT-LLM {version} takes neither four nor six arguments")

    def _takes(self, count: int) -> bool:
        try:
            self._make([0], 0, *([None] * (count - 2)))
        except TypeError:
            return False
        return True

    def read(self, params: Any) -> HandOff:
        """Of a context request's result."""
        drafts, six = params.draft_tokens, self.arguments == 6
        return HandOff(
            version=self._version,
            first_gen_tokens=tuple(params.first_gen_tokens),
            req_id=params.req_id,
            opaque_state=params.opaque_state,
            draft_tokens=None if drafts is None else tuple(drafts),
            ctx_dp_rank=params.ctx_dp_rank if six else None,
            disagg_info_endpoint=params.disagg_info_endpoint if six else None,
        )

    def write(self, hand_off: HandOff) -> Any:
        """For a generation request."""
        drafts = None if hand_off.draft_tokens is None else list(hand_off.draft_tokens)
        later = (hand_off.ctx_dp_rank, hand_off.disagg_info_endpoint) if self.arguments == 6 else ()
        return self._make(list(hand_off.first_gen_tokens), hand_off.req_id, hand_off.opaque_state, drafts, *later)


class CompiledBackend:
    """See Backend."""

    cancels_held = False
    """Its loop looks for cancelled ids among active requests only, and keeps those it doesn't find for ever."""
    cancels_fetching = False
    ids_in_statistics = True

    def __init__(self, bindings: Any, executor: Any, *, version: str) -> None:
        """Raises EngineError if the executor takes no requests here."""
        self._bindings = bindings
        self._executor = executor
        self._params = ParamsCodec(bindings, version)
        self._pairs = StatsPairs()
        if not executor.can_enqueue_requests():
            raise EngineError("TensorRT-LLM's executor takes no requests on this rank: it is not its group's leader")

    def start(self, start: Start) -> int:
        with translated_request():
            request_id: int = self._executor.enqueue_request(request_of(self._bindings, start, self._params))
            return request_id

    def cancel(self, request_id: int) -> None:
        with translated("cancel_request"):
            self._executor.cancel_request(request_id)

    def answers(self, timeout_s: float) -> list[Answer]:
        with translated("await_responses"):
            responses = self._executor.await_responses(timeout=datetime.timedelta(seconds=timeout_s))
            return [self._answer(response) for response in responses]

    def iterations(self) -> list[Iteration]:
        with translated("reading statistics"):
            self._pairs.add(self._executor.get_latest_iteration_stats(), self._executor.get_latest_request_stats())
            return [iteration_of(*pair) for pair in self._pairs.take()]

    def forget(self, request_id: int) -> None:
        """The executor has forgotten it before."""

    def close(self) -> None:
        with translated("shutdown"):
            self._executor.shutdown()

    def _answer(self, response: Any) -> Answer:
        if response.has_error():
            return Answer(id=response.request_id, final=True, error=one_line(response.error_msg))
        result = response.result
        ids = tuple(result.output_token_ids[0]) if result.output_token_ids else ()
        params = result.context_phase_params
        reasons = result.finish_reasons or ()
        return Answer(
            id=response.request_id,
            final=result.is_final,
            ids=ids,
            log_probs=_last(result.log_probs, len(ids)),
            finish=_FINISHES[reasons[0].name] if reasons else None,
            hand_off=None if params is None else self._params.read(params),
        )


def _last(log_probs: Any, count: int) -> tuple[float, ...]:
    """Those of the newest tokens: releases differ in whether they repeat those of former answers."""
    if not log_probs or not count:
        return ()
    return tuple(map(float, log_probs[0][-count:]))


def request_of(bindings: Any, start: Start, params: ParamsCodec) -> Any:
    """Tokens that end the answer are passed as stop words, which the executor reports; an `end_id` it wouldn't. A
    context request has neither: its one token is judged here, and ending early it would hold no KV."""
    context = start.kind is RequestKind.CONTEXT_ONLY
    ends = [[token] for token in start.sampling.end_ids]
    return bindings.Request(
        list(start.prompt_ids),
        start.max_tokens,
        streaming=not context,
        sampling_config=sampling_config_of(bindings, start.sampling),
        output_config=bindings.OutputConfig(return_log_probs=start.sampling.log_probs, exclude_input_from_output=True),
        stop_words=None if context or not ends else ends,
        bad_words=[list(word) for word in start.sampling.bad_words] or None,
        type=getattr(bindings.RequestType, _TYPES[start.kind]),
        context_phase_params=None if start.hand_off is None else params.write(start.hand_off),
    )


def sampling_config_of(bindings: Any, sampling: Sampling) -> Any:
    penalties = penalties_of(sampling)
    if sampling.temperature == 0:
        return bindings.SamplingConfig(beam_width=1, top_k=1, **penalties)
    return bindings.SamplingConfig(
        beam_width=1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        seed=sampling.seed & ((1 << 64) - 1),
        **penalties,
    )


def penalties_of(sampling: Sampling) -> dict[str, float]:
    """Those that do anything, by the names that both interfaces have for them."""
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    found = {name: getattr(sampling, name) for name in neutral}
    return {name: value for name, value in found.items() if value != neutral[name]}


class StatsPairs:
    """Iteration statistics and request statistics of the same iterations, which the executor hands out apart."""

    def __init__(self) -> None:
        self._iterations: deque[Any] = deque()
        self._requests: deque[Any] = deque()

    def add(self, iterations: Sequence[Any], requests: Sequence[Any]) -> None:
        self._iterations.extend(iterations)
        self._requests.extend(requests)

    def take(self) -> list[tuple[Any, Any]]:
        """Complete pairs, oldest first. Where the executor has dropped one of a pair, the other goes too."""
        pairs = []
        while self._iterations and self._requests:
            ahead = self._iterations[0].iter - self._requests[0].iter
            if ahead > 0:
                self._requests.popleft()
            elif ahead < 0:
                self._iterations.popleft()
            else:
                pairs.append((self._iterations.popleft(), self._requests.popleft()))
        return pairs


def iteration_of(stats: Any, requests: Any) -> Iteration:
    kv, batch = stats.kv_cache_stats, stats.inflight_batching_stats
    tokens = 0 if batch is None else batch.num_ctx_tokens + batch.num_gen_requests
    return Iteration(
        used_blocks=0 if kv is None else kv.used_num_blocks,
        pool_blocks=0 if kv is None else kv.max_num_blocks,
        seconds=stats.iter_latency_ms / 1e3,
        tokens=tokens,
        uses={
            entry.id: Use(
                stage=_STAGES[entry.stage.name],
                context_tokens=entry.context_prefill_position,
                tokens=entry.context_prefill_position + entry.num_generated_tokens,
                blocks=getattr(entry, "alloc_total_blocks_per_request", 0),  # absent in 1.0
            )
            for entry in requests.request_stats
        },
    )
