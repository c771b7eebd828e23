from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.families import CONFIGS
from trtpd_testing.gpu_models import EIGHT_KV_HEADS
from trtpd_testing.tiny import write_family

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.families import CONVERTED, OWN_GRAPH
from trtpd.build.hf_config import architecture_from_config, config_from_architecture
from trtpd.build.manifest import Architecture, LinearScaling, Quantization
from trtpd.build.shapes import expected_shapes
from trtpd.errors import CheckpointError

HERE = Path("config.json")


def read(**changes: Any) -> Architecture:
    return architecture_from_config(EIGHT_KV_HEADS | changes, HERE, CONVERTED)


@pytest.mark.parametrize(
    ("model_class", "bias", "norm"),
    [
        ("LlamaForCausalLM", False, False),
        ("MistralForCausalLM", False, False),
        ("Qwen2ForCausalLM", True, False),
        ("Qwen3ForCausalLM", False, True),
    ],
)
def test_families_differ_in_biases_and_norms(model_class: str, bias: bool, norm: bool) -> None:
    shapes = expected_shapes(read(architectures=[model_class]))
    assert ("model.layers.0.self_attn.q_proj.bias" in shapes) == bias
    assert ("model.layers.1.self_attn.k_norm.weight" in shapes) == norm


def test_an_engine_that_takes_fewer_families_refuses_the_others_by_name(tmp_path: Path) -> None:
    model = write_family(tmp_path / "gemma", "gemma3")
    with pytest.raises(CheckpointError, match=r"the model is Gemma3ForCausalLM; LlamaForCausalLM, .* are supported"):
        open_checkpoint(model, CONVERTED)
    assert open_checkpoint(model, OWN_GRAPH).architecture.family == "gemma3"


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'rope_type is "yarn"; "default", "llama3"'),
        ("qwen2", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 'rope_type is "linear"'),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)
def test_an_engine_whose_graph_is_not_ours_takes_less(family: str, changes: dict[str, Any], said: str) -> None:
    config = CONFIGS[family] | {"use_sliding_window": False} | changes
    architecture_from_config(config, HERE, OWN_GRAPH)
    with pytest.raises(CheckpointError, match=said):
        architecture_from_config(config, HERE, CONVERTED)


def test_a_family_nobody_knows_is_refused_with_the_choice() -> None:
    with pytest.raises(CheckpointError, match=r"Gemma2ForCausalLM; LlamaForCausalLM, Mistral.* are supported"):
        read(architectures=["Gemma2ForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "fine"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, False),
        ({"architectures": ["MistralForCausalLM"]}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, True),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": False}, True),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True}, False),
    ],
)
def test_a_window_smaller_than_the_model_is_refused(changes: dict[str, Any], fine: bool) -> None:
    if fine:
        read(**changes)
        return
    with pytest.raises(CheckpointError, match="sliding_window is 128 with 256 positions"):
        read(**changes)


def test_a_quantised_model_says_so_where_that_is_taken() -> None:
    given = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}, "ignore": ["lm_head"]}
    found = read(quantization_config=given).quantization
    assert found == Quantization(quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=("lm_head",))
    with pytest.raises(CheckpointError, match="quantization_config"):
        architecture_from_config(EIGHT_KV_HEADS | {"quantization_config": given}, HERE, OWN_GRAPH)


def test_other_kinds_of_quantisation_are_refused() -> None:
    with pytest.raises(CheckpointError, match="only FP8 made by ModelOpt"):
        read(quantization_config={"quant_method": "gptq", "bits": 4})


def test_gemma_alternates_windows_and_rotary_bases() -> None:
    found = gemma(sliding_window_pattern=3)
    assert (found.window_layers, found.sliding_window, found.local_rope_theta) == ((0, 1, 3), 24, 10_000.0)
    assert found.rope_scaling == LinearScaling(factor=8.0)
    assert (found.query_pre_attn_scalar, found.final_logit_softcapping) == (24.0, 20.0)


def gemma(**changes: Any) -> Architecture:
    return architecture_from_config(CONFIGS["gemma3"] | changes, HERE)


def test_layer_types_win_over_the_pattern() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert gemma(layer_types=kinds).window_layers == (1, 2)


def test_what_a_gemma_leaves_out_is_what_transformers_assumes() -> None:
    config = {key: value for key, value in CONFIGS["gemma3"].items() if key not in GEMMA_ASSUMED}
    found = architecture_from_config(config, HERE)
    assert {key: getattr(found, key) for key in GEMMA_ASSUMED} == GEMMA_ASSUMED


GEMMA_ASSUMED = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256.0,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}


def test_new_rope_parameters_by_layer_mean_the_same() -> None:
    old = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    new = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    }
    assert gemma(rope_parameters=new, **dict.fromkeys(old)) == gemma()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"hidden_activation": "gelu"}, 'hidden_activation is "gelu"; only "gelu_pytorch_tanh"'),
        ({"layer_types": ["sliding_attention"]}, "for each of 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"layer_types": 4}, "layer_types is 4; it must be a list"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "must hold full_attention and sliding_attention"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "sliding_attention.rope_type"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_would_be_another_gemma_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        gemma(**changes)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_written_config_reads_as_the_same_architecture(family: str) -> None:
    architecture = architecture_from_config(CONFIGS[family], HERE)
    assert architecture_from_config(config_from_architecture(architecture, {}), HERE) == architecture


@pytest.mark.parametrize("family", CONFIGS)
def test_an_architecture_survives_an_engine_directory(family: str) -> None:
    architecture = architecture_from_config(CONFIGS[family], HERE)
    assert msgspec.json.decode(msgspec.json.encode(architecture), type=Architecture) == architecture
