"""Engine files of the stand-in on the CPU: put together to whole tensors, split again for OpenVINO, one rank a process.

Computes in f32 whatever the build says, since that is what this CPU can keep exact.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tensorrt_llm._api import VERSION
from tensorrt_llm.engine_file import MARK
from trtpd.build.backends.openvino import stored_part, weights_file
from trtpd.build.hf_config import architecture_from_config
from trtpd.build.manifest import Architecture, EngineConfig, Llama3Scaling, RoleProfile
from trtpd.build.shapes import HEAD
from trtpd.build.sharding import shard_of
from trtpd.kv_transfer.layout import KVLayout
from trtpd.runtime.engine import openvino
from trtpd.runtime.engine.group import Follower
from trtpd.runtime.engine.mpi import MpiRanks
from trtpd.runtime.engine.shell import ScheduledEngine

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Limits:
    """What one executor may do: its engine's limits, lowered by its configuration."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_input_len: int
    kv_blocks: int
    tokens_per_block: int


@dataclass(frozen=True)
class Build:
    """A directory that the stand-in's trtllm-build wrote."""

    path: Path
    model: dict[str, Any]
    settings: dict[str, Any]

    @property
    def world_size(self) -> int:
        return int(self.model["mapping"]["world_size"])

    def limits(self, config: Any) -> Limits:
        """Raises RuntimeError for a configuration that the engine wasn't built for."""
        plugins, kv = self.settings["plugin_config"], config.kv_cache_config
        if config.enable_chunked_context and not plugins["use_paged_context_fmha"]:
            raise RuntimeError("chunked context needs an engine that was built with use_paged_context_fmha")
        if config.cache_transceiver_config is not None and self.settings["kv_cache_type"] != "PAGED":
            raise RuntimeError("the cache transceiver needs a paged KV cache")
        per_block = plugins["tokens_per_block"]
        tokens = min(config.max_num_tokens or self.settings["max_num_tokens"], self.settings["max_num_tokens"])
        longest = self.settings["max_seq_len"]
        return Limits(
            max_batch_size=min(
                config.max_batch_size or self.settings["max_batch_size"], self.settings["max_batch_size"]
            ),
            max_num_tokens=tokens,
            max_seq_len=longest,
            max_input_len=longest - 1 if config.enable_chunked_context else min(longest - 1, tokens),
            kv_blocks=(kv.max_tokens or 64 * per_block) // per_block,
            tokens_per_block=per_block,
        )


def read_build(path: Path) -> Build:
    """Raises RuntimeError for a directory that isn't one, or of another version."""
    try:
        found = json.loads((path / "config.json").read_text())
    except OSError as error:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: File does not exist: {path}") from error
    if found["version"] != VERSION:
        raise RuntimeError(f"the engine was built with {found['version']}, this is {VERSION}")
    missing = [
        rank for rank in range(found["pretrained_config"]["mapping"]["world_size"])
        if not (path / f"rank{rank}.engine").is_file()
    ]  # fmt: skip
    if missing:
        raise RuntimeError(f"Error opening engine file: {path}/rank{missing[0]}.engine")
    return Build(path, found["pretrained_config"], found["build_config"])


def load_compiled(build: Build, limits: Limits, mpi: Any) -> tuple[ScheduledEngine | None, Follower | None]:
    """The engine where this process is the first rank, else what computes beside it. `mpi` is None for one rank."""
    architecture = architecture_of(build.model)
    tp = int(build.model["mapping"]["tp_size"])

    def weights() -> Iterator[tuple[str, F32]]:
        return whole_tensors([_Tensors(build.path / f"rank{rank}.engine") for rank in range(tp)], build.model)

    ranks = None if mpi is None else MpiRanks(mpi, mpi.COMM_WORLD)
    return load(architecture, limits, weights, tp=tp, ranks=ranks)


def load_hugging_face(folder: Path, limits: Limits) -> tuple[Architecture, ScheduledEngine]:
    """A model folder on one rank."""
    architecture = architecture_from_config(json.loads((folder / "config.json").read_text()), folder / "config.json")
    tensors = [_Tensors(path) for path in sorted(folder.glob("*.safetensors"))]
    engine, _ = load(architecture, limits, lambda: (item for one in tensors for item in one.all()), tp=1, ranks=None)
    assert engine is not None
    return architecture, engine


def load(
    architecture: Architecture,
    limits: Limits,
    weights: Callable[[], Iterator[tuple[str, F32]]],
    *,
    tp: int,
    ranks: MpiRanks | None,
) -> tuple[ScheduledEngine | None, Follower | None]:
    config = engine_config(architecture, limits, tp)
    rank = 0 if ranks is None else ranks.rank
    shard = shard_of(architecture, config.layout, rank)
    with tempfile.TemporaryDirectory(prefix="trtllm-stand-in-") as folder:
        for wanted in {0, rank}:
            part_of = shard if wanted == rank else shard_of(architecture, config.layout, wanted)
            parts = {}
            for name, tensor in weights():
                if name == HEAD and architecture.tie_word_embeddings:
                    continue
                part = stored_part(name, tensor, architecture, part_of)
                if part is not None:
                    parts[name] = np.ascontiguousarray(part)
            save_file(parts, str(Path(folder) / weights_file(wanted)), metadata={"bf16_as_u16": "[]"})
        name = f"trtllm.{secrets.token_hex(4)}"
        how: dict[str, Any] = {"pool_name": name, "generation": "stand-in"}
        if ranks is not None and rank:
            return None, openvino.join(config, Path(folder), ranks=ranks, **how)
        return openvino.load(config, Path(folder), ranks=ranks, **how), None


