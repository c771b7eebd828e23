"""A decoder of any family as an OpenVINO graph over paged KV, built node by node from families.py's table.

One graph of dynamic shape serves ragged prefill, decode and mixed batches: the tokens of all sequences of a
step lie in one row, and the paged-attention node knows from its inputs which are whose.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from trtpd.build.families import FAMILIES
from trtpd.build.manifest import Architecture
from trtpd.build.shapes import FINAL_NORM, mlp_norm
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

    def attend(
        self, layer: int, query: Any, key: Any, value: Any, *, window: int | None = None, scale: float | None = None
    ) -> Any:
        """Writes this step's keys and values `[tokens, kv_heads * head_dim]` to the layer's KV and attends: to the
        last `window` tokens, a token's own included (None: to all), scores times `scale` (None: head_dim ** -0.5)."""
        shape = [-1, self._kv_heads, TOKENS_PER_BLOCK, self._head_dim]
        caches = [
            named(self._ops.parameter(shape, self._kv_type), name) for name in (key_input(layer), value_input(layer))
        ]
        scale = self._head_dim**-0.5 if scale is None else scale
        constants = self._constants(scale, window or 0)
        inputs = [query, key, value, *caches, *self.parameters[: len(PAGING_INPUTS)], *constants]
        node = self._node([tensor.output(0) for tensor in inputs])
        info = node.get_rt_info()
        info["num_k_heads"] = info["num_v_heads"] = self._kv_heads
        info["k_head_size"] = info["v_head_size"] = self._head_dim
        self.parameters.extend(caches)
        return node.output(0)

    def _constants(self, scale: float, window: int) -> list[Any]:
        """Inputs 9 to 27. All but the scale, the window (0: none) and the longest context switch off what we don't
        use: ALiBi, score aggregation, cache rotation, sparse attention, sinks and the rest."""
        constant = self._ops.constant
        zero = np.int32(0)
        no_ints, no_floats, no_bytes = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.uint8)
        before = [constant(np.float32(scale)), constant(np.int32(window)), constant(no_floats)]
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


