from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from trtpd_testing.gpu_models import EIGHT_KV_HEADS, LLAMA_8B, LLAMA_70B, config_only
from trtpd_testing.tiny import make_machine

from trtpd.build.backends.tensorrt_llm.flags import FLAGS, flag_fault
from trtpd.build.backends.tensorrt_llm.release import choose_release, parse_release
from trtpd.build.builder import build
from trtpd.build.families import CONVERTED
from trtpd.build.hf_config import architecture_from_config
from trtpd.build.manifest import TensorRTConfig
from trtpd.build.resolve import ResolvedPipeline, resolve
from trtpd.build.spec import parse_spec

DOUBLES = Path(__file__).resolve().parents[1] / "doubles"
P2D4: dict[str, Any] = {"prefill": {"tp": 2}, "decode": {"tp": 4}}


def resolved(config: dict[str, Any] = LLAMA_8B, *, fp8: bool = False, **keys: Any) -> ResolvedPipeline:
    if fp8:
        quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}
        config = config | {"quantization_config": quantization}
    architecture = architecture_from_config(config, Path("config.json"), CONVERTED)
    spec = parse_spec({"model": "m", "engine": "tensorrt_llm", "pools": P2D4} | keys)
    return resolve(spec, architecture, make_machine())


def settings(pipeline: ResolvedPipeline, role: Any) -> TensorRTConfig:
    found = pipeline.roles[role].tensorrt_llm
    assert found is not None
    return found


def test_prefill_takes_a_large_step_and_a_batch_of_usual_prompts_that_fills_it() -> None:
    pipeline = resolved(tensorrt_llm={"prompt_tokens": 500})
    flags = settings(pipeline, "prefill").settings
    assert (flags["max_num_tokens"], flags["max_batch_size"]) == (8192, 17)
    assert flags["opt_num_tokens"] == 8192
    assert "multiple_profiles" not in flags


def test_decode_has_a_token_for_each_of_its_batch_and_512_for_prompts_of_its_own() -> None:
    flags = settings(resolved(), "decode").settings
    assert flags["max_num_tokens"] == flags["max_batch_size"] + 512
    assert flags["multiple_profiles"] == "enable"
    assert "opt_num_tokens" not in flags


def test_decodes_batch_follows_its_kv_and_the_tpot_target() -> None:
    def batch(config: dict[str, Any], **keys: Any) -> int:
        return resolved(config, **keys).roles["decode"].profile.max_batch

    assert batch(LLAMA_70B) < batch(LLAMA_70B, tensorrt_llm={"gpu": "h200"})
    assert batch(LLAMA_70B, slo={"tpot_ms": 22}) < batch(LLAMA_70B)
    assert batch(LLAMA_70B, slo={"tpot_ms": 1}) == 1


def test_both_roles_share_what_they_must() -> None:
    pipeline = resolved()
    prefill, decode = (settings(pipeline, role).settings for role in ("prefill", "decode"))
    for name in ("tokens_per_block", "max_seq_len", "kv_cache_type", "max_beam_width", "use_paged_context_fmha"):
        assert prefill[name] == decode[name]
    assert settings(pipeline, "prefill").dtype == settings(pipeline, "decode").dtype == "bfloat16"
    assert prefill["use_paged_context_fmha"] == "enable"


@pytest.mark.parametrize(
    ("role", "gpu", "tp", "expected"),
    [
        ("prefill", "h100", 2, {"gemm_plugin": "disable", "gemm_swiglu_plugin": "fp8"}),
        ("prefill", "l40s", 2, {"gemm_plugin": "disable"}),
        ("decode", "h100", 4, {"gemm_plugin": "auto", "low_latency_gemm_plugin": "fp8",
                               "low_latency_gemm_swiglu_plugin": "fp8", "reduce_fusion": "enable"}),
        ("decode", "b200", 4, {"gemm_plugin": "fp8", "reduce_fusion": "enable"}),
        ("decode", "h100", 1, {"gemm_plugin": "auto", "low_latency_gemm_plugin": "fp8",
                               "low_latency_gemm_swiglu_plugin": "fp8"}),
    ],
)  # fmt: skip
def test_fp8_roles_have_the_plugins_of_their_gpu(role: str, gpu: str, tp: int, expected: dict[str, str]) -> None:
    pools = {"prefill": {"tp": tp}, "decode": {"tp": tp}}
    found = settings(resolved(fp8=True, pools=pools, tensorrt_llm={"gpu": gpu}), role)
    plugins = {
        name: value
        for name, value in found.settings.items()
        if name in ("gemm_plugin", "gemm_swiglu_plugin", "reduce_fusion") or name.startswith("low_latency")
    }
    assert plugins == expected
    assert (found.quant_algo, found.kv_cache_quant_algo) == ("FP8", "FP8")


def test_other_precisions_leave_the_kernels_to_the_gemm_plugin() -> None:
    for role in ("prefill", "decode"):
        flags = settings(resolved(precision="int8"), role).settings
        assert flags["gemm_plugin"] == "auto"
        assert not [name for name in flags if "swiglu" in name or "low_latency" in name]


