from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.families import CONFIGS
from trtpd_testing.gguf_files import write_family_gguf, write_gguf
from trtpd_testing.tiny import CONFIG, family_weights, random_weights

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.families import CONVERTED, FAMILIES
from trtpd.build.gguf_model import GgufFile
from trtpd.build.hf_config import architecture_from_config
from trtpd.errors import CheckpointError
from trtpd.runtime.engine.rope import frequencies


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


@pytest.mark.parametrize("family", [name for name in CONFIGS if FAMILIES[name].gguf])
def test_every_family_comes_back_as_it_was_before_the_conversion(tmp_path: Path, family: str) -> None:
    weights = family_weights(family)
    path = write_family_gguf(tmp_path / "m.gguf", family, CONFIGS[family], weights, fields=dict(GGUF_FIELDS[family]))
    checkpoint = open_checkpoint(path)
    expected = architecture_from_config(CONFIGS[family] | UNSAID[family], path)
    assert checkpoint.architecture == expected
    for name, array in weights.items():
        np.testing.assert_allclose(checkpoint.read(name), array, rtol=0, atol=1.2e-7, err_msg=name)


GGUF_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
    },
    "qwen3": {},
    "gemma3": {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.attention.sliding_window": 24,
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.final_logit_softcapping": 20.0,
    },
}
UNSAID: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma3": {"query_pre_attn_scalar": 32},
}
"""What GGUF files have no word for, and what it is then."""


def test_llama3_scaling_is_read_as_its_factors(tmp_path: Path) -> None:
    arch = architecture_from_config(CONFIGS["llama"], tmp_path)
    plain = msgspec.structs.replace(arch, rope_scaling=None)
    factors = (frequencies(plain) / frequencies(arch)).astype(np.float32)
    extra = {"rope_freqs.weight": factors}
    path = write_family_gguf(tmp_path / "m.gguf", "llama", CONFIGS["llama"], family_weights("llama"), extra=extra)
    np.testing.assert_allclose(frequencies(open_checkpoint(path).architecture), frequencies(arch), rtol=1e-6)


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    fields = {"llama.attention.sliding_window": 100}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_weights(CONFIG), fields=fields)).architecture
    assert (found.family, found.sliding_window, found.window_layers) == ("mistral", 100, (0, 1))


def test_rows_are_unpermuted_after_dequantising(tmp_path: Path) -> None:
    weights = family_weights("llama")
    kinds = {"q_proj": "Q8_0", "k_proj": "Q4_0"}
    path = write_family_gguf(tmp_path / "q.gguf", "llama", CONFIGS["llama"], weights, kinds=kinds)
    checkpoint = open_checkpoint(path)
    for part, kind in kinds.items():
        name = f"model.layers.1.self_attn.{part}.weight"
        of = gguf.GGMLQuantizationType[kind]
        # A row keeps its values, wherever the format puts it: so quantising it in place gives the same.
        exact = gguf.dequantize(gguf.quants.quantize(weights[name], of), of)
        assert np.array_equal(checkpoint.read(name), exact)


@pytest.mark.parametrize(
    ("family", "said"),
    [("gemma3", "the model is a Gemma3ForCausalLM; LlamaForCausalLM, "), ("qwen2", "rope scaling of kind yarn")],
)
def test_an_engine_that_takes_less_refuses_a_gguf_file_too(tmp_path: Path, family: str, said: str) -> None:
    fields = dict(GGUF_FIELDS[family])
    path = write_family_gguf(tmp_path / "m.gguf", family, CONFIGS[family], family_weights(family), fields=fields)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(path, CONVERTED)


QUANTISED = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", QUANTISED)
def test_any_bytes_are_dequantised_as_the_formats_own_library_does(tmp_path: Path, kind: str) -> None:
    of = gguf.GGMLQuantizationType[kind]
    packed = np.random.default_rng(0).integers(0, 256, (3, size_of_row(of)), np.uint8)
    path = write_tensor(tmp_path, packed, of)
    with np.errstate(all="ignore"):
        exact = gguf.dequantize(packed, of)
    found = GgufFile(path).read("model.layers.0.mlp.down_proj.weight")
    assert found.shape == (3, 512)
    np.testing.assert_array_equal(found, exact)


def size_of_row(of: gguf.GGMLQuantizationType) -> int:
    values, size_bytes = gguf.GGML_QUANT_SIZES[of]
    return 512 // values * size_bytes


def write_tensor(folder: Path, packed: np.ndarray[Any, Any], of: gguf.GGMLQuantizationType) -> Path:
    """A file of one tensor."""
    writer = gguf.GGUFWriter(folder / "q.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 8), (writer.add_embedding_length, 32), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 512), (writer.add_head_count, 1), (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, 4),
    ):  # fmt: skip
        add(value)
    writer.add_tensor("blk.0.ffn_down.weight", packed, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "q.gguf"


@pytest.mark.parametrize(("kind", "said"), [(999, "type 999, which is unknown"), (24, "as I8, which can't be read")])
def test_a_quantisation_that_cannot_be_read_is_named_before_anything_is(tmp_path: Path, kind: int, said: str) -> None:
    path = write_tensor(tmp_path, np.zeros((3, 512 * 2), np.uint8), gguf.GGMLQuantizationType.F16)
    name = b"blk.0.ffn_down.weight"
    raw = bytearray(path.read_bytes())
    at = raw.index(name) + len(name) + 4 + 2 * 8
    raw[at : at + 4] = struct.pack("<I", kind)
    path.write_bytes(raw)
    assert said in refusal(path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_refused_or_read_and_never_worse(damaged: Path, data: st.DataObject) -> None:
    raw = bytearray((damaged / "whole.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 2500))
        raw[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    path = damaged / "damaged.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        checkpoint = open_checkpoint(path)
        checkpoint.source.check_tokenizer()
        for name in checkpoint.source.shapes():
            checkpoint.read(name)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    write_gguf(folder / "whole.gguf", random_weights(CONFIG))
    return folder


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
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG), architecture="phi3")
    assert "'phi3'; llama, qwen2, qwen3, gemma3 are read" in refusal(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'; none, linear and yarn are read"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"llama.rope.dimension_count": 2}, "dimension_count is 2"),
        ({"llama.attention.key_length": "wide"}, "key_length is 'wide'; it must be a whole number"),
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
