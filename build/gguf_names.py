"""Names of tensors in GGUF files. Pure."""

from __future__ import annotations

from trtpd.build.families import Family
from trtpd.build.shapes import EMBEDDING, FINAL_NORM, HEAD

ROPE_FACTORS = "rope_freqs.weight"
HEAD_TENSOR = "output.weight"

_OUTER = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: HEAD_TENSOR}
_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, family: Family) -> str:
    """A Hugging Face tensor's name in a GGUF file of that family."""
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    known = _MODULES | (_POST_NORMS if family.post_norms else _NORMS)
    return f"blk.{layer}.{known[module]}.{kind}"
