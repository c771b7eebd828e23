"""The OpenVINO engine: a decoder of our own graph on the CPU, its KV in shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpd.build.machine import import_openvino
from trtpd.build.manifest import EngineConfig
from trtpd.build.sharding import shard_of
from trtpd.errors import EngineError
from trtpd.kv_transfer.layout import KVDtype
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine.batching import StepLimits
from trtpd.runtime.engine.executor import DrawAt
from trtpd.runtime.engine.graph import (
    ALL_REDUCES_PER_LAYER,
    TOKENS_PER_BLOCK,
    build_decoder,
    key_input,
    kv_type,
    value_input,
)
from trtpd.runtime.engine.group import Follower, Loaded, alone, check_group, follow, lead, rank_threads
from trtpd.runtime.engine.ov import compile_for_cpu, cpu_capabilities, one_line
from trtpd.runtime.engine.ranks import Array, Ranks
from trtpd.runtime.engine.sampling import Draw, draw
from trtpd.runtime.engine.selftest import check_paged_attention
from trtpd.runtime.engine.shell import ScheduledEngine
from trtpd.runtime.engine.step_inputs import StepInputs
from trtpd.runtime.engine.steps import Step
from trtpd.runtime.engine.weights import Weights

F32 = npt.NDArray[np.float32]


def load(
    config: EngineConfig, directory: Path, *, pool_name: str, generation: str, ranks: Ranks | None = None
) -> ScheduledEngine:
    """Loads the engine in `directory` and compiles it; the calling thread, and every thread it starts from
    now on, keeps to `profile.cores`. In a group this is rank 0. Raises EngineError, and CapacityError when /dev/shm
    has no room."""
    rank = _load_rank(config, directory, pool_name, generation, ranks)
    return alone(config, rank) if ranks is None else lead(config, rank, ranks)


def join(config: EngineConfig, directory: Path, *, pool_name: str, generation: str, ranks: Ranks) -> Follower:
    """A rank other than the first. Raises as `load`."""
    return follow(config, _load_rank(config, directory, pool_name, generation, ranks), ranks)


def _load_rank(config: EngineConfig, directory: Path, pool_name: str, generation: str, ranks: Ranks | None) -> Loaded:
    _check_supported(config)
    check_group(config, ranks)
    _keep_to_cores(config.profile.cores)
    architecture, layout, threads = config.architecture, config.layout, rank_threads(config)
    shards = [shard_of(architecture, layout, rank) for rank in range(config.tp)]
    shard = shards[0 if ranks is None else ranks.rank]
    openvino = import_openvino()
    _check_kv_dtype(openvino, layout.dtype)
    check_paged_attention(
        openvino,
        heads=len(shard.query_heads),
        kv_heads=len(shard.kv_heads),
        head_dim=architecture.head_dim,
        kv_dtype=layout.dtype,
        threads=threads,
        windowed=bool(architecture.window_layers),
    )
    sums = None if ranks is None else Sums(ranks)
    with Weights(directory, architecture, shard) as weights:
        model = build_decoder(
            openvino,
            architecture,
            weights,
            shard,
            kv_dtype=layout.dtype,
            positions=config.max_seq_tokens,
            widen=config.profile.widen_weights,
            sum_up=sums,
        )
        compiled = compile_for_cpu(openvino, model, threads=threads, kv_dtype=layout.dtype)
    pool = SharedPool.create(pool_name, layout, config.profile.kv_blocks, generation=generation, tp_rank=shard.rank)
    try:
        width = len(shard.vocabulary)
        part = OpenVINOPart(openvino, compiled, pool, config, width=width, weights=weights, sums=sums)
    except BaseException:
        pool.close()
        raise
    return Loaded(part=part, pool=pool, draw_from=draw_from, widths=[len(shard.vocabulary) for shard in shards])


def load_part(config: EngineConfig, directory: Path, *, pool_name: str, generation: str) -> Loaded:
    """An engine of one rank without its scheduling: for who drives its steps himself. Raises as `load`."""
    return _load_rank(config, directory, pool_name, generation, None)


class Sums:
    """The graph's sums over all ranks. The CPU plugin may swallow what a node raises, so a failure ends the group
    here, and `taken` counts the sums: a graph that stopped halfway has taken too few."""

    def __init__(self, ranks: Ranks) -> None:
        self.taken = 0
        self._ranks = ranks

    def __call__(self, part: Array, into: Array) -> None:
        try:
            self._ranks.sum(part, into)
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait in the same sum
            self._ranks.abort(f"the sum over all ranks failed: {error!r}")
        self.taken += 1


class OpenVINOPart:
    """A rank's compiled model, whose KV is `pool` and whose constants may still lie in `weights`. Its rows are logits,
    `width` of the vocabulary."""

    def __init__(
        self,
        openvino: ModuleType,
        compiled: Any,
        pool: SharedPool,
        config: EngineConfig,
        *,
        width: int,
        weights: Weights | None = None,
        sums: Sums | None = None,
    ) -> None:
        profile = config.profile
        limits = StepLimits(
            max_step_tokens=profile.max_step_tokens,
            chunk_tokens=profile.chunk_tokens,
            max_batch=profile.max_batch,
        )
        self._openvino = openvino
        self._inputs = StepInputs(config.layout, limits, max_seq_tokens=config.max_seq_tokens)
        self._logits = np.empty((limits.max_running, width), np.float32)
        self._request: Any = compiled.create_infer_request()
        self._weights = weights
        self._settled: set[int] = set()
        self._sums = sums
        self._sums_per_step = ALL_REDUCES_PER_LAYER * config.layout.num_layers
        self._bind_kv(pool)

    def compute(self, step: Step) -> F32:
        """See Part. With one thread the CPU plugin swallows exceptions of its nodes and leaves the output as it was:
        the output is NaN beforehand, and a NaN left in it is a failed step."""
        inputs = self._inputs.fill(step.pieces)
        for name, array in inputs.items():
            self._request.set_tensor(name, self._openvino.Tensor(array, shared_memory=True))
        logits = self._logits[: len(inputs["sample_rows"])]
        logits.fill(np.nan)
        self._request.set_output_tensor(self._openvino.Tensor(logits, shared_memory=True))
        before = 0 if self._sums is None else self._sums.taken
        try:
            self._request.infer(share_outputs=True)
        except RuntimeError as error:
            raise EngineError(f"openvino could not compute a step: {one_line(error)}") from error
        if self._sums is not None and self._sums.taken - before != self._sums_per_step:
            taken = self._sums.taken - before
            raise EngineError(f"openvino left a step after {taken} of {self._sums_per_step} sums over all ranks")
        self._settle(step.tokens)
        return logits

    def close(self) -> None:
        """See Part."""
        self._request = None

    def _settle(self, tokens: int) -> None:
        """The first step of each size still reads weights, to make copies in a layout of the plugin's own; what it read
        isn't needed in memory after that."""
        size = tokens.bit_length()
        if self._weights is not None and size not in self._settled:
            self._settled.add(size)
            self._weights.let_go()

    def _bind_kv(self, pool: SharedPool) -> None:
        dtype = kv_type(self._openvino, pool.layout.dtype)
        for layer, arrays in enumerate(zip(pool.keys, pool.values, strict=True)):
            for name, array in zip((key_input(layer), value_input(layer)), arrays, strict=True):
                tensor = self._openvino.Tensor(array, self._openvino.Shape(array.shape), dtype)
                self._request.set_tensor(name, tensor)


