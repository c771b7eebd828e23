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
    [("pre", "qwen2", "tokenizer.ggml.pre is 'qwen2'"), ("model", "llama", "tokenizer.ggml.model is 'llama'")],
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
