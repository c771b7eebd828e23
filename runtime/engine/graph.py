"""A LlamaForCausalLM as an OpenVINO graph over paged KV, built node by node.

One graph of dynamic shape serves ragged prefill, decode and mixed batches: the tokens of all sequences of a
step lie in one row, and the paged-attention node knows from its inputs which are whose.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from trtpd.build.manifest import Architecture
from trtpd.build.sharding import Shard
from trtpd.kv_transfer.layout import KVDtype
from trtpd.runtime.engine.all_reduce import Sum, all_reduce_op
from trtpd.runtime.engine.ov import paged_attention_op
from trtpd.runtime.engine.rope import tables
from trtpd.runtime.engine.weights import Matrix, Weights

TOKENS_PER_BLOCK = 32
"""The only block size the CPU plugin's paged attention takes."""

INT_INPUTS = (
    "ids",
    "positions",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "sample_rows",
)
PAGING_INPUTS = INT_INPUTS[2:6]
MAX_CONTEXT_INPUT = "max_context_len"

ALL_REDUCES_PER_LAYER = 2
"""After the projections of attention and of the MLP back to the hidden size."""


def kv_type(openvino: ModuleType, dtype: KVDtype) -> Any:
    return {"f32": openvino.Type.f32, "bf16": openvino.Type.bf16, "f16": openvino.Type.f16}[dtype]


def key_input(layer: int) -> str:
    return f"key_cache.{layer}"


def value_input(layer: int) -> str:
    return f"value_cache.{layer}"


class Paging:
    """Paged-attention nodes, and the inputs they share.

    Inputs: the KV of a layer as two arrays `[blocks, kv_heads, 32, head_dim]`; per sequence the tokens
    already there, the begin of its tokens in the row, its blocks and their begins; the longest context of
    all.
    """

    def __init__(self, openvino: ModuleType, *, kv_heads: int, head_dim: int, kv_dtype: KVDtype) -> None:
        self._ops = openvino.opset13
        self._node = paged_attention_op(openvino)
        self._type = openvino.Type
        self._kv_heads, self._head_dim = kv_heads, head_dim
        self._kv_type = kv_type(openvino, kv_dtype)
        self.parameters = [self._parameter(name, [-1]) for name in PAGING_INPUTS]
        self._max_context = self._parameter(MAX_CONTEXT_INPUT, [])
        self.parameters.append(self._max_context)

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """Writes this step's keys and values `[tokens, kv_heads * head_dim]` to the layer's KV and
        attends."""
        shape = [-1, self._kv_heads, TOKENS_PER_BLOCK, self._head_dim]
        caches = [
            named(self._ops.parameter(shape, self._kv_type), name) for name in (key_input(layer), value_input(layer))
        ]
        inputs = [query, key, value, *caches, *self.parameters[: len(PAGING_INPUTS)], *self._constants()]
        node = self._node([tensor.output(0) for tensor in inputs])
        info = node.get_rt_info()
        info["num_k_heads"] = info["num_v_heads"] = self._kv_heads
        info["k_head_size"] = info["v_head_size"] = self._head_dim
        self.parameters.extend(caches)
        return node.output(0)

    def _constants(self) -> list[Any]:
        """Inputs 9 to 27. All but the scale and the longest context switch off what we don't use: sliding
        window, ALiBi, score aggregation, cache rotation, sparse attention, sinks and the rest."""
        constant = self._ops.constant
        zero = np.int32(0)
        no_ints, no_floats, no_bytes = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.uint8)
        before = [constant(np.float32(self._head_dim**-0.5)), constant(zero), constant(no_floats)]
        after = [no_ints, no_ints, no_ints, no_floats, no_floats, zero, zero, no_floats, zero]
        after += [no_ints, no_ints, no_ints, no_ints, no_bytes, no_ints]
        return [*before, self._max_context, *(constant(value) for value in after)]

    def _parameter(self, name: str, shape: list[int]) -> Any:
        return named(self._ops.parameter(shape, self._type.i32), name)


def named(node: Any, name: str) -> Any:
    node.set_friendly_name(name)
    node.output(0).get_tensor().set_names({name})
    return node


def _unchanged(output: Any) -> Any:
    return output


def build_llama(
    openvino: ModuleType,
    architecture: Architecture,
    weights: Weights,
    shard: Shard,
    *,
    kv_dtype: KVDtype,
    positions: int,
    sum_up: Sum | None = None,
) -> Any:
    """A rank's model: INT_INPUTS, MAX_CONTEXT_INPUT and each layer's KV in, f32 logits `[sample_rows, its vocabulary]`
    out. The constants share memory with arrays they keep alive. `positions` bounds a sequence's length. `sum_up` is
    needed where the shard is a part: it is called ALL_REDUCES_PER_LAYER times a layer, in the same order on every
    rank."""
    return _Llama(openvino, architecture, weights, shard, kv_dtype, positions, sum_up).model()


