"""Paged attention on this machine, checked against a known answer before an engine uses it.

With a KV type the CPU can't compute with, the node returns garbage and no error. So one short sequence goes
through the very node and settings of the engine, in two chunks over scattered blocks, and must match numpy.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpd.errors import EngineError
from trtpd.kv_transfer.layout import DTYPE_BYTES, KVDtype
from trtpd.runtime.engine.graph import MAX_CONTEXT_INPUT, Paging, key_input, kv_type, named, value_input
from trtpd.runtime.engine.ov import compile_for_cpu, one_line

F32 = npt.NDArray[np.float32]

_TOKENS, _FIRST_CHUNK = 70, 50
_BLOCKS = (4, 1, 2)
_WINDOW = 40
"""Crosses a block and the end of the first chunk."""
_TOLERANCE: dict[KVDtype, float] = {"f32": 1e-4, "f16": 2e-2, "bf16": 8e-2}


def check_paged_attention(
    openvino: ModuleType,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: KVDtype,
    threads: int,
    windowed: bool = False,
) -> None:
    """Raises EngineError unless attention over paged KV of this shape and type is right here; `windowed`: also that of
    layers with a sliding window."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((_TOKENS, count, head_dim), np.float32) for count in (heads, kv_heads, kv_heads)
    )
    for window in (None, _WINDOW) if windowed else (None,):
        found = _paged(openvino, query, key, value, kv_dtype=kv_dtype, threads=threads, window=window)
        error = np.abs(found - attention(query, key, value, window=window)).max()
        if not error <= _TOLERANCE[kv_dtype]:
            of_window = "" if window is None else f" in a window of {window} tokens"
            raise EngineError(
                f"paged attention{of_window} with {kv_dtype} KV, {heads} heads, {kv_heads} KV heads of {head_dim} is "
                f"wrong on this CPU (error {error:.3g}, allowed {_TOLERANCE[kv_dtype]:g}): build with kv_dtype f32"
            )


def attention(query: F32, key: F32, value: F32, *, window: int | None = None) -> F32:
    """Causal attention of one sequence, `[tokens, heads, head_dim]`, each token to the last `window`, itself included
    (None: to all); query heads share KV heads in order."""
    tokens, heads, head_dim = query.shape
    group = heads // key.shape[1]
    back = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    seen = (back >= 0) & (back < (tokens if window is None else window))
    hidden = np.where(seen, np.float32(0), np.float32(-np.inf))
    result = np.empty_like(query)
    for head in range(heads):
        scores = query[:, head] @ key[:, head // group].T * np.float32(head_dim**-0.5) + hidden
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        result[:, head] = (weights / weights.sum(axis=1, keepdims=True)) @ value[:, head // group]
    return result


def _paged(
    openvino: ModuleType, query: F32, key: F32, value: F32, *, kv_dtype: KVDtype, threads: int, window: int | None
) -> F32:
    ops, f32 = openvino.opset13, openvino.Type.f32
    flat = {"query": query, "key": key, "value": value}
    flat = {name: np.ascontiguousarray(rows.reshape(_TOKENS, -1)) for name, rows in flat.items()}
    rows_in = [named(ops.parameter([-1, rows.shape[1]], f32), name) for name, rows in flat.items()]
    paging = Paging(openvino, kv_heads=key.shape[1], head_dim=key.shape[2], kv_dtype=kv_dtype)
    result = ops.result(paging.attend(0, *rows_in, window=window))
    model = openvino.Model([result], [*rows_in, *paging.parameters], "paged_attention")
    request = compile_for_cpu(openvino, model, threads=threads, kv_dtype=kv_dtype).create_infer_request()
    shape = (max(_BLOCKS) + 1, key.shape[1], 32, key.shape[2])
    kv = [np.zeros(shape, {4: np.float32, 2: np.uint16}[DTYPE_BYTES[kv_dtype]]) for _ in range(2)]
    for name, array in zip((key_input(0), value_input(0)), kv, strict=True):
        request.set_tensor(name, openvino.Tensor(array, openvino.Shape(shape), kv_type(openvino, kv_dtype)))
    chunks = [
        _run(openvino, request, flat, 0, _FIRST_CHUNK),
        _run(openvino, request, flat, _FIRST_CHUNK, _TOKENS),
    ]
    return np.concatenate(chunks).reshape(query.shape)


def _run(openvino: ModuleType, request: Any, flat: dict[str, F32], start: int, end: int) -> F32:
    blocks = _BLOCKS[: -(-end // 32)]
    integers: dict[str, Any] = {
        "past_lens": [start],
        "subsequence_begins": [0, end - start],
        "block_indices": blocks,
        "block_indices_begins": [0, len(blocks)],
        MAX_CONTEXT_INPUT: end,
    }
    inputs = {name: rows[start:end] for name, rows in flat.items()}
    inputs |= {name: np.array(value, np.int32) for name, value in integers.items()}
    for name, array in inputs.items():
        request.set_tensor(name, openvino.Tensor(array))
    result = np.full((end - start, flat["query"].shape[1]), np.nan, np.float32)
    request.set_output_tensor(openvino.Tensor(result, shared_memory=True))
    try:
        request.infer(share_outputs=True)
    except RuntimeError as error:
        raise EngineError(f"paged attention does not run on this CPU ({one_line(error)})") from error
    return result