def test_f32_has_no_fused_attention_and_so_takes_whole_prompts() -> None:
    pipeline = resolved(EIGHT_KV_HEADS, precision="f32", tensorrt_llm={"max_prompt_tokens": 200})
    found = settings(pipeline, "prefill")
    assert (found.chunked_context, found.settings["use_paged_context_fmha"]) == (False, "disable")
    long = LLAMA_8B | {"rope_scaling": None, "max_position_embeddings": 20_000}
    assert settings(resolved(long, precision="f32"), "prefill").settings["max_num_tokens"] == 19_999


def test_speculative_decoding_is_decodes_and_widens_its_step() -> None:
    pipeline = resolved(tensorrt_llm={"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 3})
    flags = settings(pipeline, "decode").settings
    assert (flags["speculative_decoding_mode"], flags["max_draft_len"]) == ("lookahead_decoding", 3)
    assert flags["max_num_tokens"] == 4 * flags["max_batch_size"] + 512
    assert "max_draft_len" not in settings(pipeline, "prefill").settings


def test_a_measured_knee_is_never_below_8192() -> None:
    architecture = architecture_from_config(LLAMA_8B, Path("config.json"), CONVERTED)
    spec = parse_spec({"model": "m", "engine": "tensorrt_llm", "pools": P2D4, "slo": {"tpot_ms": 20}})

    def measure(_role: str, count: int) -> float:
        return max(count, 16_000) / 1e6 if count > 4096 else count / 1e4

    profiles = {
        role: one.profile for role, one in resolve(spec, architecture, make_machine(), measure=measure).roles.items()
    }
    assert profiles["prefill"].max_step_tokens == 16_384
    assert profiles["prefill"].max_batch == 16
    assert profiles["decode"].max_batch == 200


def test_the_transfer_buffer_holds_the_longest_prompt_in_whole_blocks() -> None:
    found = settings(resolved(tensorrt_llm={"max_prompt_tokens": 1000}), "decode")
    assert (found.max_prompt_tokens, found.max_tokens_in_buffer) == (1000, 1024)


@pytest.mark.parametrize(
    ("version", "spelled"), [("1.0", "ucx"), ("1.1", "UCX"), ("1.2.1", "UCX"), ("1.3.0rc5", "UCX")]
)
def test_literals_are_those_of_the_release(version: str, spelled: str) -> None:
    assert settings(resolved(tensorrt_llm={"version": version}), "prefill").transceiver == spelled


@pytest.mark.parametrize(
    ("text", "name", "mode"),
    [
        ("1.2", "1.2", "engine"),
        ("1.0.0rc6", "1.0", "engine"),
        ("1.3", "1.3", "llm_api"),
        ("1.4.0rc4", "1.4", "llm_api"),
    ],
)
def test_a_release_is_known_by_its_first_two_numbers(text: str, name: str, mode: str) -> None:
    release = parse_release(text)
    assert release is not None
    assert (release.known, release.name, release.mode) == (True, name, mode)


@pytest.mark.parametrize("text", ["0.21.0", "1.9", "2.0"])
def test_other_releases_are_unknown(text: str) -> None:
    release = parse_release(text)
    assert release is not None
    assert not release.known


@pytest.mark.parametrize(
    ("asked", "installed", "chosen"),
    [(None, "none", "1.2"), (None, "1.1.0", "1.1.0"), ("1.0", "1.2.1", "1.0"), ("latest", "none", "latest")],
)
def test_the_release_asked_for_comes_before_the_installed_one(asked: str | None, installed: str, chosen: str) -> None:
    assert choose_release(asked, installed).text == chosen


def test_a_pools_own_arguments_replace_ours() -> None:
    pools = {"prefill": {"tp": 2, "engine_args": {"gemm_plugin": "bfloat16", "strip_plan": True}}, "decode": {}}
    flags = settings(resolved(pools=pools), "prefill").settings
    assert (flags["gemm_plugin"], flags["strip_plan"]) == ("bfloat16", True)


def test_our_list_of_flags_is_the_real_one() -> None:
    table = json.loads((DOUBLES / "api.json").read_text())["build_flags"]
    assert sorted(FLAGS) == sorted(flag[2:] for flag in table)
    kinds = {"int": "count", "store_true": "bare"}
    for flag, entry in table.items():
        ours = FLAGS[flag[2:]]
        if "choices" in entry:
            assert list(ours) == entry["choices"], flag
        elif entry["type"] in kinds:
            assert ours == kinds[entry["type"]], flag
        else:
            assert ours in ("path", "text"), flag


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tp_size", 2, "no flag"),
        ("gemm_plugin", "int8", "must be one of auto, float16"),
        ("strip_plan", "yes", "takes no value"),
        ("max_lora_rank", "8", "a whole number"),
        ("lora_dir", "", "a text"),
        ("gemm_plugin", "fp8", None),
    ],
)
def test_a_flag_is_judged_as_trtllm_build_would(name: str, value: Any, said: str | None) -> None:
    fault = flag_fault(name, value)
    assert fault is None if said is None else said in (fault or "")


