"""The stand-in for TensorRT-LLM as if it were installed, and engines that its trtllm-build made."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from trtpd.build.backends.tensorrt_llm.checkpoint import convert
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.machine import installed_version
from trtpd.build.manifest import Architecture, EngineConfig, RoleProfile, TensorRTConfig, write_json
from trtpd.kv_transfer.layout import KVLayout
from trtpd_testing.tiny import write_weights_file

DOUBLES = Path(__file__).resolve().parents[2] / "doubles"


def environment(folder: Path, *, version: str = "1.2.1", gpus: int = 4) -> dict[str, str]:
    """What processes need to find it: `folder` gets its metadata."""
    info = folder / "site" / f"tensorrt_llm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    paths = (str(DOUBLES), str(info.parent), os.environ.get("PYTHONPATH", ""))
    return {
        "PATH": f"{DOUBLES / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "TRTPD_DOUBLE_VERSION": version,
    }


@contextmanager
def installed(folder: Path, *, version: str = "1.2.1", **environ: str) -> Iterator[None]:
    """Importable in this process and in those it starts."""
    with ExitStack() as stack:
        found = environment(folder, version=version)
        stack.enter_context(mock.patch.dict(os.environ, found | environ))
        stack.enter_context(mock.patch.object(sys, "path", [str(DOUBLES), str(folder / "site"), *sys.path]))
        _forget()
        stack.callback(_forget)
        yield


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt", "tensorrt_llm")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    installed_version.cache_clear()


def settings(mode: str = "engine", *, release: str = "1.2", **changes: Any) -> TensorRTConfig:
    values: dict[str, Any] = {
        "release": release,
        "mode": mode,
        "gpu": "h100",
        "sm": 90,
        "dtype": "float32",
        "quant_algo": None,
        "kv_cache_quant_algo": None,
        "transceiver": "UCX",
        "max_tokens_in_buffer": 512,
        "kv_transfer_timeout_ms": 5000,
        "max_prompt_tokens": 250,
        "chunked_context": True,
        "free_gpu_memory_fraction": 0.9,
        "settings": {},
    }
    return TensorRTConfig(**(values | changes))


def write_hugging_face(folder: Path, architecture: Architecture, weights: dict[str, Any]) -> Path:
    """A model folder in f32."""
    folder.mkdir()
    plain = msgspec.to_builtins(architecture) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    extra = ("family", "attention_bias", "qk_norm", "quantization")
    kept = {key: value for key, value in plain.items() if value is not None and key not in extra}
    (folder / "config.json").write_text(json.dumps(kept | {"hidden_act": "silu", "eos_token_id": 2}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    write_weights_file(folder / "model.safetensors", weights)
    return folder


def engine_config(
    architecture: Architecture,
    profile: RoleProfile,
    trt: TensorRTConfig,
    *,
    tp: int = 1,
    max_seq_tokens: int = 256,
    role: Any = "mixed",
) -> EngineConfig:
    return EngineConfig(
        format=1,
        engine="tensorrt_llm",
        role=role,
        model="tiny",
        tp=tp,
        precision="f32",
        architecture=architecture,
        layout=KVLayout(
            num_layers=architecture.num_hidden_layers,
            kv_heads=architecture.num_key_value_heads,
            head_dim=architecture.head_dim,
            tokens_per_block=32,
            dtype="f32",
            tp=tp,
        ),
        profile=profile,
        max_seq_tokens=max_seq_tokens,
        end_ids=(),
        fingerprint="tiny",
        versions={},
        cpu_features=(),
        tensorrt_llm=trt,
    )


def compile_engine(model: Path, directory: Path, config: EngineConfig) -> Path:
    """An engine directory of ours, compiled by the stand-in, which must be installed. The KV type is taken to allow
    chunked context in f32, which the real one doesn't have: the CPU computes nothing else exactly."""
    trt = config.tensorrt_llm
    assert trt is not None
    checkpoint = directory / "checkpoint"
    directory.mkdir()
    convert(open_checkpoint(model), config.architecture, trt, config.tp, checkpoint, lambda done, total: None)
    build = importlib.import_module("tensorrt_llm.commands.build")
    arguments = {
        "checkpoint_dir": checkpoint,
        "output_dir": directory / "engine",
        "output_timing_cache": directory / "timing.cache",
        "max_batch_size": 64,
        "max_num_tokens": 1024,
        "max_seq_len": config.max_seq_tokens,
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    with mock.patch.object(sys, "argv", ["trtllm-build", *words]):
        build.main()
    write_json(directory / "config.json", config)
    return directory
