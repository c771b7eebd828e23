from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.gpu_models import EIGHT_KV_HEADS, LLAMA_8B, LLAMA_70B, THREE_KV_HEADS, config_only
from trtpd_testing.tiny import make_machine

from trtpd.build import lint_tensorrt_llm, tensorrt_pair_rules, tensorrt_rules, tensorrt_run_rules
from trtpd.build.findings import Finding
from trtpd.build.lint import lint, lint_spec, open_plan
from trtpd.build.lint_tensorrt_llm import lint_engine_dirs, lint_live
from trtpd.build.spec import parse_spec
from trtpd.errors import InputError

HERE = make_machine(tensorrt_llm="1.2.1", gpus=("NVIDIA H100 80GB HBM3",))
FP8 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}


def pools(prefill: dict[str, Any] | None = None, **decode: Any) -> dict[str, Any]:
    return {"pools": {"prefill": {"tp": 2} | (prefill or {}), "decode": {"tp": 4} | decode}}


def args(**given: Any) -> dict[str, Any]:
    return pools(engine_args=given)


def trt(**given: Any) -> dict[str, Any]:
    return {"tensorrt_llm": {"max_prompt_tokens": 4000} | given}


def pipeline_findings(
    tmp_path: Path, config: dict[str, Any], keys: dict[str, Any], machine: Any = HERE
) -> list[Finding]:
    model = config_only(tmp_path / "model", config)
    spec = parse_spec({"model": str(model), "engine": "tensorrt_llm"} | trt() | pools() | keys)
    checkpoint = open_plan(spec)
    return [one for one in lint_spec(spec, checkpoint, machine) if one.code != "no_weights"]


TWENTY_FOUR_HEADS = EIGHT_KV_HEADS | {"num_attention_heads": 24, "num_key_value_heads": 24}
V13 = trt(version="1.3")