class _Llama:
    def __init__(
        self,
        openvino: ModuleType,
        architecture: Architecture,
        weights: Weights,
        shard: Shard,
        kv_dtype: KVDtype,
        positions: int,
        sum_up: Sum | None,
    ) -> None:
        self._openvino = openvino
        self._ops = openvino.opset13
        self._arch = architecture
        self._weights = weights
        self._shard = shard
        self._all_reduce: Callable[[Any], Any] = _unchanged if sum_up is None else all_reduce_op(openvino, sum_up)
        self._paging = Paging(openvino, kv_heads=len(shard.kv_heads), head_dim=architecture.head_dim, kv_dtype=kv_dtype)
        self._ids, self._positions, self._sample_rows = (
            named(self._ops.parameter([-1], openvino.Type.i32), name) for name in ("ids", "positions", "sample_rows")
        )
        cos, sin = (self._rows(self._constant(t), self._positions) for t in tables(architecture, positions))
        self._cos, self._sin = (self._ops.unsqueeze(t, self._ops.constant(np.int32(1))) for t in (cos, sin))

    def model(self) -> Any:
        hidden = self._rows(self._constant(self._weights.embedding()), self._ids)
        for layer in range(self._arch.num_hidden_layers):
            hidden = self._layer(layer, hidden)
        hidden = self._norm("model.norm.weight", self._rows(hidden, self._sample_rows))
        logits = named(self._project(hidden, self._weights.head()), "logits")
        inputs = [self._ids, self._positions, self._sample_rows, *self._paging.parameters]
        return self._openvino.Model([self._ops.result(logits)], inputs, "llama")

    def _layer(self, layer: int, hidden: Any) -> Any:
        prefix = f"model.layers.{layer}."
        attended = self._attention(layer, self._norm(f"{prefix}input_layernorm.weight", hidden))
        hidden = self._ops.add(hidden, self._all_reduce(attended))
        normed = self._norm(f"{prefix}post_attention_layernorm.weight", hidden)
        return self._ops.add(hidden, self._all_reduce(self._mlp(f"{prefix}mlp.", normed)))

    def _attention(self, layer: int, hidden: Any) -> Any:
        arch, prefix = self._arch, f"model.layers.{layer}.self_attn."
        query_heads, kv_heads = len(self._shard.query_heads), len(self._shard.kv_heads)
        query_size, kv_size = query_heads * arch.head_dim, kv_heads * arch.head_dim
        query = self._linear(f"{prefix}q_proj.weight", hidden, query_size, arch.hidden_size)
        key = self._linear(f"{prefix}k_proj.weight", hidden, kv_size, arch.hidden_size)
        value = self._linear(f"{prefix}v_proj.weight", hidden, kv_size, arch.hidden_size)
        query = self._rotate(query, query_heads)
        key = self._rotate(key, kv_heads)
        attended = self._paging.attend(layer, query, key, value)
        return self._linear(f"{prefix}o_proj.weight", attended, arch.hidden_size, query_size)

    def _mlp(self, prefix: str, hidden: Any) -> Any:
        inner, outer = len(self._shard.inner), self._arch.hidden_size
        gate = self._ops.swish(self._linear(f"{prefix}gate_proj.weight", hidden, inner, outer))
        up = self._linear(f"{prefix}up_proj.weight", hidden, inner, outer)
        return self._linear(f"{prefix}down_proj.weight", self._ops.multiply(gate, up), outer, inner)

    def _rotate(self, flat: Any, heads: int) -> Any:
        """Turns each head's first half against its second, `[tokens, heads * head_dim]` in and out."""
        ops = self._ops
        size = heads * self._arch.head_dim
        split = ops.reshape(flat, ops.constant(np.array([-1, heads, self._arch.head_dim], np.int32)), False)
        halves = ops.split(split, ops.constant(np.int32(2)), 2)
        first, second = halves.output(0), halves.output(1)
        turned = ops.concat(
            [
                ops.subtract(ops.multiply(first, self._cos), ops.multiply(second, self._sin)),
                ops.add(ops.multiply(second, self._cos), ops.multiply(first, self._sin)),
            ],
            2,
        )
        return ops.reshape(turned, ops.constant(np.array([-1, size], np.int32)), False)

    def _norm(self, name: str, hidden: Any) -> Any:
        """RMSNorm, in the shape the CPU plugin fuses."""
        ops = self._ops
        square = ops.power(hidden, ops.constant(np.full((1, 1), 2.0, np.float32)))
        mean = ops.reduce_mean(square, ops.constant(np.full(1, -1, np.int32)), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.full((1, 1), self._arch.rms_norm_eps, np.float32))))
        scaled = ops.multiply(hidden, ops.divide(ops.constant(np.ones((1, 1), np.float32)), root))
        weight = self._weights.vector(name, self._arch.hidden_size)
        return ops.multiply(scaled, self._constant(weight[None, :]))

    def _linear(self, name: str, hidden: Any, rows: int, columns: int) -> Any:
        return self._project(hidden, self._weights.matrix(name, rows, columns))

    def _project(self, hidden: Any, matrix: Matrix) -> Any:
        weight = self._constant(matrix.values)
        if matrix.scales is not None:
            widened = self._ops.convert(weight, "f32")
            weight = self._ops.multiply(widened, self._constant(matrix.scales))
        return self._ops.matmul(hidden, weight, False, True)

    def _rows(self, table: Any, indexes: Any) -> Any:
        return self._ops.gather(table, indexes, self._ops.constant(np.int32(0)))

    def _constant(self, values: Any) -> Any:
        return self._ops.constant(np.ascontiguousarray(values), shared_memory=True)
