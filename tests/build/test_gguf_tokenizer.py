from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from trtpd_testing.gguf_files import CHAT_TEMPLATE, write_gguf
from trtpd_testing.tiny import CONFIG, random_weights

from trtpd.build.gguf_model import GgufFile
from trtpd.build.gguf_tokenizer import build_tokenizer, write_tokenizer
from trtpd.errors import CheckpointError


def gguf_with(tmp_path: Path, **fields: Any) -> GgufFile:
    return GgufFile(write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG), fields=fields))


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text).tokens)


def test_smollm_takes_digits_one_by_one(tmp_path: Path) -> None:
    assert tokens(build_tokenizer(gguf_with(tmp_path)), "ab12") == ["ab", "1", "2"]


def test_gpt2_merges_digits(tmp_path: Path) -> None:
    assert tokens(build_tokenizer(gguf_with(tmp_path, pre="gpt-2")), "ab12") == ["ab", "12"]


def test_llama_puts_its_first_token_in_front(tmp_path: Path) -> None:
    assert tokens(build_tokenizer(gguf_with(tmp_path, pre="llama-bpe")), "ab12") == ["<|start|>", "ab", "12"]


def test_control_tokens_are_special_and_user_tokens_are_not(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(gguf_with(tmp_path))
    ids = tokenizer.encode("<|start|>ab<tool><|end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>ab<tool><|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>"


def test_text_survives_the_way_there_and_back(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(gguf_with(tmp_path))
    assert tokenizer.decode(tokenizer.encode(" ab ab!").ids) == " ab ab!"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("pre", "tekken", "tokenizer.ggml.pre is 'tekken'"), ("model", "bert", "tokenizer.ggml.model is 'bert'")],
)
def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path, field: str, value: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        build_tokenizer(gguf_with(tmp_path, **{field: value}))


def test_the_written_files_hold_template_and_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(gguf_with(tmp_path), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|start|>", "<|end|>")
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    assert tokens(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), "ab") == ["ab"]


def test_qwen_composes_characters_and_takes_digits_one_by_one(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(gguf_with(tmp_path, pre="qwen2"))
    assert tokens(tokenizer, "ab12") == ["ab", "1", "2"]
    assert tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"


PIECES = [
    ("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x0A>", 0.0, 6), ("<0xC3>", 0.0, 6), ("<0xA9>", 0.0, 6), ("  ", 0.0, 4),
    ("\u2581", -9.0, 1), ("a", -9.0, 1), ("b", -9.0, 1), ("ab", -3.0, 1), ("\u2581a", -2.0, 1), ("\u2581ab", -4.0, 1),
    ("ba", -1.0, 1),
]  # fmt: skip


def sentencepiece(tmp_path: Path, **fields: Any) -> Tokenizer:
    names, scores, types = zip(*PIECES, strict=True)
    fields = {"bos_token_id": 1, "unknown_token_id": 0, "add_space_prefix": False} | fields
    metadata = {"tokens": list(names), "scores": list(scores), "token_type": list(types), "model": "llama", **fields}
    gguf = gguf_with(tmp_path)
    gguf.metadata = {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": it for key, it in metadata.items()}
    return build_tokenizer(gguf)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["ab"]),
        ("aba", ["a", "ba"]),
        (" ab", ["\u2581ab"]),
        ("a ab", ["a", "\u2581ab"]),
        ("a  b", ["a", "  ", "b"]),
        ("b\n\u00e9", ["b", "<0x0A>", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_merges_the_best_score_first_and_falls_back_to_bytes(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokens(tokenizer, text) == ["<s>", *expected]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_puts_a_space_in_front_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=True, add_bos_token=False)
    assert tokens(tokenizer, "ab") == ["\u2581ab"]
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bos_token_id": 99}, "bos_token_id is 99; it must be one of 13 tokens"),
        ({"tokens": 4}, "tokenizer.ggml.tokens is no list of str"),
        ({"scores": ["a"]}, "scores is no list of float"),
        ({"scores": [0.0]}, "contradictory"),
        ({"token_type": [1]}, "13 tokens and 1 token types"),
    ],
)
def test_a_contradictory_vocabulary_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        sentencepiece(tmp_path, **fields)