PIPELINE_FAULTS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("trt_release_unknown", "error", "tensorrt_llm.version", LLAMA_8B, trt(version="1.7")),
    ("trt_release_differs", "warning", "tensorrt_llm.version", LLAMA_8B, trt(version="1.1")),
    ("trt_power_of_two", "error", "pools.decode", TWENTY_FOUR_HEADS, pools(tp=3)),
    ("trt_tp_split", "error", "pools.prefill.tp", THREE_KV_HEADS, {}),
    ("trt_max_seq_len", "error", "pools.decode", LLAMA_8B, trt() | {"kv": {"max_seq_tokens": 4000}}),
    ("trt_max_num_tokens", "error", "pools.prefill", LLAMA_8B,
     pools({"engine_args": {"context_fmha": "disable", "use_paged_context_fmha": "disable"}, "max_step_tokens": 512})),
    ("trt_chunked_context", "error", "pools.decode", LLAMA_8B, args(use_paged_context_fmha="disable")),
    ("trt_paged_fmha", "error", "pools.decode", LLAMA_8B, args(context_fmha="disable")),
    ("trt_buffer_small", "error", "pools.prefill", LLAMA_8B, trt(max_tokens_in_buffer=2048)),
    ("trt_buffer_blocks", "error", "pools.prefill", LLAMA_8B, trt(max_tokens_in_buffer=4001)),
    ("trt_buffer_memory", "warning", "tensorrt_llm.max_prompt_tokens", LLAMA_8B, trt(max_prompt_tokens=100_000)),
    ("trt_prompt_short", "warning", "tensorrt_llm.max_prompt_tokens", LLAMA_70B, {"tensorrt_llm": {}}),
    ("trt_profiles", "error", "pools.decode", LLAMA_8B, args(opt_num_tokens=256)),
    ("trt_gather_draft", "error", "pools.decode", LLAMA_8B,
     args(gather_context_logits=True) | trt(speculative_decoding_mode="lookahead_decoding")),
    ("trt_fp8_plugin", "error", "pools.decode", LLAMA_8B, args(low_latency_gemm_plugin="fp8")),
    ("trt_fp8_plugin_sm", "error", "pools.decode", LLAMA_8B | FP8,
     args(low_latency_gemm_plugin="fp8") | trt(gpu="b200")),
    ("trt_fused_mlp", "error", "pools.decode", LLAMA_8B | FP8, args(use_fused_mlp="disable")),
    ("trt_reduce_fusion", "warning", "pools.decode", LLAMA_8B, pools(tp=1, engine_args={"reduce_fusion": "enable"})),
    ("trt_user_buffer", "error", "pools.decode", LLAMA_8B, args(user_buffer="enable")),
    ("trt_pp_reduce_scatter", "error", "pools.decode", LLAMA_8B, args(pp_reduce_scatter="enable")),
    ("trt_streamingllm", "error", "pools.decode", LLAMA_8B, args(streamingllm="enable")),
    ("trt_input_padding", "error", "pools.decode", LLAMA_8B, args(remove_input_padding="disable")),
    ("trt_kv_cache_type", "error", "pools.decode", LLAMA_8B, args(kv_cache_type="disabled")),
    ("trt_beam_width", "error", "pools.decode", LLAMA_8B, args(max_beam_width=4)),
    ("trt_int8_sm", "error", "pools.decode", LLAMA_8B, {"precision": "int8"} | trt(gpu="b200")),
    ("trt_fp8_sm", "error", "pools.decode", LLAMA_8B | FP8, trt(gpu="a100")),
    ("trt_transceiver_default", "error", "pools.prefill", LLAMA_8B, trt(transceiver="DEFAULT")),
    ("trt_transceiver_mpi", "error", "pools.prefill", LLAMA_8B, trt(transceiver="MPI")),
    ("trt_transceiver_unknown", "error", "pools.prefill", LLAMA_8B, trt(transceiver="MOONCAKE", version="1.1")),
    ("trt_timeout_unknown", "error", "pools.prefill", LLAMA_8B, trt(kv_transfer_timeout_ms=500, version="1.1")),
    ("trt_timeout_crash", "warning", "pools.prefill", LLAMA_8B, trt(kv_transfer_timeout_ms=60_000)),
    ("trt_timeout_short", "warning", "pools.decode", LLAMA_8B, trt(kv_transfer_timeout_ms=60_000)),
    ("trt_nixl_old", "warning", "pools.prefill", LLAMA_8B, trt(transceiver="NIXL", version="1.1")),
    ("trt_overlap_scheduler", "error", "pools.prefill", LLAMA_8B,
     pools({"engine_args": {"disable_overlap_scheduler": False}}) | trt(version="1.3")),
    ("trt_attn_backend", "error", "pools.decode", LLAMA_8B, args(attn_backend="FLASHINFER") | trt(version="1.3")),
    ("trt_host_cache", "error", "pools.decode", LLAMA_8B,
     args(kv_cache_config={"host_cache_size": 1 << 30}) | trt(version="1.3")),
    ("trt_engine_arg", "error", "pools.decode.engine_args.tp_size", LLAMA_8B, args(tp_size=4)),
    ("trt_engine_arg", "error", "pools.decode.engine_args.max_tokens", LLAMA_8B, args(max_tokens=4) | V13),
    ("trt_engine_arg_owned", "error", "pools.decode.engine_args.max_batch_size", LLAMA_8B, args(max_batch_size=4)),
    ("trt_precision_source", "error", "pools.prefill.precision", LLAMA_8B, {"precision": "fp8"}),
    ("trt_precision_source", "error", "pools.prefill.precision", LLAMA_8B | FP8, {"precision": "bf16"}),
    ("trt_llm_api_precision", "error", "pools.decode.precision", LLAMA_8B, {"precision": "int8"} | trt(version="1.3")),
    ("trt_kv_dtype_weights", "error", "pools.decode.kv_dtype", LLAMA_8B, {"kv": {"dtype": "f16"}}),
    ("trt_kv_dtype_weights", "error", "pools.decode.kv_dtype", LLAMA_8B | FP8, {"kv": {"dtype": "fp8"}}),
    ("trt_kv_fmha", "error", "pools.decode", LLAMA_8B, {"kv": {"dtype": "fp8"}}),
    ("trt_transfer_path", "error", "transfer.path", EIGHT_KV_HEADS, {"transfer": {"path": "shm"}}),
    ("trt_f32", "warning", "pools.prefill.precision", EIGHT_KV_HEADS, {"precision": "f32"} | trt(max_prompt_tokens=99)),
    ("trt_gpu_memory", "error", "pools.prefill.tp", LLAMA_70B, pools({"tp": 1}) | {"kv": {"max_seq_tokens": 8192}}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "severity", "where", "config", "keys"), PIPELINE_FAULTS)
