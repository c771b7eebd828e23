"""A checkpoint as GGUF files, for llama.cpp to be measured on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trtpd.build.checkpoint import Checkpoint
from trtpd.build.decoding import plain_json
from trtpd.build.families import FAMILIES
from trtpd.build.gguf_names import gguf_name
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import F32Array
from trtpd.errors import InputError

GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
PLAIN, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""GGUF's types of tokens."""


def write_gguf(checkpoint: Checkpoint, path: Path, kind: str, *, tokenizer: bool = False) -> None:
    """Writes a Llama with its matrices in the GGUF type `kind` and its vectors in F32, one tensor in memory at a
    time where GGUF's writer allows it; whole or not at all. With `tokenizer` it takes text, by the checkpoint's own
    byte-level BPE; else the vocabulary has names and no merges, and prompts come as token ids. Raises InputError for
    another family than Llama, or another tokenizer."""
    import gguf

    arch = checkpoint.architecture
    if arch.family != "llama" or arch.rope_scaling is not None:
        raise InputError(f"{checkpoint.path}: only a Llama without rope scaling is written as GGUF")
    target = gguf.GGMLQuantizationType[kind]
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama", use_temp_file=True)
    _describe(writer, checkpoint)
    if tokenizer:
        _add_tokenizer(writer, checkpoint)
    else:
        _add_names(writer, checkpoint)
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
    end = checkpoint.end_ids[0] if checkpoint.end_ids else 0
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _add_names(writer: Any, checkpoint: Checkpoint) -> None:
    vocab_size = checkpoint.architecture.vocab_size
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"token{index}" for index in range(vocab_size)])
    writer.add_token_types([PLAIN] * vocab_size)
    writer.add_token_merges(["t o"])


def _add_tokenizer(writer: Any, checkpoint: Checkpoint) -> None:
    """From tokenizer.json: byte-level BPE, with or without digits one by one (gpt-2, smollm)."""
    path = checkpoint.path / "tokenizer.json"
    try:
        found = plain_json(path.read_bytes())
        vocab, merges, added = found["model"]["vocab"], found["model"]["merges"], found["added_tokens"]
        steps = found["pre_tokenizer"].get("pretokenizers", [found["pre_tokenizer"]])
        kinds = [step["type"] for step in steps]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a byte-level BPE tokenizer ({error!r})") from error
    if kinds not in (["ByteLevel"], ["Digits", "ByteLevel"]):
        raise InputError(f"{path}: cuts text by {', '.join(kinds)}; only gpt-2's and SmolLM's ways are written as GGUF")
    vocab_size = checkpoint.architecture.vocab_size
    tokens, types = [f"<unused{index}>" for index in range(vocab_size)], [UNUSED] * vocab_size
    for token, index in vocab.items():
        tokens[index], types[index] = token, PLAIN
    for one in added:
        tokens[one["id"]], types[one["id"]] = one["content"], CONTROL if one["special"] else USER_DEFINED
    writer.add_tokenizer_pre("smollm" if "Digits" in kinds else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


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
