"""A decoder of any family as an OpenVINO graph over paged KV, built node by node from families.py's table.

One graph of dynamic shape serves ragged prefill, decode and mixed batches: the tokens of all sequences of a
step lie in one row, and the paged-attention node knows from its inputs which are whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

DECOMPRESSION = "decompression_0"
"""Marks a conversion that the CPU plugin must not carry out once for all at compile time."""

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
        self._nodes = openvino.Node
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
        node = self._node([tensor.output(0) if isinstance(tensor, self._nodes) else tensor for tensor in inputs])
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
    widen: bool = False,
    sum_up: Sum | None = None,
) -> Any:
    """A rank's model: INT_INPUTS, MAX_CONTEXT_INPUT and each layer's KV in, f32 logits `[sample_rows, its vocabulary]`
    out. The constants share memory with `weights` and arrays they keep alive. `positions` bounds a sequence's length.

    Weights are kept as narrow as they are stored and widened as they are used; at once with `widen`, and on a CPU that
    computes in bf16, which narrows them its own way.

    `sum_up` is needed where the shard is a part: it is called ALL_REDUCES_PER_LAYER times a layer, in the same order
    on every rank."""
    return _Decoder(openvino, architecture, weights, shard, kv_dtype, positions, widen, sum_up).model()


class _Decoder:
    def __init__(
        self,
        openvino: ModuleType,
        architecture: Architecture,
        weights: Weights,
        shard: Shard,
        kv_dtype: KVDtype,
        positions: int,
        widen: bool,
        sum_up: Sum | None,
    ) -> None:
        self._openvino = openvino
        self._ops = openvino.opset13
        self._arch = architecture
        self._family = FAMILIES[architecture.family]
        self._windowed = frozenset(architecture.window_layers)
        self._weights = weights
        self._shard = shard
        self._widens, self._computes_in_bf16 = widen, kv_dtype == "bf16"
        self._all_reduce: Callable[[Any], Any] = _unchanged if sum_up is None else all_reduce_op(openvino, sum_up)
        self._paging = Paging(openvino, kv_heads=len(shard.kv_heads), head_dim=architecture.head_dim, kv_dtype=kv_dtype)
        self._ids, self._positions, self._sample_rows = (
            named(self._ops.parameter([-1], openvino.Type.i32), name) for name in ("ids", "positions", "sample_rows")
        )
        self._turns = self._turns_of(positions, windowed=False)
        own_turns = bool(self._windowed) and architecture.local_rope_theta is not None
        self._window_turns = self._turns_of(positions, windowed=True) if own_turns else self._turns

    def model(self) -> Any:
        hidden = self._rows(self._weight(self._weights.embedding(), widen=False), self._ids)
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
        names = [f"{prefix}{part}_proj" for part in "qkv"]
        sizes = [query_size, kv_size, kv_size]
        projected = zip(names, self._stacked(names, hidden, sizes), sizes, strict=True)
        query, key, value = (self._biased(name, output, size) for name, output, size in projected)
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
        gate, up = self._stacked([f"{prefix}gate_proj", f"{prefix}up_proj"], hidden, [inner, inner])
        changed = self._ops.multiply(self._activate(gate), up)
        return self._linear(f"{prefix}down_proj.weight", changed, outer, inner)

    def _activate(self, hidden: Any) -> Any:
        return self._ops.swish(hidden) if self._family.activation == "silu" else self._ops.gelu(hidden, "tanh")

    def _rotate(self, flat: Any, heads: int, turns: tuple[Any, Any], norm: str) -> Any:
        """Turns each head's first half against its second, `[tokens, heads * head_dim]` in and out, after that norm
        where the family has one; in the shape the CPU plugin fuses."""
        ops, head_dim = self._ops, self._arch.head_dim
        cos, sin = turns
        split = ops.reshape(flat, ops.constant(np.array([-1, heads, 1, head_dim], np.int32)), False)
        if self._arch.qk_norm:
            split = self._norm(norm, split, head_dim, axes=4)
        half = ops.constant(np.full(2, head_dim // 2, np.int64))
        halves = ops.variadic_split(split, ops.constant(np.int64(3)), half)
        first, second = halves.output(0), halves.output(1)
        minus_one = ops.constant(np.full((1, 1, 1, 1), -1.0, np.float32))
        turned = ops.concat([ops.multiply(second, minus_one), first], -1)
        rotated = ops.add(ops.multiply(split, cos), ops.multiply(turned, sin))
        return ops.reshape(rotated, ops.constant(np.array([-1, heads * head_dim], np.int32)), False)

    def _turns_of(self, positions: int, *, windowed: bool) -> tuple[Any, Any]:
        """cos and sin of the step's tokens, `[tokens, 1, 1, head_dim]`."""
        shape = self._ops.constant(np.array([-1, 1, 1, self._arch.head_dim], np.int32))
        cos, sin = (
            self._ops.reshape(
                self._rows(self._constant(np.concatenate([table, table], axis=1)), self._positions), shape, False
            )
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

    def _biased(self, name: str, projected: Any, rows: int) -> Any:
        if not self._arch.attention_bias:
            return projected
        return self._ops.add(projected, self._constant(self._weights.bias(f"{name}.bias", rows)[None, :]))

    def _stacked(self, names: Sequence[str], hidden: Any, rows: Sequence[int]) -> list[Any]:
        """Several projections of the same input, computed as one."""
        matrix = self._weights.stacked([f"{name}.weight" for name in names], rows, self._arch.hidden_size)
        ops = self._ops
        lengths = ops.constant(np.array(rows, np.int32))
        split = ops.variadic_split(self._project(hidden, matrix), ops.constant(np.int32(1)), lengths)
        return [split.output(index) for index in range(len(names))]

    def _linear(self, name: str, hidden: Any, rows: int, columns: int) -> Any:
        return self._project(hidden, self._weights.matrix(name, rows, columns))

    def _project(self, hidden: Any, matrix: Matrix) -> Any:
        return self._ops.matmul(hidden, self._weight(matrix, widen=self._widens), False, True)

    def _weight(self, matrix: Matrix, *, widen: bool) -> Any:
        """f32, computed from what is stored as it is used."""
        if matrix.type == "f32" or widen or (self._computes_in_bf16 and matrix.scales is None):
            return self._constant(matrix.widened())
        if matrix.type == "int4":
            return self._grouped(matrix)
        if matrix.type == "bf16":
            values = np.ascontiguousarray(matrix.values)
            tensor = self._openvino.Tensor(values, self._openvino.Shape(values.shape), self._openvino.Type.bf16)
            stored = self._openvino.op.Constant(tensor, True)
        else:
            stored = self._constant(matrix.values)
        widened = self._ops.convert(stored, "f32")
        if matrix.scales is not None:
            return self._ops.multiply(widened, self._constant(matrix.scales))
        widened.get_rt_info()[DECOMPRESSION] = ""
        return widened

    def _grouped(self, matrix: Matrix) -> Any:
        """f32 of packed int4 in the shape that the CPU plugin takes into the product: scaled with groups as an axis."""
        assert matrix.scales is not None, "int4 always has scales"
        (rows, packed), groups = matrix.values.shape, matrix.scales.shape[1]
        shape = self._openvino.Shape([rows, groups, 2 * packed // groups])
        tensor = self._openvino.Tensor(np.ascontiguousarray(matrix.values), shape, self._openvino.Type.i4)
        values = self._ops.convert(self._openvino.op.Constant(tensor, True), "f32")
        scaled = self._ops.multiply(values, self._constant(matrix.scales[:, :, None]))
        return self._ops.reshape(scaled, self._ops.constant(np.array([rows, 2 * packed], np.int32)), False)

    def _rows(self, table: Any, indexes: Any) -> Any:
        return self._ops.gather(table, indexes, self._ops.constant(np.int32(0)))

    def _constant(self, values: Any) -> Any:
        return self._ops.constant(np.ascontiguousarray(values), shared_memory=True)
