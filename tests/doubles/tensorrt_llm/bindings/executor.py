"""The executor's bindings: configuration, requests and results, and an Executor that computes on the CPU."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

from tensorrt_llm._api import VERSION as __version__
from tensorrt_llm._engine import load_compiled, read_build
from tensorrt_llm._runner import Call, Fault, Outcome, Runner
from tensorrt_llm._stats import IterationRow
from tensorrt_llm.bindings import _made

__all__ = ["__version__"]

_known: dict[str, Any] = {}
for _name in (
    "RequestType", "FinishReason", "CapacitySchedulerPolicy", "ContextChunkingPolicy", "BatchingType", "ModelType",
    "CommunicationType", "CommunicationMode", "CacheTransceiverBackendType", "RequestStage",
):  # fmt: skip
    _known[_name] = _made.make_enum(_name)
    globals()[_name] = _known[_name]
    __all__.append(_name)


def _from_string(text: str) -> Any:
    members = _known["CacheTransceiverBackendType"].__members__
    if text.upper() not in members or text not in (text.upper(), text.lower()):
        raise RuntimeError(f"Invalid backend type: {text}")
    return members[text.upper()]


_known["CacheTransceiverBackendType"].from_string = staticmethod(_from_string)


def _check_prompt(ids: list[int]) -> None:
    if not ids:
        raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: !inputTokenIds.empty()")


_CHECKS: dict[str, dict[str, _made.Check]] = {
    "SamplingConfig": {
        "beam_width": _made.above(0, "beamWidth"),
        "top_k": _made.at_least(0, "topK"),
        "top_p": _made.above(0, "topP", 1),
        "temperature": _made.at_least(0, "temperature"),
    },
    "KvCacheConfig": {
        "max_tokens": _made.above(0, "maxTokens"),
        "free_gpu_memory_fraction": _made.above(0, "freeGpuMemoryFraction", 1),
    },
    "CacheTransceiverConfig": {
        "max_tokens_in_buffer": _made.above(0, "maxTokensInBuffer"),
        "kv_transfer_timeout_ms": _made.above(0, "kvTransferTimeoutMs"),
    },
    "ExecutorConfig": {
        "max_beam_width": _made.above(0, "maxBeamWidth"),
        "max_batch_size": _made.above(0, "maxBatchSize"),
        "max_num_tokens": _made.above(0, "maxNumTokens"),
        "iter_stats_max_iterations": _made.at_least(0, "iterStatsMaxIterations"),
        "request_stats_max_iterations": _made.at_least(0, "requestStatsMaxIterations"),
    },
    "Request": {"input_token_ids": _check_prompt, "max_tokens": _made.above(0, "maxTokens")},
}
for _name in (
    "SamplingConfig", "OutputConfig", "KvCacheConfig", "DynamicBatchConfig", "SchedulerConfig", "OrchestratorConfig",
    "ParallelConfig", "CacheTransceiverConfig", "ExtendedRuntimePerfKnobConfig", "ExecutorConfig",
):  # fmt: skip
    _known[_name] = _made.make_class(_name, _known, checks=_CHECKS.get(_name))
    globals()[_name] = _known[_name]
    __all__.append(_name)


class ContextPhaseParams:
    """Four arguments up to 1.2, six from 1.3 on; none has a default."""

    def __init__(self, *args: Any) -> None:
        wanted = 6 if _made.LINE >= (1, 3) else 4
        if len(args) != wanted:
            raise TypeError(f"__init__(): incompatible function arguments: ContextPhaseParams takes {wanted}")
        first, req_id, state, drafts = args[:4]
        if not (isinstance(first, list) and all(type(token) is int for token in first)):
            raise TypeError("__init__(): incompatible function arguments: first_gen_tokens is no list[int]")
        if type(req_id) is not int or not 0 <= req_id < 1 << 64:
            raise TypeError("__init__(): incompatible function arguments: req_id is no uint64")
        if state is not None and not isinstance(state, bytes):
            raise TypeError("__init__(): incompatible function arguments: opaque_state is no bytes")
        if drafts is not None and not isinstance(drafts, list):
            raise TypeError("__init__(): incompatible function arguments: draft_tokens is no list")
        self.first_gen_tokens, self.req_id, self.opaque_state, self.draft_tokens = first, req_id, state, drafts
        if wanted == 6:
            self.ctx_dp_rank, self.disagg_info_endpoint = args[4:]


_known["ContextPhaseParams"] = ContextPhaseParams
_RequestBase: Any = _made.make_class(
    "Request", _known, checks=_CHECKS["Request"], renamed={"type": "request_type", "priority": "_priority"}
)


class Request(_RequestBase):  # type: ignore[misc]
    """A request; `type` is called `request_type` once it is made."""

    BATCHED_POST_PROCESSOR_NAME = "batched"


class Result:
    """What an executor gives out of a request."""

    def __init__(self, outcome: Outcome) -> None:
        self.is_final = outcome.final
        self.is_sequence_final = outcome.final
        self.output_token_ids = [list(outcome.ids)]
        self.log_probs = [list(outcome.log_probs)] if outcome.log_probs else None
        self.cum_log_probs = None
        self.context_logits = None
        self.generation_logits = None
        self.spec_dec_fast_logits_info = None
        self.encoder_output = None
        self.finish_reasons = [_known["FinishReason"][outcome.finish]]
        self.sequence_index = 0
        self.decoding_iter = outcome.count
        self.avg_decoded_tokens_per_iter = 1.0
        self.request_perf_metrics = None
        self.additional_outputs: list[Any] = []
        self.context_phase_params = None
        if outcome.handed is not None:
            later = [None, None] if _made.LINE >= (1, 3) else []
            first, req_id, state = outcome.handed
            self.context_phase_params = ContextPhaseParams([first], req_id, state, None, *later)


class Response:
    """A result, or an error: asking one for what the other has raises."""

    def __init__(self, request_id: int, found: Any, client_id: int | None = None) -> None:
        self.request_id, self.client_id, self._found = request_id, client_id, found

    def has_error(self) -> bool:
        return isinstance(self._found, str)

    @property
    def error_msg(self) -> str:
        if not isinstance(self._found, str):
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: hasError()")
        return self._found

    @property
    def result(self) -> Result:
        if isinstance(self._found, str):
            raise RuntimeError(self._found)
        found: Result = self._found
        return found


class Executor:
    """LEADER mode: the first rank takes requests; `shutdown` is where the others compute."""

    def __init__(self, model_path: Any, model_type: Any, executor_config: Any) -> None:
        if not isinstance(model_type, _known["ModelType"]) or not isinstance(executor_config, _known["ExecutorConfig"]):
            raise TypeError("__init__(): incompatible function arguments: Executor")
        if model_type is not _known["ModelType"].DECODER_ONLY:
            raise RuntimeError(f"the stand-in runs DECODER_ONLY engines, not {model_type}")
        build = read_build(_made.path_of(model_path))
        self._config = executor_config
        communicator = _communicator(executor_config, build.world_size)
        limits = build.limits(executor_config)
        self._engine, follower = load_compiled(build, limits, communicator)
        self._follower = follower
        self._runner: Runner | None = None
        if self._engine is not None:
            transceiver = executor_config.cache_transceiver_config
            enabled = transceiver is not None and transceiver.backend is not None
            timeout_ms = getattr(transceiver, "kv_transfer_timeout_ms", None) if enabled else None
            self._runner = Runner(
                self._engine,
                limits,
                transceiver=enabled,
                timeout_s=None if timeout_ms is None else timeout_ms / 1e3,
                buffer_tokens=transceiver.max_tokens_in_buffer if enabled else None,
                nixl=enabled and transceiver.backend is _known["CacheTransceiverBackendType"].NIXL,
                cancels_held=False,
                iterations_kept=executor_config.iter_stats_max_iterations,
                requests_kept=executor_config.request_stats_max_iterations,
            )

    def enqueue_request(self, request: Any) -> int:
        if not isinstance(request, Request):
            raise TypeError("enqueue_request(): incompatible function arguments")
        return self._leader().enqueue(_call_of(request))

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def await_responses(self, *args: Any, timeout: datetime.timedelta | None = None) -> list[Any]:
        if args:
            raise TypeError("the stand-in awaits the responses of all requests only")
        if timeout is not None and not isinstance(timeout, datetime.timedelta):
            raise TypeError("await_responses(): incompatible function arguments: timeout is a timedelta")
        outcomes = self._leader().outcomes(None if timeout is None else timeout.total_seconds())
        return [_response(outcome) for outcome in outcomes]

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return self._leader().ready(id)

    def cancel_request(self, id: int) -> None:
        if type(id) is not int:
            raise TypeError("cancel_request(): incompatible function arguments")
        self._leader().cancel(id)

    def get_latest_iteration_stats(self) -> list[Any]:
        return [_iteration(row) for row in self._leader().stats.take_iterations()]

    def get_latest_request_stats(self) -> list[Any]:
        return [_requests(row) for row in self._leader().stats.take_requests()]

    def get_latest_debug_tensors(self) -> list[Any]:
        return []

    def can_enqueue_requests(self) -> bool:
        return self._runner is not None

    def get_kv_cache_event_manager(self) -> None:
        return None

    def shutdown(self) -> None:
        if self._runner is not None:
            self._runner.shutdown()
        elif self._follower is not None:
            follower, self._follower = self._follower, None
            follower.run()
            follower.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _leader(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: only the leader may be asked")
        return self._runner


def _communicator(config: Any, world_size: int) -> Any:
    """MPI's world where there is one. Raises RuntimeError unless it has a process for each rank."""
    parallel = config.parallel_config
    if parallel is not None and parallel.communication_mode is _known["CommunicationMode"].ORCHESTRATOR:
        raise RuntimeError("Context-only and generation-only requests are NOT currently supported in orchestrator mode")
    inside = "OMPI_COMM_WORLD_SIZE" in os.environ or "mpi4py.MPI" in sys.modules
    size = 1
    if inside:
        from mpi4py import MPI

        size = MPI.COMM_WORLD.Get_size()
    if size != world_size:
        raise RuntimeError(
            "With communicationMode kLEADER, MPI worldSize is expected to be equal to tp*pp*cp when participantIds are "
            f"not specified (world size {size}, engine {world_size})"
        )
    return MPI if size > 1 else None


