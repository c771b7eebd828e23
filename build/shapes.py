"""The weights of a model: their Hugging Face names and shapes, from the family's table and the architecture. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trtpd.build.families import FAMILIES
from trtpd.build.manifest import Architecture

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(architecture: Architecture) -> Shapes:
    """Every weight of a model with its shape, in the order of computation (scales of quantised ones not)."""
    a = architecture
    shapes: Shapes = {EMBEDDING: (a.vocab_size, a.hidden_size)}
    for layer in range(a.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(a)}
    shapes[FINAL_NORM] = (a.hidden_size,)
    if not a.tie_word_embeddings:
        shapes[HEAD] = (a.vocab_size, a.hidden_size)
    return shapes


def mlp_norm(architecture: Architecture) -> str:
    """The norm before a layer's MLP: what Hugging Face calls post_attention_layernorm is that norm in most families,
    and the one that follows attention in those with post norms."""
    post_norms = FAMILIES[architecture.family].post_norms
    return "pre_feedforward_layernorm.weight" if post_norms else "post_attention_layernorm.weight"


def _layer(a: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    norm = (a.hidden_size,)
    yield "input_layernorm.weight", norm
    for part, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"self_attn.{part}_proj.weight", (rows, a.hidden_size)
        if a.attention_bias:
            yield f"self_attn.{part}_proj.bias", (rows,)
    if a.qk_norm:
        yield from ((f"self_attn.{part}_norm.weight", (a.head_dim,)) for part in "qk")
    yield "self_attn.o_proj.weight", (a.hidden_size, q)
    yield "post_attention_layernorm.weight", norm
    if FAMILIES[a.family].post_norms:
        yield mlp_norm(a), norm
    yield "mlp.gate_proj.weight", (a.intermediate_size, a.hidden_size)
    yield "mlp.up_proj.weight", (a.intermediate_size, a.hidden_size)
    yield "mlp.down_proj.weight", (a.hidden_size, a.intermediate_size)
    if FAMILIES[a.family].post_norms:
        yield "post_feedforward_layernorm.weight", norm
