from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtpd_testing.tiny import CONFIG, random_weights, stored, write_weights_file

from trtpd.build.checkpoint import open_architecture, open_checkpoint
from trtpd.build.manifest import Llama3Scaling
from trtpd.build.shapes import expected_shapes
from trtpd.errors import CheckpointError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_tensors_come_as_float32_with_the_stored_values(make_model: Callable[..., Path], dtype: str) -> None:
    checkpoint = open_checkpoint(make_model(dtype=dtype))
    for name, array in random_weights(CONFIG).items():
        kept = stored(array, dtype)
        expected = (kept.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else kept
        assert checkpoint.read(name).dtype == np.float32
        assert np.array_equal(checkpoint.read(name), expected)


def test_a_sharded_folder_reads_like_a_single_file(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    weights = random_weights(CONFIG)
    single = open_checkpoint(folder).read(Q_PROJ)
    shard(folder, weights)
    assert np.array_equal(open_checkpoint(folder).read(Q_PROJ), single)


def shard(folder: Path, weights: dict[str, np.ndarray[Any, Any]]) -> None:
    names = list(weights)
    halves = {"one.safetensors": names[:7], "two.safetensors": names[7:]}
    for file, part in halves.items():
        write_weights_file(folder / file, {name: weights[name] for name in part})
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_a_missing_shard_is_named(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    shard(folder, random_weights(CONFIG))
    (folder / "two.safetensors").unlink()
    assert "two.safetensors: missing" in refusal(folder)


def test_a_tensor_that_the_index_only_claims_is_named(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    shard(folder, random_weights(CONFIG))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("two.safetensors", "one.safetensors"))
    assert "is not in it, though the index says so" in refusal(folder)


def test_an_index_does_not_reach_outside_its_folder(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    shard(folder, random_weights(CONFIG))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("two.safetensors", "../two.safetensors"))
    assert "outside the folder" in refusal(folder)


def test_a_path_that_is_not_there_says_what_to_give(tmp_path: Path) -> None:
    assert "no such model" in refusal(tmp_path / "absent")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    assert "neither a Hugging Face folder nor a .gguf file" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(make_model: Callable[..., Path], name: str) -> None:
    folder = make_model()
    (folder / name).unlink()
    assert name in refusal(folder)


def test_a_truncated_config_is_refused(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    (folder / "config.json").write_text('{"architectures": ["Llama')
    assert "not valid JSON" in refusal(folder)


def test_truncated_weights_are_refused_before_any_is_read(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu"'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, 'rope_type is "longrope"; "default", "linear"'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor is 0"),
        ({"rope_scaling": {"rope_type": 7}}, "rope_scaling.rope_type is 7"),
        ({"rope_scaling": 8}, "rope_scaling is 8; it must be an object"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "without rope_scaling it is the same model"),
        ({"rope_parameters": {"full_attention": {}}}, "which a LlamaForCausalLM doesn't have"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"sliding_window": 100}, "sliding_window is 100 with 256 positions; only full attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"num_hidden_layers": "two"}, 'num_hidden_layers is "two"'),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 3}, "even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "two"}, "eos_token_id"),
        ({"num_hidden_layers": 10**30}, f"num_hidden_layers is {10**30}; it must be at most 1,000"),
        ({"vocab_size": 10_000_001}, "vocab_size is 10000001; it must be at most 10,000,000"),
        ({"hidden_size": 1_000_001}, "hidden_size is 1000001"),
        ({"max_position_embeddings": 100_000_001}, "max_position_embeddings is 100000001"),
        ({"rope_theta": float("inf")}, "rope_theta is Infinity"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused_by_name(
    make_model: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(make_model(**changes))


def test_contradictory_shapes_name_both_values(make_model: Callable[..., Path]) -> None:
    message = refusal(make_model(intermediate_size=32))
    assert "mlp.gate_proj.weight has shape [24, 16]" in message
    assert "says [32, 16]" in message


def test_a_configuration_with_fewer_layers_than_the_weights_names_both(make_model: Callable[..., Path]) -> None:
    assert "holds tensors of 2 layers, but its configuration says 1" in refusal(make_model(num_hidden_layers=1))


def test_an_untied_head_must_be_there(make_model: Callable[..., Path]) -> None:
    assert "lm_head.weight is missing" in refusal(make_model(tie_word_embeddings=False))


def test_weights_of_an_unreadable_type_are_refused_when_read(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(CheckpointError, match="dtype I32"):
        open_checkpoint(folder).read("model.embed_tokens.weight")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    ],
)
def test_old_and_new_rope_keys_mean_the_same(make_model: Callable[..., Path], changes: dict[str, Any]) -> None:
    architecture = open_checkpoint(make_model(**changes)).architecture
    assert architecture.rope_theta == 500000.0
    assert architecture.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )


def test_rope_parameters_without_scaling_give_theta_only(make_model: Callable[..., Path]) -> None:
    parameters = {"rope_type": "default", "rope_theta": 5000.0}
    architecture = open_checkpoint(make_model(rope_theta=None, rope_parameters=parameters)).architecture
    assert (architecture.rope_theta, architecture.rope_scaling) == (5000.0, None)


def test_end_tokens_of_the_generation_config_win(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert open_checkpoint(folder).end_ids == (2, 7)


def test_the_digest_follows_the_weights(make_model: Callable[..., Path]) -> None:
    one, same, other = make_model("one"), make_model("same"), make_model("other", seed=1)
    assert open_checkpoint(one).digest() == open_checkpoint(same).digest()
    assert open_checkpoint(one).digest() != open_checkpoint(other).digest()


def test_an_architecture_needs_no_weights(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    (folder / "model.safetensors").unlink()
    assert open_architecture(folder).architecture.vocab_size == CONFIG["vocab_size"]


def test_a_missing_tokenizer_is_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        open_checkpoint(folder).source.write_tokenizer(tmp_path)


def test_expected_shapes_of_an_untied_model_end_with_the_head(make_model: Callable[..., Path]) -> None:
    architecture = open_architecture(make_model(tie_word_embeddings=False)).architecture
    assert list(expected_shapes(architecture))[-1] == "lm_head.weight"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"[]", b'"\xff"', b""],
    ids=["deep", "long number", "list", "not UTF-8", "empty"],
)
def test_json_of_any_kind_of_wrong_is_refused_in_one_line(
    make_model: Callable[..., Path], name: str, content: bytes
) -> None:
    folder = make_model()
    if name.startswith("model"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert name in refusal(folder)


def test_a_folder_without_a_config_says_what_to_give(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    (folder / "config.json").unlink()
    assert "give a Hugging Face folder" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{bad"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}'),
        ("chat_template.jinja", "{{ 1 +"),
    ],
)
def test_a_broken_text_side_is_found_before_anything_is_built_on_it(
    make_model: Callable[..., Path], name: str, content: str
) -> None:
    folder = make_model()
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match="download it with the model"):
        open_checkpoint(folder).source.check_tokenizer()