def dry_run(tmp_path: Path, config: dict[str, Any], **keys: Any) -> list[str]:
    model = config_only(tmp_path / "model", config)
    spec = parse_spec({"model": str(model), "engine": "tensorrt_llm", "pools": P2D4} | keys)
    return build(spec, tmp_path / "BUILD", dry_run=True, machine=make_machine()).summary().splitlines()


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B], ids=["8B", "70B"])
@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
def test_a_dry_run_from_a_config_alone_prints_commands_that_the_parser_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], version: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TRTPD_DOUBLE_VERSION", version)
    lines = dry_run(tmp_path, config, tensorrt_llm={"version": version})
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
    commands = [shlex.split(line) for line in lines if line.strip().startswith("trtllm-build ")]
    assert len(commands) == 2
    accepted = [parsed(command) for command in commands]
    prefill, decode = accepted
    assert prefill["max_num_tokens"] == 8192
    assert decode["max_num_tokens"] == decode["max_batch_size"] + 512
    assert prefill["max_batch_size"] < decode["max_batch_size"]
    assert (prefill["reduce_fusion"], decode["reduce_fusion"]) == ("disable", "enable")
    assert (prefill["multiple_profiles"], decode["multiple_profiles"]) == ("disable", "enable")
    assert (prefill["workers"], decode["workers"]) == (2, 4)
    assert prefill["checkpoint_dir"] != decode["checkpoint_dir"]
    assert Path(prefill["output_timing_cache"]).is_absolute()


def parsed(command: list[str]) -> dict[str, Any]:
    """What the stand-in's parser makes of a command line; fails where it refuses."""
    code = (
        "import json, sys; from tensorrt_llm.commands.build import *\n"
        "args = parse_arguments().parse_args(sys.argv[1:])\n"
        "build_config_of(args, PluginConfig.from_arguments(args))\n"
        "print(json.dumps(vars(args)))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, *command[1:]],
        env=os.environ | {"PYTHONPATH": str(DOUBLES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_dry_run_prints_which_tensor_of_which_shape_goes_to_which_rank(tmp_path: Path) -> None:
    text = "\n".join(dry_run(tmp_path, LLAMA_70B))
    assert "  rank0.safetensors, rank1.safetensors: 563 tensors each" in text
    assert '"mapping": {"world_size": 4' in text
    assert "    transformer.layers.0.attention.qkv.weight BF16 [5120, 8192]" in text
    assert "    transformer.layers.0.attention.qkv.weight BF16 [2560, 8192]" in text
    assert "    lm_head.weight BF16 [32064, 8192]" in text
    assert "transformer.layers.1 to 78: as layer 0" in text


def test_roles_of_equal_tp_share_one_conversion(tmp_path: Path) -> None:
    lines = dry_run(tmp_path, LLAMA_8B, pools={"prefill": {"tp": 2}, "decode": {"tp": 2}})
    assert len([line for line in lines if ": convert for tp" in line]) == 1


def test_from_13_on_a_role_is_a_file_of_llm_arguments(tmp_path: Path) -> None:
    lines = dry_run(tmp_path, LLAMA_8B, tensorrt_llm={"version": 1.3})
    assert not [line for line in lines if "trtllm-build" in line]
    start = next(index for index, line in enumerate(lines) if line.startswith("decode: link the model"))
    found = yaml.safe_load("\n".join(line.strip() for line in lines[start + 1 : -1] if line.startswith("  ")))
    assert found["cuda_graph_config"]["max_batch_size"] == found["max_batch_size"]


def test_roles_ask_for_the_statistics_that_metrics_need() -> None:
    pipeline = resolved(tensorrt_llm={"version": "1.3"})
    for role in ("prefill", "decode"):
        asked = settings(pipeline, role).settings
        assert (asked["enable_iter_perf_stats"], asked["enable_iter_req_stats"]) == (True, True)


@pytest.mark.parametrize("version", ["1.3.0", "1.4.0"])
def test_llm_arguments_are_taken_by_the_release(version: str) -> None:
    code = (
        "import json, sys; from tensorrt_llm.llmapi import TorchLlmArgs\n"
        "print(TorchLlmArgs(model='m', **json.loads(sys.argv[1])).max_num_tokens)"
    )
    pipeline = resolved(tensorrt_llm={"version": version, "kv_transfer_timeout_ms": 60_000})
    for role in ("prefill", "decode"):
        given = settings(pipeline, role).settings
        run = subprocess.run(
            [sys.executable, "-P", "-c", code, json.dumps(given)],
            env=os.environ | {"PYTHONPATH": str(DOUBLES), "TRTPD_DOUBLE_VERSION": version},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.stdout == f"{given['max_num_tokens']}\n", run.stderr
    prefill, decode = (settings(pipeline, role).settings for role in ("prefill", "decode"))
    assert (prefill["disable_overlap_scheduler"], decode["disable_overlap_scheduler"]) == (True, False)
    assert (prefill["cuda_graph_config"], decode["cuda_graph_config"]["enable_padding"]) == (None, True)
    assert prefill["cache_transceiver_config"] == decode["cache_transceiver_config"]
