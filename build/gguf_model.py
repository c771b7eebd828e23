"""GGUF files of Llama models: their architecture, and their tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtpd.build.bounds import (
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_TOKENS,
    MOST_WIDE,
    checked_counts,
    refuse_further_layers,
)
from trtpd.build.manifest import Architecture
from trtpd.build.tensors import F32Array
from trtpd.errors import CheckpointError

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """A Hugging Face tensor's name in a GGUF file."""
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}"


def unpermute(rows: F32Array, heads: int) -> F32Array:
    """Undoes GGUF's reordering of q and k rows: it interleaves the two halves of a head's rotary
    dimensions."""
    out, columns = rows.shape
    half = out // heads // 2
    return rows.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(out, columns)


class GgufFile:
    """One GGUF file, mapped; tensors are dequantised when asked for. Raises CheckpointError for a file that
    is missing, truncated, not GGUF, or of another architecture than Llama."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error
        except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise CheckpointError(f"{path}: not a whole GGUF file ({error}); download it again") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._check_whole(path.stat().st_size)
        self.metadata: Mapping[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self.architecture = self._architecture()
        self._check_size()

    def _check_whole(self, size_bytes: int) -> None:
        for name, tensor in self._tensors.items():
            end = int(tensor.data_offset) + int(tensor.n_bytes)
            if end > size_bytes or tensor.data.nbytes != int(tensor.n_bytes):
                raise CheckpointError(
                    f"{self.path}: truncated: {name} ends at byte {end}, the file holds {size_bytes}; download it again"
                )

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value. Raises CheckpointError if it is missing and has no default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing from the GGUF metadata")
        return value

    def _architecture(self) -> Architecture:
        kind = self.field("general.architecture")
        if kind != "llama":
            raise CheckpointError(f"{self.path}: architecture {kind!r}; trtpd serves Llama models only")
        self._refuse_variants()
        hidden, heads = (
            int(self.field("llama.embedding_length")),
            int(self.field("llama.attention.head_count")),
        )
        if heads < 1:
            raise CheckpointError(f"{self.path}: llama.attention.head_count is {heads}")
        tokens = self.metadata.get("tokenizer.ggml.tokens", ())
        return Architecture(
            num_hidden_layers=int(self.field("llama.block_count")),
            hidden_size=hidden,
            intermediate_size=int(self.field("llama.feed_forward_length")),
            num_attention_heads=heads,
            num_key_value_heads=int(self.field("llama.attention.head_count_kv", heads)),
            head_dim=int(self.field("llama.attention.key_length", hidden // heads)),
            vocab_size=int(self.field("llama.vocab_size", len(tokens) or None)),
            rms_norm_eps=shortest(self.field("llama.attention.layer_norm_rms_epsilon")),
            rope_theta=shortest(self.field("llama.rope.freq_base", 10000.0)),
            max_position_embeddings=int(self.field("llama.context_length")),
            tie_word_embeddings="output.weight" not in self._tensors,
        )

    def _check_size(self) -> None:
        a = self.architecture
        checked_counts(
            self.path,
            {
                "llama.block_count": (a.num_hidden_layers, MOST_LAYERS),
                "llama.embedding_length": (a.hidden_size, MOST_WIDE),
                "llama.feed_forward_length": (a.intermediate_size, MOST_WIDE),
                "llama.attention.head_count": (a.num_attention_heads, MOST_WIDE),
                "llama.attention.head_count_kv": (a.num_key_value_heads, MOST_WIDE),
                "llama.attention.key_length": (a.head_dim, MOST_WIDE),
                "llama.vocab_size": (a.vocab_size, MOST_TOKENS),
                "llama.context_length": (a.max_position_embeddings, MOST_POSITIONS),
            },
        )
        refuse_further_layers(self.path, self._tensors, "blk.", a.num_hidden_layers)

    def _refuse_variants(self) -> None:
        experts = int(self.metadata.get("llama.expert_count", 0))
        if experts:
            raise CheckpointError(f"{self.path}: llama.expert_count is {experts}; mixtures of experts aren't served")
        scaling = self.metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise CheckpointError(f"{self.path}: rope scaling {scaling!r} isn't supported in a GGUF file")
        if "rope_freqs.weight" in self._tensors:
            raise CheckpointError(
                f"{self.path}: holds rope_freqs.weight (llama3 rope scaling without its numbers); "
                "use the model's Hugging Face folder instead"
            )
        bias = sorted(name for name in self._tensors if name.endswith(".bias"))
        if bias:
            raise CheckpointError(f"{self.path}: {bias[0]}: models with biases aren't supported")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by GGUF name, in Hugging Face's order of dimensions."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> F32Array:
        """A tensor by its Hugging Face name, dequantised, q and k rows in Hugging Face's order."""
        import gguf

        tensor = self._tensors[gguf_name(name)]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {tensor.name} is quantised as {tensor.tensor_type.name}, which can't be read"
            ) from error
        array = np.array(values, dtype=np.float32).reshape(shape)
        if name.endswith("q_proj.weight"):
            return unpermute(array, self.architecture.num_attention_heads)
        if name.endswith("k_proj.weight"):
            return unpermute(array, self.architecture.num_key_value_heads)
        return array


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))
