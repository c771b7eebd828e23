from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from trtpd_testing.gguf_files import write_gguf
from trtpd_testing.tiny import CONFIG, random_weights

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.gguf_model import GgufFile
from trtpd.errors import CheckpointError


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_tensor_comes_back_as_it_was_before_the_conversion(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", weights))
    for name, array in weights.items():
        assert np.array_equal(checkpoint.read(name), array), name


def test_the_architecture_is_the_one_of_the_hugging_face_config(tmp_path: Path) -> None:
    architecture = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG))).architecture
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"):
        assert getattr(architecture, key) == CONFIG[key]
    assert architecture.rms_norm_eps == CONFIG["rms_norm_eps"]


def test_a_checkpoint_is_named_after_its_file_and_ends_at_its_eos(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG)))
    assert (checkpoint.name, checkpoint.end_ids) == ("tiny", (0,))


def test_quantised_rows_are_unpermuted_after_dequantising(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 8), (writer.add_embedding_length, 32), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32), (writer.add_head_count, 1), (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, 4),
    ):  # fmt: skip
        add(value)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "q.gguf").read("model.layers.0.self_attn.q_proj.weight")
    exact = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(found, exact[[0, 2, 1, 3]])


@pytest.mark.parametrize("kept", [0, 3, 40, 2000])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG))
    path.write_bytes(path.read_bytes()[:kept])
    assert "tiny.gguf" in refusal(path)


def test_a_file_without_its_last_bytes_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG))
    path.write_bytes(path.read_bytes()[:-40])
    assert "download it again" in refusal(path)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG), architecture="qwen2")
    assert "'qwen2'" in refusal(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    ],
)
def test_variants_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in refusal(write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG), fields=fields))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias"])
def test_tensors_that_change_the_model_are_refused(tmp_path: Path, name: str) -> None:
    extra = {name: np.ones(4, np.float32)}
    assert name in refusal(write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG), extra=extra))


def test_layers_beyond_the_stated_number_are_refused(tmp_path: Path) -> None:
    extra = {"blk.2.attn_norm.weight": np.ones(4, np.float32)}
    message = refusal(write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG), extra=extra))
    assert "holds tensors of 3 layers, but its configuration says 2" in message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    del weights["model.norm.weight"]
    assert "model.norm.weight is missing" in refusal(write_gguf(tmp_path / "tiny.gguf", weights))