def test_a_fault_in_a_pipeline_is_found(
    tmp_path: Path, code: str, severity: str, where: str, config: dict[str, Any], keys: dict[str, Any]
) -> None:
    found = pipeline_findings(tmp_path, config, keys)
    assert (code, severity, where) in [(one.code, one.severity, one.where) for one in found], list(map(str, found))
    assert all(one.mend and all(one.values) and "\n" not in str(one) for one in found)


def test_int4_is_refused_by_name(tmp_path: Path) -> None:
    found = pipeline_findings(tmp_path, LLAMA_8B, {"precision": "int4"})
    (finding,) = [one for one in found if one.where == "pools.decode.precision" and one.severity == "error"]
    assert finding.code == "precision_unsupported"
    assert "is int4; tensorrt_llm has weights in" in finding.message


GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA_8B, {}),
    (LLAMA_70B, trt(gpu="h200")),
    (LLAMA_8B | FP8, {}),
    (LLAMA_8B | FP8, trt(gpu="b200")),
    (LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 131072}, {}),
    (LLAMA_8B | {"architectures": ["Qwen3ForCausalLM"]}, {"precision": "f16"}),
    (LLAMA_8B, pools(tp=2) | {"precision": "int8"}),
    (LLAMA_8B, {"pools": {"mixed": {"tp": 1}}}),
    (LLAMA_8B, trt(transceiver="NIXL", speculative_decoding_mode="lookahead_decoding")),
    (THREE_KV_HEADS, {"pools": {"mixed": {"tp": 3}}} | trt(max_prompt_tokens=99)),
]


@pytest.mark.parametrize(("config", "keys"), GOOD)
def test_a_good_pipeline_has_no_findings(tmp_path: Path, config: dict[str, Any], keys: dict[str, Any]) -> None:
    assert pipeline_findings(tmp_path, config, keys) == []


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_each_known_release_is_only_noted_as_absent_where_there_is_none(tmp_path: Path, version: str) -> None:
    found = pipeline_findings(tmp_path, LLAMA_8B, trt(version=version), make_machine())
    assert [one.code for one in found] == ["trt_absent"]


def engine(folder: Path, *, tp: int = 2, files: int | None = None, **changes: Any) -> Path:
    """A directory such as trtllm-build leaves; `changes` go wherever config.json has such a key."""
    document: dict[str, Any] = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "num_hidden_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_size": 128,
            "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1, "cp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        },
        "build_config": {
            "max_batch_size": 8, "max_num_tokens": 8192, "max_seq_len": 8192, "max_beam_width": 1,
            "kv_cache_type": "PAGED", "opt_num_tokens": 8,
            "plugin_config": {
                "tokens_per_block": 32, "context_fmha": True, "use_paged_context_fmha": True,
                "remove_input_padding": True, "multiple_profiles": True, "low_latency_gemm_plugin": None,
            },
        },
    }  # fmt: skip

    def change(node: dict[str, Any]) -> None:
        for key, value in node.items():
            node[key] = changes.get(key, value)
            if isinstance(value, dict):
                change(value)

    change(document)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(document))
    for rank in range(tp if files is None else files):
        (folder / f"rank{rank}.engine").write_bytes(b"x")
    return folder


