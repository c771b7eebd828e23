"""The table of publicly reported faults in docs/tensorrt-llm.md: what it names exists, and each of its lint rules is
provoked under the report's number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.gpu_models import LLAMA_8B, config_only
from trtpd_testing.tiny import make_machine

from trtpd.build.lint import lint_spec, open_plan
from trtpd.build.lint_tensorrt_llm import lint_live
from trtpd.build.spec import parse_spec

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/tensorrt-llm.md"
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)

ENGINE: dict[str, Any] = {
    "role": "prefill", "version": "1.2.1", "sm": 90, "tp_size": 2, "pp_size": 1, "cp_size": 1, "world_size": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "head_size": 128, "dtype": "bfloat16", "transceiver": "UCX",
    "build": {"tokens_per_block": 32, "use_paged_context_fmha": True, "max_num_tokens": 8192},
    "max_tokens_in_buffer": 8192, "environment": {"UCX_TLS": "cuda_copy,cuda_ipc,rc,tcp"},
}  # fmt: skip

LIVE: list[tuple[int, str, dict[str, Any]]] = [
    (1, "trt_attn_backend", {"attn_backend": "FLASHINFER"}),
    (2, "trt_block_reuse", {"enable_block_reuse": True}),
    (5, "trt_switch_broken", {"environment": {"TRTLLM_DISAGG_LAYERWISE": "1"}}),
    (6, "trt_max_num_tokens", {"max_prompt_tokens": 8193, "enable_chunked_context": False}),
    (8, "trt_release_unknown", {"version": "0.14.0"}),
    (11, "trt_inflight_cancel", {"environment": {"TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL": "1"}}),
    (13, "trt_timeout_crash", {"kv_transfer_timeout_ms": 600_000}),
    (14, "trt_timeout_short", {"version": "1.3.0", "kv_transfer_timeout_ms": 60_000}),
    (16, "trt_pp_hang", {"pp_size": 2, "world_size": 4}),
    (17, "trt_ucx_tls", {"environment": {}}),
    (18, "trt_nccl_p2p", {"sm": 89}),
    (19, "trt_buffer_small", {"max_prompt_tokens": 8200}),
    (20, "trt_buffer_small", {"transceiver": "NIXL", "max_prompt_tokens": 8200}),
    (21, "trt_nixl_old", {"version": "1.1.0", "transceiver": "NIXL"}),
    (27, "trt_ranks_count", {"ranks": [0]}),
    (29, "trt_host_cache", {"host_cache_size": 1 << 30}),
    (30, "trt_kv_cache_type", {"build": {"kv_cache_type": "disabled"}}),
    (31, "trt_nixl_crash", {"version": "1.3.0rc24", "transceiver": "NIXL"}),
]


def table() -> dict[int, str]:
    """What the document says against each report, by its number."""
    return {int(number): answer for number, _, _, answer in ROW.findall(DOCUMENT.read_text())}


@pytest.mark.parametrize(("number", "code", "changes"), LIVE, ids=[f"{number}-{code}" for number, code, _ in LIVE])
def test_a_reported_fault_is_found_where_it_may_happen(number: int, code: str, changes: dict[str, Any]) -> None:
    other = ENGINE | {"role": "decode", "tp_size": 4, "world_size": 4}
    found = lint_live({"prefill_0": ENGINE | changes, "decode_0": other})
    assert code in [one.code for one in found], list(map(str, found))
    assert code not in [one.code for one in lint_live({"prefill_0": ENGINE, "decode_0": other})]
    assert f"`{code}`" in table()[number]


def test_a_reported_memory_fault_is_found_in_the_pipeline_file(tmp_path: Path) -> None:
    model = config_only(tmp_path / "model", LLAMA_8B)
    keys = {"pools": {"prefill": {"tp": 2}, "decode": {"tp": 4}}, "tensorrt_llm": {"max_prompt_tokens": 100_000}}
    spec = parse_spec({"model": str(model), "engine": "tensorrt_llm"} | keys)
    codes = [one.code for one in lint_spec(spec, open_plan(spec), make_machine(tensorrt_llm="1.2.1"))]
    assert "trt_buffer_memory" in codes
    assert "`trt_buffer_memory`" in table()[5]


def test_every_report_has_an_answer() -> None:
    assert sorted(table()) == list(range(1, 32))
    assert {number for number, answer in table().items() if "`trt_" in answer} == {row[0] for row in LIVE}


def test_what_the_table_names_exists() -> None:
    rules = "".join(path.read_text() for path in (ROOT / "build").glob("*tensorrt*.py"))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for answer in table().values():
        for name in re.findall(r"`(trt_\w+|test_\w+)`", answer):
            assert f'"{name}"' in rules if name.startswith("trt_") else f"def {name}(" in tests, name
