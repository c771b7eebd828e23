"""What each kind of engine can do, as facts that the pipeline file is checked and completed against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from trtpd.build.families import CONVERTED, OWN_GRAPH, ModelRules
from trtpd.build.gpus import WEIGHT_BYTES
from trtpd.build.manifest import Architecture, Precision
from trtpd.kv_transfer.layout import KVDtype, KVLayout

EngineName = Literal["openvino", "tensorrt_llm", "emulated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """`kv_dtypes` maps each KV dtype to the CPU feature it needs (None: none). `tokens_per_block` None: any.

    `pool_tokens` is the size of a KV pool that nobody asked otherwise; an engine that isn't on the CPU sizes it by
    its GPU.
    """

    kv_dtypes: Mapping[KVDtype, str | None]
    tokens_per_block: tuple[int, ...] | None
    default_tokens_per_block: int
    pool_tokens: int
    has_weights: bool = True
    on_cpu: bool = True
    models: ModelRules = OWN_GRAPH
    precisions: tuple[Precision, ...] = ("f32", "bf16", "f16", "int8", "int4")
    emulated_layout: KVLayout | None = field(default=None)


ENGINES: dict[EngineName, EngineRules] = {
    # Measured: without the CPU feature the paged-attention node returns garbage for that KV dtype, silently.
    "openvino": EngineRules(
        kv_dtypes={"f32": None, "bf16": "bf16", "f16": "fp16"},
        tokens_per_block=(32,),
        default_tokens_per_block=32,
        pool_tokens=16_384,
    ),
    "tensorrt_llm": EngineRules(
        kv_dtypes={"f32": None, "bf16": None, "f16": None, "fp8": None},
        tokens_per_block=(16, 32, 64, 128),
        default_tokens_per_block=32,
        pool_tokens=1_048_576,
        on_cpu=False,
        models=CONVERTED,
        precisions=("f32", "bf16", "f16", "int8", "fp8"),
    ),
    "emulated": EngineRules(
        kv_dtypes={"f32": None, "bf16": None, "f16": None},
        tokens_per_block=None,
        default_tokens_per_block=16,
        pool_tokens=131_072,
        has_weights=False,
        emulated_layout=KVLayout(num_layers=2, kv_heads=2, head_dim=16, tokens_per_block=16, dtype="f32"),
    ),
}


def engine_layout(
    engine: EngineName, architecture: Architecture, *, tokens_per_block: int, dtype: KVDtype, tp: int
) -> KVLayout:
    """The KV layout an engine has for a model."""
    if emulated := ENGINES[engine].emulated_layout:
        return replace(emulated, tokens_per_block=tokens_per_block, dtype=dtype, tp=tp)
    return KVLayout(
        num_layers=architecture.num_hidden_layers,
        kv_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        tokens_per_block=tokens_per_block,
        dtype=dtype,
        tp=tp,
    )


def pool_bytes(layout: KVLayout, blocks: int) -> int:
    """Shared memory that one instance's KV pools take, all ranks together; a head that several ranks hold counts for
    each."""
    held = sum(len(layout.rank_heads(rank)) for rank in range(layout.tp))
    return blocks * layout.tokens_per_block * layout.bytes_per_token // layout.kv_heads * held


def engine_architecture(engine: EngineName, architecture: Architecture) -> Architecture:
    """The architecture an engine computes: the model's own, or one just as large as an emulated KV layout."""
    layout = ENGINES[engine].emulated_layout
    if layout is None:
        return architecture
    return msgspec.structs.replace(
        architecture,
        num_hidden_layers=layout.num_layers,
        num_attention_heads=layout.kv_heads,
        num_key_value_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        hidden_size=layout.kv_heads * layout.head_dim,
        intermediate_size=4 * layout.kv_heads * layout.head_dim,
        rope_scaling=None,
        sliding_window=None,
        window_layers=(),
    )


def weights_bytes(engine: EngineName, architecture: Architecture, precision: Precision, tp: int) -> int:
    """About how much memory one instance's weights take, all ranks together."""
    if not ENGINES[engine].has_weights:
        return 0
    a = architecture
    attention = 2 * a.hidden_size * a.head_dim * (a.num_attention_heads + a.num_key_value_heads)
    layer = attention + 3 * a.hidden_size * a.intermediate_size
    embedding = a.vocab_size * a.hidden_size
    if not ENGINES[engine].on_cpu:
        # The head is stored beside the embedding even if they are tied, and neither is quantised.
        linear = a.num_hidden_layers * layer * WEIGHT_BYTES[precision]
        return int(linear + 2 * embedding * max(2, WEIGHT_BYTES[precision]))
    quantised = precision in ("int8", "int4")
    heads = 1 if not a.tie_word_embeddings or quantised else 0
    linear = a.num_hidden_layers * layer * WEIGHT_BYTES[precision]
    head = heads * embedding * (1 if quantised else WEIGHT_BYTES[precision])
    return int(linear + head + tp * embedding * max(2, WEIGHT_BYTES[precision]))