ENGINE_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("trt_tokens_per_block", {"tokens_per_block": 64}),
    ("trt_kv_dtype", {"kv_cache_quant_algo": "FP8", "quant_algo": "FP8"}),
    ("trt_kv_dtype", {"dtype": "float16"}),
    ("trt_head_size", {"head_size": 64}),
    ("trt_layers", {"num_hidden_layers": 31}),
    ("trt_kv_heads", {"num_key_value_heads": 4}),
    ("trt_version_differs", {"version": "1.2.0"}),
    ("trt_release_unknown", {"version": "0.21.0"}),
    ("trt_world_size", {"world_size": 8}),
    ("trt_engine_files", {"files": 1}),
    ("trt_cp", {"cp_size": 2, "world_size": 8}),
    ("trt_power_of_two", {"tp": 3}),
    ("trt_kv_cache_type", {"kv_cache_type": "CONTINUOUS"}),
    ("trt_beam_width", {"max_beam_width": 2}),
    ("trt_input_padding", {"remove_input_padding": False}),
    ("trt_paged_fmha", {"context_fmha": False}),
    ("trt_decoder_only", {"architecture": "EncoderModel"}),
    ("trt_pp_hang", {"pp_size": 2, "world_size": 8, "files": 8}),
    ("trt_fp8_plugin", {"low_latency_gemm_plugin": "fp8"}),
    ("trt_kv_fmha", {"kv_cache_quant_algo": "INT8"}),
]


@pytest.mark.parametrize(("code", "changes"), ENGINE_FAULTS)
def test_a_fault_in_engine_directories_is_found(tmp_path: Path, code: str, changes: dict[str, Any]) -> None:
    directories = [engine(tmp_path / "prefill"), engine(tmp_path / "decode", **({"tp": 4} | changes))]
    found = lint_engine_dirs(directories)
    assert code in [one.code for one in found], list(map(str, found))
    assert all(one.mend and "\n" not in str(one) for one in found)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_good_engine_directories_have_no_findings(tmp_path: Path, tp: int) -> None:
    assert lint_engine_dirs([engine(tmp_path / "prefill"), engine(tmp_path / "decode", tp=tp)]) == []


def test_the_command_takes_an_engine_directory(tmp_path: Path) -> None:
    assert [one.code for one in lint(engine(tmp_path / "e", files=0))] == ["trt_engine_files"]


def test_a_folder_that_is_no_engine_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"not of an engine: build_config, pretrained_config, version missing"):
        lint_engine_dirs([tmp_path])


PINNED = {"UCX_TLS": "cuda_copy,cuda_ipc,rc,tcp"}
LIVE: dict[str, Any] = {
    "role": "prefill", "version": "1.2.1", "sm": 90, "dtype": "bfloat16", "num_hidden_layers": 32,
    "num_key_value_heads": 8, "head_size": 128, "tp_size": 2, "pp_size": 1, "cp_size": 1, "world_size": 2,
    "build": {"tokens_per_block": 32, "use_paged_context_fmha": True, "max_seq_len": 8192, "max_num_tokens": 8192},
    "transceiver": "UCX", "max_tokens_in_buffer": 8192, "enable_chunked_context": True,
    "ranks": [0, 1], "device_ids": [0, 1], "host": "a", "environment": PINNED,
}  # fmt: skip
OTHER = LIVE | {
    "role": "decode", "tp_size": 4, "world_size": 4, "ranks": [2, 3, 4, 5], "device_ids": [2, 3, 4, 5]
}  # fmt: skip

