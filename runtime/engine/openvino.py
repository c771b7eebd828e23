"""The OpenVINO engine: a Llama of our own graph on the CPU, its KV in shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpd.build.backends.openvino import WEIGHTS_FILE
from trtpd.build.machine import import_openvino
from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError
from trtpd.kv_transfer.layout import KVDtype
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine.batching import StepLimits
from trtpd.runtime.engine.executor import Piece
from trtpd.runtime.engine.graph import TOKENS_PER_BLOCK, build_llama, key_input, kv_type, value_input
from trtpd.runtime.engine.ov import compile_for_cpu, cpu_capabilities, one_line
from trtpd.runtime.engine.sampling import Draw, draw
from trtpd.runtime.engine.selftest import check_paged_attention
from trtpd.runtime.engine.shell import ScheduledEngine
from trtpd.runtime.engine.step_inputs import StepInputs
from trtpd.runtime.engine.weights import Weights


def load(config: EngineConfig, directory: Path, *, pool_name: str, generation: str) -> ScheduledEngine:
    """Loads the engine in `directory` and compiles it; the calling thread, and every thread it starts from
    now on, keeps to `profile.cores`. Raises EngineError, and CapacityError when /dev/shm has no room."""
    _check_supported(config)
    _keep_to_cores(config.profile.cores)
    openvino = import_openvino()
    _check_kv_dtype(openvino, config.layout.dtype)
    architecture, threads = config.architecture, config.profile.threads
    check_paged_attention(
        openvino,
        heads=architecture.num_attention_heads,
        kv_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        kv_dtype=config.layout.dtype,
        threads=threads,
    )
    with Weights(directory / WEIGHTS_FILE, architecture) as weights:
        model = build_llama(
            openvino, architecture, weights, kv_dtype=config.layout.dtype, positions=config.max_seq_tokens
        )
    compiled = compile_for_cpu(openvino, model, threads=threads, kv_dtype=config.layout.dtype)
    pool = SharedPool.create(pool_name, config.layout, config.profile.kv_blocks, generation=generation)
    try:
        return ScheduledEngine(config, pool, OpenVINOExecutor(openvino, compiled, pool, config))
    except BaseException:
        pool.close()
        raise


class OpenVINOExecutor:
    """Runs steps of a compiled model whose KV is `pool`."""

    def __init__(self, openvino: ModuleType, compiled: Any, pool: SharedPool, config: EngineConfig) -> None:
        profile = config.profile
        limits = StepLimits(
            max_step_tokens=profile.max_step_tokens,
            chunk_tokens=profile.chunk_tokens,
            max_batch=profile.max_batch,
        )
        self._openvino = openvino
        self._inputs = StepInputs(config.layout, limits, max_seq_tokens=config.max_seq_tokens)
        self._logits = np.empty((limits.max_running, config.architecture.vocab_size), np.float32)
        self._request: Any = compiled.create_infer_request()
        self._bind_kv(pool)

    def run(self, pieces: Sequence[Piece]) -> list[Draw | None]:
        """See Executor."""
        inputs = self._inputs.fill(pieces)
        for name, array in inputs.items():
            self._request.set_tensor(name, self._openvino.Tensor(array, shared_memory=True))
        logits = self._infer(len(inputs["sample_rows"]))
        asked = [piece.draw for piece in pieces if piece.draw is not None]
        if not asked:
            return [None] * len(pieces)
        draws = iter(draw(logits, [at.sampling for at in asked], [at.index for at in asked]))
        return [None if piece.draw is None else next(draws) for piece in pieces]

    def close(self) -> None:
        """See Executor."""
        self._request = None

    def _infer(self, rows: int) -> npt.NDArray[np.float32]:
        """Logits of the step's sample rows. With one thread the CPU plugin swallows exceptions of its nodes
        and leaves the output as it was: the output is NaN beforehand, and a NaN left in it is a failed
        step."""
        logits = self._logits[:rows]
        logits.fill(np.nan)
        self._request.set_output_tensor(self._openvino.Tensor(logits, shared_memory=True))
        try:
            self._request.infer(share_outputs=True)
        except RuntimeError as error:
            raise EngineError(f"openvino could not compute a step: {one_line(error)}") from error
        if np.isnan(logits).any():
            raise EngineError(
                "openvino left logits unwritten or not a number in a step: a node failed without an error, "
                "or the weights overflow; check the checkpoint, and build with precision f32"
            )
        return logits

    def _bind_kv(self, pool: SharedPool) -> None:
        dtype = kv_type(self._openvino, pool.layout.dtype)
        for layer, arrays in enumerate(zip(pool.keys, pool.values, strict=True)):
            for name, array in zip((key_input(layer), value_input(layer)), arrays, strict=True):
                tensor = self._openvino.Tensor(array, self._openvino.Shape(array.shape), dtype)
                self._request.set_tensor(name, tensor)


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