def _call_of(request: Any) -> Call:
    kinds = {0: "context_and_generation", 1: "context_only", 2: "generation_only"}
    params, sampling = request.context_phase_params, request.sampling_config
    if sampling.beam_width != 1:
        raise RuntimeError("beam width 1 is all that disaggregation has")
    return Call(
        kind=kinds[request.request_type.value],
        ids=tuple(request.input_token_ids),
        max_tokens=request.max_tokens,
        streaming=request.streaming,
        echo=not request.output_config.exclude_input_from_output,
        log_probs=bool(request.output_config.return_log_probs),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bad_words=tuple(tuple(word) for word in request.bad_words or ()),
        end_id=request.end_id,
        stop_words=tuple(tuple(word) for word in request.stop_words or ()),
        handed=None if params is None else (params.first_gen_tokens, params.req_id, params.opaque_state),
    )


def _response(outcome: Outcome | Fault) -> Response:
    if isinstance(outcome, Fault):
        return Response(outcome.id, outcome.message)
    return Response(outcome.id, Result(outcome))


def _filled(name: str, values: dict[str, Any]) -> Any:
    """An object with the attributes that api.json gives the class, and no other."""
    known = [text.partition(" ")[0] for text in _made.EXECUTOR[name]["attrs"] if "(" not in text.partition(" ")[0]]
    made = type(name, (), {"__slots__": tuple(known)})()
    for attribute in known:
        setattr(made, attribute, values.get(attribute))
    return made


def _iteration(row: IterationRow) -> Any:
    kv = _filled("KvCacheStats", row.kv)
    batch = _filled("InflightBatchingStats", row.batch)
    return _filled("IterationStats", row.plain | {"kv_cache_stats": kv, "inflight_batching_stats": batch})


def _requests(row: IterationRow) -> Any:
    stages = _known["RequestStage"]
    found = [_filled("RequestStats", entry | {"stage": stages[entry["stage"]]}) for entry in row.requests]
    return _filled("RequestStatsPerIteration", {"iter": row.plain["iter"], "request_stats": found})


__all__ += ["ContextPhaseParams", "Executor", "Request", "Response", "Result"]
