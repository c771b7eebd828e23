"""The stand-in for TensorRT-LLM against api.json: what it has, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
API: dict[str, Any] = json.loads((HERE / "api.json").read_text())
SURFACE = """
import dataclasses, json, sys, typing
from tensorrt_llm import __version__, llmapi
from tensorrt_llm.builder import BuildConfig
from tensorrt_llm.commands.build import parse_arguments
from tensorrt_llm.plugin import PluginConfig

flags = {}
for action in parse_arguments()._actions:
    if action.dest != "help":
        default = "<absent>" if action.default == "==SUPPRESS==" else action.default
        flags[action.option_strings[0]] = [
            action.option_strings[1:], default, list(action.choices) if action.choices else None, action.nargs
        ]
models = {}
for name in ("KvCacheConfig", "CacheTransceiverConfig", "TorchLlmArgs"):
    model = getattr(llmapi, name)
    models[name] = [model.model_config["extra"], sorted(model.model_fields)]
backend = llmapi.CacheTransceiverConfig.model_fields["backend"].annotation
json.dump({
    "version": __version__,
    "flags": flags,
    "build_config": {one.name: one.default for one in dataclasses.fields(BuildConfig)},
    "plugins": PluginConfig().to_dict(),
    "models": models,
    "backends": [word for part in typing.get_args(backend) for word in typing.get_args(part)],
}, sys.stdout)
"""


def run(*words: str, version: str = "1.2.1", gpus: str = "0,1", **environ: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHONPATH": str(HERE), "TRTPD_DOUBLE_VERSION": version, "CUDA_VISIBLE_DEVICES": gpus} | environ
    return subprocess.run(words, env=os.environ | given, capture_output=True, text=True, check=False)


def surface(version: str = "1.2.1") -> dict[str, Any]:
    done = run(sys.executable, "-P", "-c", SURFACE, version=version)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_its_flags_are_those_of_the_table() -> None:
    flags = surface()["flags"]
    assert set(flags) == set(API["build_flags"])
    for flag, entry in API["build_flags"].items():
        aliases, default, choices, nargs = flags[flag]
        assert aliases == entry.get("aliases", [])
        assert default == entry["default"]
        assert choices == (None if entry["type"] == "enum" else entry.get("choices"))
        assert (nargs == 0) == (entry["type"] == "store_true")


def test_its_configurations_have_the_tables_fields_and_defaults() -> None:
    found = surface()
    for name, table in (("build_config", "build_config_fields"), ("plugins", "plugin_config_fields")):
        assert set(found[name]) == set(API[table])
        for field, entry in API[table].items():
            default = entry["default"]
            constructed = isinstance(default, str) and default.endswith("()")
            assert found[name][field] == (None if constructed else default)


def test_its_models_refuse_what_the_table_does_not_name() -> None:
    found = surface("1.4.0")["models"]
    assert all(extra == "forbid" for extra, _ in found.values())
    torch = API["llmapi"]["BaseLlmArgs"]["fields"] | API["llmapi"]["TorchLlmArgs"]["fields"]
    assert found["TorchLlmArgs"][1] == sorted(torch)


@pytest.mark.parametrize(
    ("version", "backends", "timeout"),
    [
        ("1.0.0", ["default", "ucx", "nixl", "mpi"], False),
        ("1.1.0", ["DEFAULT", "UCX", "NIXL", "MPI"], False),
        ("1.2.1", ["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"], True),
    ],
)
def test_its_transceivers_are_those_of_the_release(version: str, backends: list[str], timeout: bool) -> None:
    found = surface(version)
    assert found["backends"] == backends
    assert ("kv_transfer_timeout_ms" in found["models"]["CacheTransceiverConfig"][1]) == timeout


REFUSED: list[tuple[list[str], dict[str, str], str]] = [
    (["--tp_size", "2"], {}, "unrecognized arguments: --tp_size 2"),
    (["--gemm_plugin", "int8"], {}, "invalid choice: 'int8'"),
    (["--paged_kv_cache"], {}, "expected one argument"),
    (["--kv_cache_type", "unpaged"], {}, "Invalid kv cache type"),
    (["--multiple_profiles", "enable", "--opt_num_tokens", "64"], {}, "multiple_profiles is enabled"),
    (["--gather_context_logits", "--max_draft_len", "3"], {}, "Gather context logits"),
    (["--streamingllm", "enable"], {}, "no longer supported"),
    (["--pp_reduce_scatter", "enable"], {}, "only supported in mixtral"),
    (["--low_latency_gemm_plugin", "fp8"], {}, "needs FP8 weights"),
    (["--low_latency_gemm_plugin", "fp8"], {"TRTPD_DOUBLE_SM": "100"}, "not supported on SM 100"),
    ([], {"CUDA_VISIBLE_DEVICES": ""}, "max_workers must be greater than 0"),
    ([], {}, "rank0.safetensors is missing"),
]


@pytest.mark.parametrize(("flags", "environ", "said"), REFUSED)
def test_it_refuses_what_the_real_one_refuses(
    tmp_path: Path, flags: list[str], environ: dict[str, str], said: str
) -> None:
    config = {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 8, "intermediate_size": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = str(HERE / "bin" / "trtllm-build")
    places = ["--checkpoint_dir", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    done = run(program, *places, *flags, **environ)
    assert done.returncode != 0
    assert said in done.stderr
    assert not list(tmp_path.glob("out/*.engine"))
