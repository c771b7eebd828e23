"""Which decoders trtpd knows, by the class their config.json names, and which of them an engine takes.

FAMILIES is the one table that says how they differ: the names and shapes of their weights (shapes.py), the graph and
the reading of config.json and GGUF files follow from it and from the numbers of an Architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_pytorch_tanh"]
WindowRule = Literal["none", "all", "switched", "pattern"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of decoder; the defaults are Llama's.

    Weights: `attention_bias`, biases of q, k and v · `qk_norm`, a norm of q and k per head, before they are turned ·
    `post_norms`, a norm of what attention and MLP give, before it is added.
    Computing: `norm_offset` is added to the weight of every norm · `scaled_embedding`, embeddings times the root of
    the hidden size · `activation` of the MLP, by Hugging Face's name.
    Configuration: `model_type` · `activation_key` · `tied`, `rope_theta`, `head_dim` (None: hidden size / heads),
    `sliding_window` and `query_pre_attn_scalar` (None: the family has none), where a config.json says nothing ·
    `window_rule`, which layers have the sliding window: "none"; "all"; "switched", those from `max_window_layers` on
    if `use_sliding_window`; "pattern", all but every `sliding_window_pattern`th · `local_rope_theta`, the default
    rotary base of those layers, None if they share the model's.
    `gguf`: its name in GGUF files, None if it has none of its own there · `gguf_interleaved`: they reorder q and k.
    """

    name: str
    model_class: str
    model_type: str
    attention_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    tied: bool = False
    rope_theta: float = 10_000.0
    head_dim: int | None = None
    sliding_window: int | None = None
    query_pre_attn_scalar: float | None = None
    window_rule: WindowRule = "none"
    local_rope_theta: float | None = None
    gguf: str | None = None
    gguf_interleaved: bool = False


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="llama", model_class="LlamaForCausalLM", model_type="llama", gguf="llama", gguf_interleaved=True),
        Family(
            name="mistral",
            model_class="MistralForCausalLM",
            model_type="mistral",
            window_rule="all",
            sliding_window=4096,
            gguf_interleaved=True,
        ),
        Family(
            name="qwen2",
            model_class="Qwen2ForCausalLM",
            model_type="qwen2",
            attention_bias=True,
            window_rule="switched",
            sliding_window=4096,
            gguf="qwen2",
        ),
        Family(
            name="qwen3",
            model_class="Qwen3ForCausalLM",
            model_type="qwen3",
            qk_norm=True,
            window_rule="switched",
            sliding_window=4096,
            gguf="qwen3",
        ),
        Family(
            name="gemma3",
            model_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            qk_norm=True,
            post_norms=True,
            norm_offset=1.0,
            scaled_embedding=True,
            activation="gelu_pytorch_tanh",
            activation_key="hidden_activation",
            tied=True,
            rope_theta=1_000_000.0,
            head_dim=256,
            query_pre_attn_scalar=256.0,
            window_rule="pattern",
            sliding_window=4096,
            local_rope_theta=10_000.0,
            gguf="gemma3",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """The models an engine takes: `families`; `windows`, those with sliding windows; `rope_types`, beside plain rotary
    embedding, by the tags of manifest.RopeScaling; `softcapped`, those with softcapped logits; `quantised`, those with
    weights stored in FP8."""

    families: tuple[str, ...] = tuple(FAMILIES)
    windows: bool = True
    rope_types: tuple[str, ...] = ("linear", "llama3", "yarn", "factors")
    softcapped: bool = True
    quantised: bool = False


OWN_GRAPH = ModelRules()
"""The embedded engine's, whose graph is built from the table."""

CONVERTED = ModelRules(
    families=("llama", "mistral", "qwen2", "qwen3"),
    windows=False,
    rope_types=("llama3",),
    softcapped=False,
    quantised=True,
)
"""Those converted for TensorRT-LLM."""
