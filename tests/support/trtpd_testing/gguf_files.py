"""Hand-made GGUF files: rows of q and k are interleaved here one by one, so that undoing it is checked against the
definition and not against its own inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from trtpd.build.gguf_model import gguf_name
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


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a byte-level tokenizer that knows "ab" and digits in pairs."""
    alphabet = sorted("abcdefghijklmnopqrstuvwxyz0123Ġ!")
    merges = ["a b", "1 2", "Ġ a"]
    tokens = [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in merges)]
    types = [3, 3, 4, *([1] * (len(tokens) - len(SPECIAL)))]
    padding = CONFIG["vocab_size"] - len(tokens)
    return tokens + [f"<pad{i}>" for i in range(padding)], merges, types + [5] * padding


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    architecture: str = "llama",
    quantise_mlp: bool = False,
    fields: dict[str, Any] | None = None,
    extra: Weights | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_vocab_size(CONFIG["vocab_size"])
    add_tokenizer(writer, fields or {})
    for name, array in weights.items():
        rows = array
        if "q_proj" in name:
            rows = interleaved(array, CONFIG["num_attention_heads"])
        elif "k_proj" in name:
            rows = interleaved(array, CONFIG["num_key_value_heads"])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(rows))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any, fields: dict[str, Any]) -> None:
    tokens, merges, types = vocabulary()
    writer.add_tokenizer_model(fields.pop("model", "gpt2"))
    writer.add_tokenizer_pre(fields.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)
