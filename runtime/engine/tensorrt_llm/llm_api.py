"""LlmBackend: `tensorrt_llm.LLM` for releases without compiled engines (from 1.3 on), by DisaggregatedParams.

The LLM class starts the ranks of its group itself, so this is one process whatever the TP. It answers through asyncio:
an event loop in a thread of its own follows each request and puts what it says into one queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from trtpd.build.backends.tensorrt_llm.llm_args import LLM_ARGS_FILE, MODEL_DIR
from trtpd.build.manifest import EngineConfig
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
from trtpd.runtime.engine.tensorrt_llm.compiled import penalties_of
from trtpd.runtime.engine.tensorrt_llm.hand_off import HandOff

log = logging.getLogger(__name__)

STATS_S = 0.001
CALL_S = 30.0
"""What starting or cancelling a request may take at most."""

_FINISHES: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "timeout": "timed_out",
    "cancelled": "cancelled",
}
_STAGES: dict[str, Stage] = {
    "QUEUED": "queued",
    "ENCODER_IN_PROGRESS": "active",
    "CONTEXT_IN_PROGRESS": "active",
    "GENERATION_IN_PROGRESS": "active",
    "GENERATION_COMPLETE": "complete",
}


class LlmBackend:
    """See Backend."""

    cancels_held = True
    cancels_fetching = True
    ids_in_statistics = False
    """Its client side numbers requests, the executor behind it numbers them anew, and statistics come from there."""

    def __init__(self, api: Any, llm: Any, *, version: str) -> None:
        """Use `load`."""
        self._api = api
        self._llm = llm
        self._version = version
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._outputs: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tensorrt-llm-loop", daemon=True)
        self._thread.start()
        self._closed = False

    @classmethod
    def load(cls, config: EngineConfig, directory: Path, *, version: str) -> Self:
        """Raises EngineError."""
        api = import_api()
        arguments = read_arguments(directory / LLM_ARGS_FILE)
        with translated(f"loading {directory / MODEL_DIR} with {LLM_ARGS_FILE}"):
            llm = api.LLM(model=str(directory / MODEL_DIR), skip_tokenizer_init=True, **arguments)
        return cls(api, llm, version=version)

    def start(self, start: Start) -> int:
        with translated_request():
            return asyncio.run_coroutine_threadsafe(self._begin(start), self._loop).result(CALL_S)

    def cancel(self, request_id: int) -> None:
        with translated("abort"):
            asyncio.run_coroutine_threadsafe(self._abort(request_id), self._loop).result(CALL_S)

    def answers(self, timeout_s: float) -> list[Answer]:
        found = []
        try:
            found.append(self._answers.get(timeout=timeout_s))
            while True:
                found.append(self._answers.get_nowait())
        except queue.Empty:
            return found

    def iterations(self) -> list[Iteration]:
        with translated("reading statistics"):
            return [iteration_of(entry) for entry in self._llm.get_stats(timeout=STATS_S)]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with translated("shutdown"):
            try:
                self._llm.shutdown()
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(CALL_S)
                self._loop.close()

    async def _begin(self, start: Start) -> int:
        """In the loop's thread, since an output belongs to the loop it was made in."""
        output = self._llm.generate_async(
            list(start.prompt_ids),
            sampling_params_of(self._api, start),
            streaming=True,
            disaggregated_params=disaggregated_params_of(self._api, start),
        )
        request_id: int = output.request_id
        self._outputs[request_id] = output
        task = self._loop.create_task(self._follow(request_id, output))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return request_id

    def forget(self, request_id: int) -> None:
        self._outputs.pop(request_id, None)

    async def _abort(self, request_id: int) -> None:
        output = self._outputs.get(request_id)
        if output is not None:
            output.abort()

    async def _follow(self, request_id: int, output: Any) -> None:
        """Puts every answer of a request into the queue, and always a final one."""
        told, final = 0, False
        try:
            async for result in output:
                answer = self._answer(request_id, result, told)
                told += len(answer.ids)
                final = answer.final
                self._answers.put(answer)
        except Exception as error:  # noqa: BLE001  whatever the request died of, its caller must hear of it
            self._answers.put(Answer(id=request_id, final=True, error=one_line(error)))
            return
        if not final:
            self._answers.put(Answer(id=request_id, final=True, error="its answer ended without a last word"))

    def _answer(self, request_id: int, result: Any, told: int) -> Answer:
        output = result.outputs[0]
        ids = tuple(output.token_ids[told:])
        params = getattr(output, "disaggregated_params", None) or getattr(result, "disaggregated_params", None)
        handed = params is not None and params.request_type == "context_only" and result.finished
        return Answer(
            id=request_id,
            final=result.finished,
            ids=ids,
            log_probs=_log_probs(output.logprobs, ids),
            finish=_FINISHES.get(output.finish_reason or ""),
            hand_off=hand_off_of(params, self._version) if handed else None,
        )