LIVE_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("trt_transceiver_unset", {"transceiver": None}),
    ("trt_transceiver_default", {"transceiver": "default"}),
    ("trt_transceiver_literal", {"transceiver": "ucx"}),
    ("trt_transceiver_literal", {"transceiver": "UCX", "version": "1.0.0"}),
    ("trt_transceiver_differs", {"transceiver": "NIXL"}),
    ("trt_version_differs", {"version": "1.2.0"}),
    ("trt_ranks_overlap", {"ranks": [1, 2, 3, 4]}),
    ("trt_ranks_contiguous", {"ranks": [2, 3, 5, 6]}),
    ("trt_rank_leader", {"ranks": [3, 2, 4, 5]}),
    ("trt_ranks_count", {"ranks": [2, 3]}),
    ("trt_gpu_shared", {"device_ids": [1, 2, 3, 4]}),
    ("trt_max_seq_len", {"build": LIVE["build"] | {"max_seq_len": 4096}}),
    ("trt_buffer_small", {"max_prompt_tokens": 9000, "max_tokens_in_buffer": 8192}),
    ("trt_buffer_blocks", {"max_tokens_in_buffer": 8190}),
    ("trt_kv_mapping", {"num_key_value_heads": 6, "tp_size": 4}),
    ("trt_ucx_tls", {"environment": {}}),
    ("trt_ucx_tls_no_cuda", {"environment": {"UCX_TLS": "tcp"}, "transceiver": "NIXL"}),
    ("trt_switch_value", {"environment": PINNED | {"TRTLLM_REQUEST_KV_CACHE_CONCURRENT": "true"}}),
    ("trt_switch_broken", {"environment": PINNED | {"TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER": "1"}}),
    ("trt_buffer_unit", {"environment": PINNED | {"TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE": "1024"}}),
    ("trt_inflight_cancel", {"environment": PINNED | {"TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL": "1"}}),
    ("trt_nixl_crash", {"transceiver": "NIXL", "version": "1.3.0rc24"}),
    ("trt_block_reuse", {"role": "prefill", "enable_block_reuse": True}),
    ("trt_nccl_p2p", {"sm": 89}),
]


@pytest.mark.parametrize(("code", "changes"), LIVE_FAULTS)
def test_a_fault_in_a_live_pair_is_found(code: str, changes: dict[str, Any]) -> None:
    first = LIVE | ({"num_key_value_heads": 6} if code == "trt_kv_mapping" else {})
    found = lint_live({"prefill_0": first, "decode_0": OTHER | changes})
    assert (code, "decode_0") in [(one.code, one.where) for one in found], list(map(str, found))


def test_what_holds_for_all_roles_is_said_once(tmp_path: Path) -> None:
    found = pipeline_findings(tmp_path, LLAMA_70B, {"tensorrt_llm": {"version": "1.7"}})
    assert [one.code for one in found].count("trt_release_unknown") == 1
    assert len(set(found)) == len(found)


def test_a_tp_that_can_not_be_is_one_finding_with_the_nearest_that_can(tmp_path: Path) -> None:
    [split] = [one for one in pipeline_findings(tmp_path, LLAMA_8B, pools(tp=3)) if one.code == "trt_tp_split"]
    assert split.message.endswith(
        "32 (attention heads), 8 (KV heads), 14336 (intermediate size) can't be divided evenly"
    )
    assert split.mend == "set it to 2 or 4"


def test_a_good_live_pair_has_no_findings() -> None:
    assert lint_live({"prefill_0": LIVE, "decode_0": OTHER}) == []


@pytest.mark.parametrize(
    ("words", "said"), [({"tokens": 1}, "tokens: unknown in a descriptor"), ({"tp_size": "two"}, "Expected `int")]
)
def test_a_live_engine_that_talks_nonsense_is_bad_input(words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        lint_live({"prefill_0": words})


def test_every_rule_is_provoked_above() -> None:
    modules = (lint_tensorrt_llm, tensorrt_rules, tensorrt_run_rules, tensorrt_pair_rules)
    source = "".join(Path(str(module.__file__)).read_text() for module in modules)
    codes = set(re.findall(r'"(trt_\w+)"', source))
    tables = (PIPELINE_FAULTS, ENGINE_FAULTS, LIVE_FAULTS)
    assert codes == {row[0] for table in tables for row in table} | {"trt_absent"}
    assert len(PIPELINE_FAULTS) >= 20
