"""Hand-made GGUF files: rows of q and k are interleaved here one by one, so that undoing it is checked against the
definition and not against its own inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from trtpd.build.families import FAMILIES, Family
from trtpd.build.gguf_names import gguf_name
from trtpd_testing.tiny import CONFIG, Weights

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SPECIAL = ["<|end|>", "<|start|>", "<tool>"]


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row `half * size/2 + i` of each head goes to row `2 * i + half`."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for half in range(2):
            for index in range(size // 2):
                out[head * size + 2 * index + half] = rows[head * size + half * (size // 2) + index]
    return out


def vocabulary(size: int = CONFIG["vocab_size"]) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a byte-level tokenizer that knows "ab" and digits in pairs."""
    alphabet = sorted("abcdefghijklmnopqrstuvwxyz0123Ġ!")
    merges = ["a b", "1 2", "Ġ a"]
    tokens = [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in merges)]
    types = [3, 3, 4, *([1] * (len(tokens) - len(SPECIAL)))]
    padding = size - len(tokens)
    return tokens + [f"<pad{i}>" for i in range(padding)], merges, types + [5] * padding


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    architecture: str = "llama",
    fields: dict[str, Any] | None = None,
    extra: Weights | None = None,
) -> Path:
    """A file with CONFIG's numbers."""
    return _write(path, CONFIG, weights, FAMILIES["llama"], architecture, fields or {}, extra or {}, {})


def write_family_gguf(
    path: Path,
    family: str,
    config: dict[str, Any],
    weights: Weights,
    *,
    fields: dict[str, Any] | None = None,
    extra: Weights | None = None,
    kinds: dict[str, str] | None = None,
) -> Path:
    """A file of that family with `config`'s numbers, as llama.cpp's converter makes it; `kinds` says by a part of
    their names which tensors are quantised and how."""
    table = FAMILIES[family]
    architecture = table.gguf or "llama"
    return _write(path, config, weights, table, architecture, fields or {}, extra or {}, kinds or {})


def _write(
    path: Path,
    config: dict[str, Any],
    weights: Weights,
    family: Family,
    architecture: str,
    fields: dict[str, Any],
    extra: Weights,
    kinds: dict[str, str],
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config and family.name != "llama":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if family.name != "llama":
        writer.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(writer, fields, config["vocab_size"])
    for name, array in weights.items():
        rows = array
        if family.gguf_interleaved and "q_proj" in name:
            rows = interleaved(array, config["num_attention_heads"])
        elif family.gguf_interleaved and "k_proj" in name:
            rows = interleaved(array, config["num_key_value_heads"])
        elif family.name == "gemma3" and name.endswith("norm.weight"):
            rows = array + np.float32(1)
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        _add(writer, gguf_name(name, family), np.ascontiguousarray(rows), kind)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, rows: np.ndarray[Any, Any], kind: str | None) -> None:
    if kind is None:
        writer.add_tensor(name, rows)
        return
    of = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(rows, of), raw_dtype=of)


def add_tokenizer(writer: Any, fields: dict[str, Any], size: int) -> None:
    tokens, merges, types = vocabulary(size)
    writer.add_tokenizer_model(fields.pop("model", "gpt2"))
    writer.add_tokenizer_pre(fields.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in fields.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
