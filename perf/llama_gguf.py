"""A checkpoint as GGUF files, for llama.cpp to be measured on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trtpd.build.checkpoint import Checkpoint
from trtpd.build.families import FAMILIES
from trtpd.build.gguf_names import gguf_name
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import F32Array
from trtpd.errors import InputError

GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def write_gguf(checkpoint: Checkpoint, path: Path, kind: str) -> None:
    """Writes a Llama with its matrices in the GGUF type `kind` and its vectors in F32, one tensor in memory at a
    time where GGUF's writer allows it; whole or not at all. The vocabulary has names and no merges: prompts come as
    token ids. Raises InputError for another family than Llama."""
    import gguf

    arch = checkpoint.architecture
    if arch.family != "llama" or arch.rope_scaling is not None:
        raise InputError(f"{checkpoint.path}: only a Llama without rope scaling is written as GGUF")
    target = gguf.GGMLQuantizationType[kind]
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama", use_temp_file=True)
    _describe(writer, checkpoint)
    for name in expected_shapes(arch):
        values = _rows(name, checkpoint)
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else target
        data = gguf.quants.quantize(values, stored)
        writer.add_tensor(gguf_name(name, FAMILIES[arch.family]), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _describe(writer: Any, checkpoint: Checkpoint) -> None:
    arch = checkpoint.architecture
    writer.add_context_length(arch.max_position_embeddings)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_block_count(arch.num_hidden_layers)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_head_count(arch.num_attention_heads)
    writer.add_head_count_kv(arch.num_key_value_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.rms_norm_eps)
    writer.add_rope_freq_base(arch.rope_theta)
    writer.add_vocab_size(arch.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"token{index}" for index in range(arch.vocab_size)])
    writer.add_token_types([1] * arch.vocab_size)
    writer.add_token_merges(["t o"])
    end = checkpoint.end_ids[0] if checkpoint.end_ids else 0
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _rows(name: str, checkpoint: Checkpoint) -> F32Array:
    """GGUF interleaves the two halves of a query's or key's rotary dimensions."""
    values, arch = checkpoint.read(name), checkpoint.architecture
    heads = {"q_proj.weight": arch.num_attention_heads, "k_proj.weight": arch.num_key_value_heads}
    for suffix, count in heads.items():
        if name.endswith(suffix):
            rows, columns = values.shape
            turned = values.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2)
            return np.ascontiguousarray(turned.reshape(rows, columns))
    return values
