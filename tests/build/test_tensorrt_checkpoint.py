from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtpd_testing.gpu_models import (
    EIGHT_KV_HEADS,
    THREE_KV_HEADS,
    read_stored,
    reassembled,
    write_random_model,
    write_stored,
)
from trtpd_testing.tiny import make_machine

from trtpd.build.backends.tensorrt_llm.checkpoint import convert
from trtpd.build.backends.tensorrt_llm.fp8 import decode_e4m3, encode_e4m3
from trtpd.build.checkpoint import Checkpoint, open_checkpoint
from trtpd.build.families import CONVERTED
from trtpd.build.manifest import TensorRTConfig
from trtpd.build.resolve import resolve
from trtpd.build.spec import parse_spec
from trtpd.build.tensors import from_bf16_bits
from trtpd.errors import CheckpointError


def settings_of(checkpoint: Checkpoint, **keys: Any) -> TensorRTConfig:
    data = {"model": "m", "engine": "tensorrt_llm", "pools": {"mixed": {}}} | keys
    settings = resolve(parse_spec(data), checkpoint.architecture, make_machine()).roles["mixed"].tensorrt_llm
    assert settings is not None
    return settings


def converted(model: Path, target: Path, tp: int, **keys: Any) -> Path:
    checkpoint = open_checkpoint(model, CONVERTED)
    convert(checkpoint, checkpoint.architecture, settings_of(checkpoint, **keys), tp, target, lambda *_: None)
    return target


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name][0] == other[name][0] and np.array_equal(one[name][1], other[name][1]) for name in one
    )


@pytest.mark.parametrize(
    ("config", "tp"),
    [(EIGHT_KV_HEADS, 1), (EIGHT_KV_HEADS, 2), (EIGHT_KV_HEADS, 4), (THREE_KV_HEADS, 1), (THREE_KV_HEADS, 3)],
)
def test_a_converted_model_is_put_together_to_itself(tmp_path: Path, config: dict[str, Any], tp: int) -> None:
    model = write_random_model(tmp_path / "m", config)
    whole = reassembled(converted(model, tmp_path / "out", tp))
    source = read_stored(model / "model.safetensors")
    if config["tie_word_embeddings"]:
        assert np.array_equal(whole.pop("lm_head.weight")[1], source["model.embed_tokens.weight"][1])
    assert same(whole, source)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_the_other_families_are_put_together_to_themselves_too(tmp_path: Path, family: str) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS, family=family)
    out = converted(model, tmp_path / "out", 2)
    assert same(reassembled(out), read_stored(model / "model.safetensors"))
    written = json.loads((out / "config.json").read_text())
    classes = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    assert written["architecture"] == classes[family]
    assert (written["attn_bias"], written.get("qwen_type")) == (
        family == "qwen2",
        {"mistral": None}.get(family, family),
    )


def test_more_ranks_than_kv_heads_hold_copies_of_them(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS | {"num_key_value_heads": 2})
    assert same(reassembled(converted(model, tmp_path / "out", 8)), read_stored(model / "model.safetensors"))