def draw_from(parts: list[Array], asked: Sequence[DrawAt]) -> list[Draw]:
    """See DrawFrom."""
    logits: F32 = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    if np.isnan(logits).any():
        raise EngineError(
            "openvino left logits unwritten or not a number in a step: a node failed without an error, "
            "or the weights overflow; check the checkpoint, and build with precision f32"
        )
    if not asked:
        return []
    return draw(logits, [at.sampling for at in asked], [at.index for at in asked], [at.history for at in asked])


def _check_supported(config: EngineConfig) -> None:
    layout, arch = config.layout, config.architecture
    if layout.tokens_per_block != TOKENS_PER_BLOCK:
        raise EngineError(
            f"tokens_per_block is {layout.tokens_per_block}; openvino's paged attention on a CPU takes "
            f"{TOKENS_PER_BLOCK} only: set it so and build again"
        )
    expected = (arch.num_hidden_layers, arch.num_key_value_heads, arch.head_dim)
    found = (layout.num_layers, layout.kv_heads, layout.head_dim)
    if found != expected:
        raise EngineError(
            f"config.json contradicts itself: the KV layout has (layers, KV heads, head_dim) {found}, the "
            f"architecture {expected}; build this role again"
        )


def _check_kv_dtype(openvino: ModuleType, dtype: KVDtype) -> None:
    capabilities = cpu_capabilities(openvino)
    if dtype == "f32" or (dtype == "bf16" and "BF16" in capabilities):
        return
    raise EngineError(
        f"the KV cache is {dtype}, which this CPU can't compute with (it has "
        f"{', '.join(sorted(capabilities))}): build with kv_dtype f32"
    )


def _keep_to_cores(cores: Sequence[int]) -> None:
    """Whoever shares a pool's cores out among its instances has narrowed this process to some of them: that stays."""
    if not cores or os.sched_getaffinity(0) <= set(cores):
        return
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        allowed = sorted(os.sched_getaffinity(0))
        raise EngineError(
            f"this engine is to run on CPU cores {list(cores)}, which can't be ({error}; this process may "
            f"use {allowed}): change `cores` in the pipeline file and build again"
        ) from error