def build_decoder(
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
    return _Decoder(openvino, architecture, weights, shard, kv_dtype, positions, sum_up).model()


class _Decoder:
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
        self._family = FAMILIES[architecture.family]
        self._windowed = frozenset(architecture.window_layers)
        self._weights = weights
        self._shard = shard
        self._all_reduce: Callable[[Any], Any] = _unchanged if sum_up is None else all_reduce_op(openvino, sum_up)
        self._paging = Paging(openvino, kv_heads=len(shard.kv_heads), head_dim=architecture.head_dim, kv_dtype=kv_dtype)
        self._ids, self._positions, self._sample_rows = (
            named(self._ops.parameter([-1], openvino.Type.i32), name) for name in ("ids", "positions", "sample_rows")
        )
        self._turns = self._turns_of(positions, windowed=False)
        own_turns = bool(self._windowed) and architecture.local_rope_theta is not None
        self._window_turns = self._turns_of(positions, windowed=True) if own_turns else self._turns

    def model(self) -> Any:
        hidden = self._rows(self._constant(self._weights.embedding()), self._ids)
        if self._family.scaled_embedding:
            hidden = self._times(hidden, self._arch.hidden_size**0.5)
        for layer in range(self._arch.num_hidden_layers):
            hidden = self._layer(layer, hidden)
        hidden = self._norm(FINAL_NORM, self._rows(hidden, self._sample_rows))
        logits = named(self._softcapped(self._project(hidden, self._weights.head())), "logits")
        inputs = [self._ids, self._positions, self._sample_rows, *self._paging.parameters]
        return self._openvino.Model([self._ops.result(logits)], inputs, self._arch.family)

    def _layer(self, layer: int, hidden: Any) -> Any:
        prefix = f"model.layers.{layer}."
        attended = self._all_reduce(self._attention(layer, self._norm(f"{prefix}input_layernorm.weight", hidden)))
        if self._family.post_norms:
            attended = self._norm(f"{prefix}post_attention_layernorm.weight", attended)
        hidden = self._ops.add(hidden, attended)
        normed = self._norm(prefix + mlp_norm(self._arch), hidden)
        changed = self._all_reduce(self._mlp(f"{prefix}mlp.", normed))
        if self._family.post_norms:
            changed = self._norm(f"{prefix}post_feedforward_layernorm.weight", changed)
        return self._ops.add(hidden, changed)

    def _attention(self, layer: int, hidden: Any) -> Any:
        arch, prefix = self._arch, f"model.layers.{layer}.self_attn."
        query_heads, kv_heads = len(self._shard.query_heads), len(self._shard.kv_heads)
        query_size, kv_size = query_heads * arch.head_dim, kv_heads * arch.head_dim
        query = self._biased(f"{prefix}q_proj", hidden, query_size, arch.hidden_size)
        key = self._biased(f"{prefix}k_proj", hidden, kv_size, arch.hidden_size)
        value = self._biased(f"{prefix}v_proj", hidden, kv_size, arch.hidden_size)
        windowed = layer in self._windowed
        turns = self._window_turns if windowed else self._turns
        attended = self._paging.attend(
            layer,
            self._rotate(query, query_heads, turns, f"{prefix}q_norm.weight"),
            self._rotate(key, kv_heads, turns, f"{prefix}k_norm.weight"),
            value,
            window=arch.sliding_window if windowed else None,
            scale=None if arch.query_pre_attn_scalar is None else arch.query_pre_attn_scalar**-0.5,
        )
        return self._linear(f"{prefix}o_proj.weight", attended, arch.hidden_size, query_size)

    def _mlp(self, prefix: str, hidden: Any) -> Any:
        inner, outer = len(self._shard.inner), self._arch.hidden_size
        gate = self._activate(self._linear(f"{prefix}gate_proj.weight", hidden, inner, outer))
        up = self._linear(f"{prefix}up_proj.weight", hidden, inner, outer)
        return self._linear(f"{prefix}down_proj.weight", self._ops.multiply(gate, up), outer, inner)

    def _activate(self, hidden: Any) -> Any:
        return self._ops.swish(hidden) if self._family.activation == "silu" else self._ops.gelu(hidden, "tanh")

    def _rotate(self, flat: Any, heads: int, turns: tuple[Any, Any], norm: str) -> Any:
        """Turns each head's first half against its second, `[tokens, heads * head_dim]` in and out, after that norm
        where the family has one."""
        ops = self._ops
        (cos, sin), size = turns, heads * self._arch.head_dim
        split = ops.reshape(flat, ops.constant(np.array([-1, heads, self._arch.head_dim], np.int32)), False)
        if self._arch.qk_norm:
            split = self._norm(norm, split, self._arch.head_dim, axes=3)
        halves = ops.split(split, ops.constant(np.int32(2)), 2)
        first, second = halves.output(0), halves.output(1)
        turned = ops.concat(
            [
                ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin)),
                ops.add(ops.multiply(second, cos), ops.multiply(first, sin)),
            ],
            2,
        )
        return ops.reshape(turned, ops.constant(np.array([-1, size], np.int32)), False)

    def _turns_of(self, positions: int, *, windowed: bool) -> tuple[Any, Any]:
        """cos and sin of the step's tokens."""
        one = self._ops.constant(np.int32(1))
        cos, sin = (
            self._ops.unsqueeze(self._rows(self._constant(table), self._positions), one)
            for table in tables(self._arch, positions, windowed=windowed)
        )
        return cos, sin

    def _norm(self, name: str, hidden: Any, size: int | None = None, *, axes: int = 2) -> Any:
        """RMSNorm over the last of `axes`, of `size` (None: the hidden size), in the shape the CPU plugin fuses."""
        ops = self._ops
        leading = (1,) * axes
        square = ops.power(hidden, ops.constant(np.full(leading, 2.0, np.float32)))
        mean = ops.reduce_mean(square, ops.constant(np.full(1, -1, np.int32)), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.full(leading, self._arch.rms_norm_eps, np.float32))))
        scaled = ops.multiply(hidden, ops.divide(ops.constant(np.ones(leading, np.float32)), root))
        weight = self._weights.vector(name, self._arch.hidden_size if size is None else size)
        if self._family.norm_offset:
            weight = weight + np.float32(self._family.norm_offset)
        return ops.multiply(scaled, self._constant(weight.reshape(*leading[1:], -1)))

    def _times(self, values: Any, factor: float) -> Any:
        return self._ops.multiply(values, self._ops.constant(np.full((1, 1), factor, np.float32)))

    def _softcapped(self, logits: Any) -> Any:
        cap = self._arch.final_logit_softcapping
        return logits if cap is None else self._times(self._ops.tanh(self._times(logits, 1 / cap)), cap)

    def _biased(self, name: str, hidden: Any, rows: int, columns: int) -> Any:
        projected = self._linear(f"{name}.weight", hidden, rows, columns)
        if not self._arch.attention_bias:
            return projected
        return self._ops.add(projected, self._constant(self._weights.bias(f"{name}.bias", rows)[None, :]))

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