def import_api() -> Any:
    """tensorrt_llm.llmapi. Raises EngineError if it can't be had."""
    try:
        return importlib.import_module("tensorrt_llm.llmapi")
    except Exception as error:
        raise EngineError(
            f"TensorRT-LLM's LLM class can't be imported ({one_line(error)}): run in an image that has the release "
            "this was built for, on a machine with its GPUs"
        ) from error


def read_arguments(path: Path) -> dict[str, Any]:
    """Raises EngineError."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EngineError(f"{path} can't be read ({one_line(error)}): build this role again") from error
    if not isinstance(found, dict):
        raise EngineError(f"{path} holds no arguments: build this role again")
    return found


def sampling_params_of(api: Any, start: Start) -> Any:
    """Tokens that end the answer are stop tokens which it reports; the end id of the model is not looked at."""
    sampling, context = start.sampling, start.kind is RequestKind.CONTEXT_ONLY
    return api.SamplingParams(
        max_tokens=start.max_tokens,
        end_id=-1,
        stop_token_ids=None if context or not sampling.end_ids else list(sampling.end_ids),
        include_stop_str_in_output=True,
        logprobs=0 if sampling.log_probs else None,
        detokenize=False,
        **_drawing(sampling),
        **penalties_of(sampling),
    )


def _drawing(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {"top_k": 1}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "seed": sampling.seed & ((1 << 63) - 1),
    }


def disaggregated_params_of(api: Any, start: Start) -> Any:
    """None for a request that hands nothing over."""
    if start.kind is RequestKind.CONTEXT_ONLY:
        return api.DisaggregatedParams(request_type="context_only")
    hand_off = start.hand_off
    if hand_off is None:
        return None
    known = {field.name for field in dataclasses.fields(api.DisaggregatedParams)}
    later = {"ctx_dp_rank": hand_off.ctx_dp_rank, "ctx_info_endpoint": hand_off.disagg_info_endpoint}
    return api.DisaggregatedParams(
        request_type="generation_only",
        first_gen_tokens=list(hand_off.first_gen_tokens),
        ctx_request_id=hand_off.req_id,
        opaque_state=hand_off.opaque_state,
        draft_tokens=None if hand_off.draft_tokens is None else list(hand_off.draft_tokens),
        **{name: value for name, value in later.items() if name in known and value is not None},
    )


def hand_off_of(params: Any, version: str) -> HandOff:
    """Of a context request's result."""
    drafts = params.draft_tokens
    return HandOff(
        version=version,
        first_gen_tokens=tuple(params.first_gen_tokens or ()),
        req_id=params.ctx_request_id,
        opaque_state=params.opaque_state,
        draft_tokens=None if drafts is None else tuple(drafts),
        ctx_dp_rank=getattr(params, "ctx_dp_rank", None),
        disagg_info_endpoint=getattr(params, "ctx_info_endpoint", None),
    )


def _log_probs(found: Sequence[Any] | None, ids: Sequence[int]) -> tuple[float, ...]:
    """Of the newest tokens. An entry is the token's own, or a map from token to an object that has it."""
    if not found or not ids:
        return ()
    entries = zip(ids, found[-len(ids) :], strict=False)
    return tuple(float(entry[token].logprob if isinstance(entry, Mapping) else entry) for token, entry in entries)


def iteration_of(entry: Mapping[str, Any]) -> Iteration:
    """Of one entry of get_stats, in which what isn't known may be missing or None."""
    kv, batch = entry.get("kvCacheStats") or {}, entry.get("inflightBatchingStats") or {}
    return Iteration(
        used_blocks=kv.get("usedNumBlocks", 0),
        pool_blocks=kv.get("maxNumBlocks", 0),
        seconds=(entry.get("iterLatencyMS") or 0.0) / 1e3,
        tokens=batch.get("numCtxTokens", 0) + batch.get("numGenRequests", 0),
        uses={request["id"]: _use(request) for request in entry.get("requestStats") or ()},
    )


def _use(request: Mapping[str, Any]) -> Use:
    context_tokens = request.get("contextPrefillPosition") or 0
    return Use(
        stage=_STAGES[request["stage"]],
        context_tokens=context_tokens,
        tokens=context_tokens + (request.get("numGeneratedTokens") or 0),
        blocks=request.get("allocTotalBlocksPerRequest") or 0,
    )
