"""The LLM class: the stand-in's execution loop behind asyncio, numbering requests on its own as the real one does."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm._engine import Limits, load_hugging_face
from tensorrt_llm._runner import Call, Fault, Outcome, Runner
from tensorrt_llm._stats import IterationRow
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.llmapi import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams

FIRST_ID = 2048
"""The executor behind the class numbers requests from here."""
_REASONS = {
    "END_ID": "stop", "STOP_WORDS": "stop", "LENGTH": "length", "TIMED_OUT": "timeout", "CANCELLED": "cancelled"
}  # fmt: skip


class RequestError(RuntimeError):
    """A request that the executor answers with an error."""


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    disaggregated_params: Any = None


class RequestOutput:
    """Itself again for each answer, with all tokens so far."""

    def __init__(self, request_id: int, llm: LLM, executor_id: int) -> None:
        self.request_id = request_id
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.disaggregated_params: Any = None
        self._llm, self._executor_id = llm, executor_id
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Outcome | Fault] = asyncio.Queue()

    def abort(self) -> None:
        self._llm._runner.cancel(self._executor_id)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        found = await self._queue.get()
        if isinstance(found, Fault):
            self.finished = True
            raise RequestError(found.message)
        output = self.outputs[0]
        output.token_ids += found.ids
        probs = found.log_probs[-len(found.ids) :] if found.ids else ()
        output.logprobs += [{token: Logprob(prob)} for token, prob in zip(found.ids, probs, strict=False)]
        output.finish_reason = _REASONS.get(found.finish)
        self.finished = found.final
        if found.handed is not None:
            first, request_id, state = found.handed
            output.disaggregated_params = self.disaggregated_params = DisaggregatedParams(
                request_type="context_only", first_gen_tokens=[first], ctx_request_id=request_id, opaque_state=state
            )
        return self

    def _put(self, found: Outcome | Fault) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, found)


class LLM:
    """PyTorch backend, one process."""

    def __init__(self, model: Any, tokenizer: Any = None, **kwargs: Any) -> None:
        args = TorchLlmArgs(model=model, tokenizer=tokenizer, **kwargs)
        kv, transceiver = args.kv_cache_config, args.cache_transceiver_config
        per_block = kv.tokens_per_block if kv is not None else 32
        longest = args.max_seq_len or 2048
        limits = Limits(
            max_batch_size=args.max_batch_size,
            max_num_tokens=args.max_num_tokens,
            max_seq_len=longest,
            max_input_len=longest - 1 if args.enable_chunked_prefill else min(longest - 1, args.max_num_tokens),
            kv_blocks=(kv.max_tokens if kv is not None and kv.max_tokens else 24 * per_block) // per_block,
            tokens_per_block=per_block,
        )
        _, engine = load_hugging_face(Path(model), limits)
        enabled = transceiver is not None and transceiver.backend is not None
        timeout_ms = transceiver.kv_transfer_timeout_ms if enabled else None
        self._runner = Runner(
            engine,
            limits,
            transceiver=enabled,
            timeout_s=None if timeout_ms is None else timeout_ms / 1e3,
            buffer_tokens=transceiver.max_tokens_in_buffer if enabled else None,
            nixl=enabled and transceiver.backend == "NIXL",
            cancels_held=True,
            iterations_kept=args.max_stats_len,
            requests_kept=args.max_stats_len,
            first_id=FIRST_ID,
        )
        self._with_stats, self._with_requests = args.enable_iter_perf_stats, args.enable_iter_req_stats
        self._ids = itertools.count(1)
        self._outputs: dict[int, RequestOutput] = {}
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._dispatch, daemon=True)
        self._thread.start()

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
        disaggregated_params: Any = None,
    ) -> RequestOutput:
        params = sampling_params or SamplingParams()
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None, or give the end_id")
        kind, handed = "context_and_generation", None
        if disaggregated_params is not None:
            kind = disaggregated_params.request_type
            if kind == "generation_only":
                given = disaggregated_params
                handed = (given.first_gen_tokens, given.ctx_request_id, given.opaque_state)
        call = Call(
            kind=kind,
            ids=tuple(inputs),
            max_tokens=params.max_tokens,
            streaming=streaming and kind != "context_only",
            echo=False,
            log_probs=params.logprobs is not None,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            end_id=params.end_id if params.end_id >= 0 else None,
            stop_words=tuple((token,) for token in params.stop_token_ids or ()),
            handed=handed,
        )
        with self._lock:
            executor_id = self._runner.enqueue(call)
            output = RequestOutput(next(self._ids), self, executor_id)
            self._outputs[executor_id] = output
        return output

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        del timeout
        rows = self._runner.stats.take_iterations()
        return [_json(row, with_requests=self._with_requests) for row in rows] if self._with_stats else []

    def shutdown(self) -> None:
        self._runner.shutdown()
        self._open = False
        self._thread.join()

    def _dispatch(self) -> None:
        while self._open:
            for found in self._runner.outcomes(0.02):
                with self._lock:
                    output = self._outputs[found.id]
                    if isinstance(found, Fault) or found.final:
                        del self._outputs[found.id]
                output._put(found)


def _json(row: IterationRow, *, with_requests: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "iter": row.plain["iter"], "iterLatencyMS": row.plain["iter_latency_ms"],
        "numActiveRequests": row.plain["num_active_requests"], "numQueuedRequests": row.plain["num_queued_requests"],
        "kvCacheStats": {
            "maxNumBlocks": row.kv["max_num_blocks"], "freeNumBlocks": row.kv["free_num_blocks"],
            "usedNumBlocks": row.kv["used_num_blocks"], "tokensPerBlock": row.kv["tokens_per_block"],
        },
        "inflightBatchingStats": {
            "numContextRequests": row.batch["num_context_requests"], "numGenRequests": row.batch["num_gen_requests"],
            "numCtxTokens": row.batch["num_ctx_tokens"],
        },
    }  # fmt: skip
    if with_requests:
        found["requestStats"] = [
            {
                "id": entry["id"], "stage": entry["stage"],
                "contextPrefillPosition": entry["context_prefill_position"],
                "numGeneratedTokens": entry["num_generated_tokens"],
                "allocTotalBlocksPerRequest": entry["alloc_total_blocks_per_request"],
            }
            for entry in row.requests
        ]  # fmt: skip
    return found