def engine_config(architecture: Architecture, limits: Limits, tp: int) -> EngineConfig:
    return EngineConfig(
        format=1,
        engine="openvino",
        role="mixed",
        model="stand-in",
        tp=tp,
        precision="f32",
        architecture=architecture,
        layout=KVLayout(
            num_layers=architecture.num_hidden_layers,
            kv_heads=architecture.num_key_value_heads,
            head_dim=architecture.head_dim,
            tokens_per_block=limits.tokens_per_block,
            dtype="f32",
            tp=tp,
        ),
        profile=RoleProfile(
            max_step_tokens=limits.max_num_tokens,
            chunk_tokens=limits.max_num_tokens,
            max_batch=limits.max_batch_size,
            kv_blocks=limits.kv_blocks,
            threads=len(os.sched_getaffinity(0)),
        ),
        max_seq_tokens=limits.max_seq_len,
        end_ids=(),
        fingerprint="stand-in",
        versions={},
        cpu_features=(),
    )


def architecture_of(model: dict[str, Any]) -> Architecture:
    """Of a checkpoint's config.json."""
    scaling = model.get("rotary_scaling")
    names = Llama3Scaling.__struct_fields__
    return Architecture(
        num_hidden_layers=model["num_hidden_layers"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["intermediate_size"],
        num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model["num_key_value_heads"],
        head_dim=model["head_size"],
        vocab_size=model["vocab_size"],
        rms_norm_eps=model["norm_epsilon"],
        rope_theta=model["rotary_base"],
        max_position_embeddings=model["max_position_embeddings"],
        tie_word_embeddings=model["tie_word_embeddings"],
        rope_scaling=None if scaling is None else Llama3Scaling(**{name: scaling[name] for name in names}),
    )


class _Tensors:
    """A safetensors file, or an engine file around one, read where it lies."""

    def __init__(self, path: Path) -> None:
        raw = np.memmap(path, np.uint8, "r")
        start = 0
        if bytes(raw[: len(MARK)]) == MARK:
            start = len(MARK) + 8
            start += int.from_bytes(bytes(raw[start - 8 : start]), "little")
        length = int.from_bytes(bytes(raw[start : start + 8]), "little")
        self._header: dict[str, Any] = json.loads(bytes(raw[start + 8 : start + 8 + length]))
        self._header.pop("__metadata__", None)
        self._data = raw[start + 8 + length :]

    def __getitem__(self, name: str) -> F32:
        entry = self._header[name]
        first, last = entry["data_offsets"]
        stored = self._data[first:last]
        if entry["dtype"] == "F32":
            values: F32 = stored.view(np.float32)
        elif entry["dtype"] == "BF16":
            values = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = stored.view({"F16": np.float16}[entry["dtype"]]).astype(np.float32)
        return values.reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def all(self) -> Iterator[tuple[str, F32]]:
        return ((name, self[name]) for name in self)


_NAMES = {
    "transformer.vocab_embedding.weight": ("model.embed_tokens.weight", None),
    "transformer.ln_f.weight": ("model.norm.weight", None),
}
_PARTS = {
    "input_layernorm": ("input_layernorm", None),
    "post_layernorm": ("post_attention_layernorm", None),
    "attention.dense": ("self_attn.o_proj", 1),
    "mlp.fc": ("mlp.gate_proj", 0),
    "mlp.gate": ("mlp.up_proj", 0),
    "mlp.proj": ("mlp.down_proj", 1),
}


def whole_tensors(ranks: list[_Tensors], model: dict[str, Any]) -> Iterator[tuple[str, F32]]:
    """All ranks' weights under their Hugging Face names."""
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        if name == HEAD:
            yield name, np.concatenate(parts)[: model["vocab_size"]]
        elif name in _NAMES:
            yield _NAMES[name][0], parts[0]
        elif name.endswith("attention.qkv.weight"):
            yield from _qkv(name.removesuffix("attention.qkv.weight"), parts, model)
        else:
            layer, kind = name.removeprefix("transformer.layers.").removesuffix(".weight").split(".", 1)
            target, axis = _PARTS[kind]
            whole = parts[0] if axis is None else np.concatenate(parts, axis=axis)
            yield f"model.layers.{layer}.{target}.weight", whole


def _qkv(prefix: str, parts: list[F32], model: dict[str, Any]) -> Iterator[tuple[str, F32]]:
    tp, size = len(parts), model["head_size"]
    q_rows = model["num_attention_heads"] // tp * size
    kv_rows = max(1, model["num_key_value_heads"] // tp) * size
    copies = max(1, tp // model["num_key_value_heads"])
    layer = prefix.removeprefix("transformer.layers.").rstrip(".")
    for letter, start, rows, every in (
        ("q", 0, q_rows, 1), ("k", q_rows, kv_rows, copies), ("v", q_rows + kv_rows, kv_rows, copies)
    ):  # fmt: skip
        held = [part[start : start + rows] for part in parts[::every]]
        yield f"model.layers.{layer}.self_attn.{letter}_proj.weight", np.concatenate(held)
