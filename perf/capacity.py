"""What a cluster can serve by its step-time model, so that loads can be fixed before anything has been run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtpd.perf.scenario import Faults, SimRequest
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.cost import StepTimeModel
from trtpd.runtime.core.instance import blocks_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a stream of requests asks of a cluster, as parts of all it has: 1 is the most it can do."""

    prefill: float
    decode: float

    @property
    def most(self) -> float:
        return max(self.prefill, self.decode)


def demand(
    requests: Sequence[SimRequest],
    workers: Sequence[WorkerSpec],
    model: StepTimeModel,
    *,
    seconds: float,
    tpot_s: float,
    faults: Faults,
) -> Demand:
    """Of requests that arrive within `seconds`, against the least that the cluster has at any time: an instance that
    is killed counts as away, one that is slowed as slow from the beginning.

    A prompt is computed in chunks and by itself; what a prefix cache may hold of it (all full blocks of a shared
    beginning, where there are caches) costs nothing. Decode runs the largest batch that keeps `tpot_s` and fits its KV
    at every sequence's peak.
    """
    if not requests:
        return Demand(prefill=0.0, decode=0.0)
    slow = {one.instance: one.factor for one in faults.slow}
    dead = {one.instance for one in faults.kills}
    up = [spec for spec in workers if spec.name not in dead]
    prefillers = [spec for spec in up if spec.role == "prefill"]
    speed = sum(1.0 / slow.get(spec.name, 1.0) for spec in prefillers)
    prefill_s = sum(_prefill_s(request, prefillers[0], model) for request in requests)
    tokens_per_s = sum(
        _decode_tokens_per_s(requests, spec, model, tpot_s=tpot_s, factor=slow.get(spec.name, 1.0))
        for spec in up
        if spec.role == "decode"
    )
    tokens = sum(request.output_tokens - 1 for request in requests)
    return Demand(prefill=prefill_s / (speed * seconds), decode=tokens / (tokens_per_s * seconds))


def _prefill_s(request: SimRequest, spec: WorkerSpec, model: StepTimeModel) -> float:
    cached = len(request.block_hashes) * spec.tokens_per_block if spec.cache_blocks else 0
    total, done = 0.0, min(cached, request.prompt_tokens - 1)
    while done < request.prompt_tokens:
        tokens = min(spec.chunk_tokens, request.prompt_tokens - done)
        attended = done + tokens // 2
        total += model.step_s(
            n_prefill=1, prefill_tokens=tokens, prefill_kv_tokens=attended, n_decode=0, decode_kv_tokens=0
        )
        done += tokens
    return total


def _decode_tokens_per_s(
    requests: Sequence[SimRequest], spec: WorkerSpec, model: StepTimeModel, *, tpot_s: float, factor: float
) -> float:
    """Of the largest batch that keeps the target and fits. Sequences count by the steps they are there for."""
    steps = sum(request.output_tokens for request in requests)
    context = sum(one.output_tokens * (one.prompt_tokens + one.output_tokens / 2) for one in requests) / steps
    peaks = (
        one.output_tokens * blocks_for(one.prompt_tokens + one.max_tokens, spec.tokens_per_block) for one in requests
    )
    most = max(1, min(spec.max_batch, int(spec.kv_blocks * steps / sum(peaks))))
    found = 0.0
    for batch in range(1, most + 1):
        step_s = factor * model.step_s(
            n_prefill=0, prefill_tokens=0, prefill_kv_tokens=0, n_decode=batch, decode_kv_tokens=round(batch * context)
        )
        if step_s <= tpot_s:
            found = batch / step_s
    return found