@pytest.mark.parametrize(
    ("config", "tp", "said"),
    [
        (THREE_KV_HEADS, 2, "can't be split over tp 2: 9 attention heads and 3 KV heads don't divide"),
        (EIGHT_KV_HEADS, 3, "16 attention heads and 8 KV heads"),
        (EIGHT_KV_HEADS | {"intermediate_size": 50}, 4, "50 intermediate size"),
        (EIGHT_KV_HEADS | {"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "3 KV heads"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(tmp_path: Path, config: dict[str, Any], tp: int, said: str) -> None:
    model = write_random_model(tmp_path / "m", config)
    with pytest.raises(CheckpointError, match=said):
        converted(model, tmp_path / "out", tp)


def test_a_rank_has_its_own_part_of_q_k_and_v_below_each_other(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS)
    rank1 = read_stored(converted(model, tmp_path / "out", 2) / "rank1.safetensors")
    source = read_stored(model / "model.safetensors")
    q, k, v = (source[f"model.layers.0.self_attn.{part}_proj.weight"][1] for part in "qkv")
    assert np.array_equal(rank1["transformer.layers.0.attention.qkv.weight"][1], np.vstack([q[32:], k[16:], v[16:]]))
    assert np.array_equal(
        rank1["transformer.layers.0.mlp.fc.weight"][1], source["model.layers.0.mlp.gate_proj.weight"][1][24:]
    )


def test_the_head_is_padded_with_zeros_and_the_embedding_is_not(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS)
    rank3 = read_stored(converted(model, tmp_path / "out", 4) / "rank3.safetensors")
    assert rank3["lm_head.weight"][1].shape == (11, 32)
    assert not rank3["lm_head.weight"][1][-1].any()
    assert rank3["transformer.vocab_embedding.weight"][1].shape == (43, 32)


@pytest.mark.parametrize(("precision", "dtype"), [("f32", "F32"), ("f16", "F16"), ("bf16", "BF16"), ("int8", "BF16")])
def test_weights_come_out_in_the_precisions_type(tmp_path: Path, precision: str, dtype: str) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS, dtype="F32")
    out = converted(model, tmp_path / "out", 1, precision=precision)
    assert {entry[0] for entry in read_stored(out / "rank0.safetensors").values()} == {dtype}
    quantization = json.loads((out / "config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == ("W8A16" if precision == "int8" else None)


def test_a_value_too_large_for_the_type_is_refused_by_name(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS, dtype="F32")
    tensors = read_stored(model / "model.safetensors")
    large = tensors["model.norm.weight"][1].copy()
    large[0] = 1e6
    (model / "model.safetensors").unlink()
    write_stored(model / "model.safetensors", tensors | {"model.norm.weight": ("F32", large)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values that aren't finite numbers in F16"):
        converted(model, tmp_path / "out", 1, precision="f16")


def test_ranks_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS)
    out = converted(model, tmp_path / "out", 2)
    (out / "rank1.safetensors").unlink()
    (out / "rank1.part").write_bytes(b"half of it")
    before = (out / "rank0.safetensors").stat().st_mtime_ns
    converted(model, out, 2)
    assert (out / "rank0.safetensors").stat().st_mtime_ns == before
    assert same(reassembled(out), read_stored(model / "model.safetensors"))
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "rank0.safetensors", "rank1.safetensors"]


def fp8_model(folder: Path, *, kv: bool = True, exclude: tuple[str, ...] = ("lm_head",)) -> Path:
    """A model as ModelOpt exports it: FP8 weights with one scale each."""
    write_random_model(folder, EIGHT_KV_HEADS)
    tensors = read_stored(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    for name in [name for name in tensors if "_proj.weight" in name]:
        if any(name.startswith(part.rstrip("*")) for part in exclude):
            continue
        scale, module = np.float32(rng.uniform(0.001, 0.01)), name.removesuffix(".weight")
        bits = encode_e4m3((from_bf16_bits(tensors[name][1]) / np.float32(4 / 448)).astype(np.float32))
        tensors[name] = ("F8_E4M3", bits)
        tensors[module + ".weight_scale"] = ("F32", np.array(scale, np.float32))
        tensors[module + ".input_scale"] = ("F32", np.array(scale * 3, np.float32))
        if kv and module.endswith(("k_proj", "v_proj")):
            tensors[f"{module}.{module[-6]}_scale"] = ("F32", np.array(scale * 5, np.float32))
    (folder / "model.safetensors").unlink()
    write_stored(folder / "model.safetensors", tensors)
    quantization = {
        "quant_algo": "FP8", "kv_cache_quant_algo": "FP8" if kv else None, "exclude_modules": list(exclude)
    }  # fmt: skip
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return folder


def test_fp8_weights_are_passed_on_with_their_scales(tmp_path: Path) -> None:
    model = fp8_model(tmp_path / "m")
    source = read_stored(model / "model.safetensors")
    out = converted(model, tmp_path / "out", 2)
    written, rank1 = json.loads((out / "config.json").read_text()), read_stored(out / "rank1.safetensors")
    assert written["quantization"] == {
        "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]
    }  # fmt: skip
    down = "model.layers.1.mlp.down_proj"
    assert np.array_equal(rank1["transformer.layers.1.mlp.proj.weight"][1], source[f"{down}.weight"][1][:, 24:])
    for ours, theirs in (("weights", "weight"), ("activation", "input")):
        stored = rank1[f"transformer.layers.1.mlp.proj.{ours}_scaling_factor"]
        assert stored == ("F32", source[f"{down}.{theirs}_scale"][1].reshape(1))
    kv = [source[f"model.layers.0.self_attn.{part}_proj.{part}_scale"][1] for part in "kv"]
    assert rank1["transformer.layers.0.attention.kv_cache_scaling_factor"][1][0] == max(kv)
    assert rank1["lm_head.weight"][0] == "BF16"


def test_q_k_and_v_come_into_one_scale_within_a_rounding(tmp_path: Path) -> None:
    model = fp8_model(tmp_path / "m")
    source = read_stored(model / "model.safetensors")
    rank0 = read_stored(converted(model, tmp_path / "out", 1) / "rank0.safetensors")
    qkv = decode_e4m3(rank0["transformer.layers.0.attention.qkv.weight"][1])
    scale = rank0["transformer.layers.0.attention.qkv.weights_scaling_factor"][1][0]
    parts = []
    for letter in "qkv":
        name = f"model.layers.0.self_attn.{letter}_proj"
        parts.append(decode_e4m3(source[f"{name}.weight"][1]) * source[f"{name}.weight_scale"][1])
    wanted = np.vstack(parts)
    assert scale == max(source[f"model.layers.0.self_attn.{letter}_proj.weight_scale"][1] for letter in "qkv")
    assert np.all(np.abs(qkv * scale - wanted) <= np.maximum(np.abs(wanted) / 16, scale * 2.0**-10) * 1.0001)


def test_modules_left_out_of_the_quantisation_stay_as_they_are(tmp_path: Path) -> None:
    model = fp8_model(tmp_path / "m", kv=False, exclude=("lm_head", "model.layers.0.mlp.*"))
    out = converted(model, tmp_path / "out", 1)
    rank0 = read_stored(out / "rank0.safetensors")
    assert rank0["transformer.layers.0.mlp.fc.weight"][0] == "BF16"
    assert rank0["transformer.layers.1.mlp.fc.weight"][0] == "F8_E4M3"
    left_out = json.loads((out / "config.json").read_text())["quantization"]["exclude_modules"]
    assert left_out == ["lm_head"] + [f"transformer.layers.0.mlp.{part}" for part in ("fc", "gate", "proj")]


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_algo": "W4A16_AWQ"}, 'quant_algo is "W4A16_AWQ"; only FP8'),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, 'kv_cache_quant_algo is "INT8"'),
        ({"quant_algo": "FP8", "exclude_modules": "lm_head"}, "must hold names"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any], said: str) -> None:
    model = fp8_model(tmp_path / "m")
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(model, CONVERTED)


def test_a_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    model = fp8_model(tmp_path / "m")
    tensors = read_stored(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.input_scale"]
    (model / "model.safetensors").unlink()
    write_stored(model / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.input_scale is missing"):
        converted(model, tmp_path / "out", 1)


def test_every_fp8_number_is_its_own_nearest() -> None:
    bits = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert np.array_equal(encode_e4m3(decode_e4m3(bits)), bits)
    assert decode_e4m3(np.array([0x7E, 0x01, 0x38], np.uint8)).tolist() == [448.0, 2.0**-9, 1.0]


def test_fp8_rounds_to_the_nearest_and_ties_to_even() -> None:
    values = np.array([1.0625, 1.1875, 1.07, 500.0, -500.0, np.nan], np.float32)
    decoded = decode_e4m3(encode_e4m3(values))
    assert decoded[:5].tolist() == [1.0, 1.25, 1.125, 448.0, -448.0]
    assert np.isnan(decoded[5])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2_is_put_together_to_itself(tmp_path: Path, smollm2: Path, tp: int) -> None:
    whole = reassembled(converted(smollm2, tmp_path / "out", tp, precision="f32"))
    source = read_stored(smollm2 / "model.safetensors")
    assert np.array_equal(whole.pop("lm_head.weight")[1], source["model.embed_tokens.weight"][1])
    assert same(whole, source)
