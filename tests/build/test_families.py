from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.gpu_models import EIGHT_KV_HEADS, write_random_model

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.families import CONVERTED, OWN_GRAPH
from trtpd.build.hf_config import architecture_from_config
from trtpd.build.manifest import Architecture, Quantization
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


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_an_engine_that_knows_only_llama_still_refuses_the_others(tmp_path: Path, family: str) -> None:
    model = write_random_model(tmp_path / "m", EIGHT_KV_HEADS, family=family)
    with pytest.raises(CheckpointError, match="only LlamaForCausalLM is supported"):
        open_checkpoint(model, OWN_GRAPH)
    assert open_checkpoint(model, CONVERTED).architecture.family == family


def test_a_family_nobody_knows_is_refused_with_the_choice() -> None:
    with pytest.raises(CheckpointError, match=r"Gemma2ForCausalLM; LlamaForCausalLM, Mistral.* are supported"):
        read(architectures=["Gemma2ForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "fine"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, False),
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
