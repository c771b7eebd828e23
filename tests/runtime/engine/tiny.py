"""A tiny random Llama in every precision, and the engines that run it."""

from __future__ import annotations

import contextlib
import json
import threading
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from trtpd.build.backends.openvino import INT4_MATRICES, stored_part, weights_file
from trtpd.build.manifest import Architecture, EngineConfig, Llama3Scaling, Precision, RoleProfile, RopeScaling
from trtpd.build.quantise import group_of, quantise, quantise_groups, widened_groups
from trtpd.build.sharding import shard_of
from trtpd.kv_transfer.layout import KVDtype, KVLayout
from trtpd.runtime.engine import emulated, openvino
from trtpd.runtime.engine.ranks import LocalRanks
from trtpd.runtime.engine.shell import ScheduledEngine

F32 = npt.NDArray[np.float32]
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
PROFILE = RoleProfile(max_step_tokens=64, chunk_tokens=32, max_batch=4, kv_blocks=24, threads=1)

_names = count()


def architecture(*, tied: bool = False, rope_scaling: RopeScaling | None = None, head_dim: int = 16) -> Architecture:
    return Architecture(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=199,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        rope_scaling=rope_scaling,
    )


def weights(arch: Architecture, seed: int = 0) -> dict[str, F32]:
    """Random weights under their Hugging Face names, lively enough that greedy answers don't repeat a token."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    shapes = {"model.embed_tokens.weight": (arch.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(arch.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (heads, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    if not arch.tie_word_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return {
        name: (rng.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def stored(values: dict[str, F32], precision: Precision) -> dict[str, npt.NDArray[np.generic]]:
    """The tensors of an engine file: matrices in the precision's type, norms in f32."""
    if precision == "f32":
        return dict(values)
    out: dict[str, npt.NDArray[np.generic]] = {}
    for name, tensor in values.items():
        if tensor.ndim == 1:
            out[name] = tensor
        elif precision == "f16":
            out[name] = tensor.astype(np.float16)
        elif precision == "bf16" or name == "model.embed_tokens.weight":
            out[name] = (tensor.view(np.uint32) >> 16).astype(np.uint16)
        else:
            out |= quantised(name, tensor, groups=precision == "int4")
    if precision in ("int8", "int4") and "lm_head.weight" not in values:
        out |= quantised("lm_head.weight", values["model.embed_tokens.weight"])
    return out


def quantised(name: str, tensor: F32, *, groups: bool = False) -> dict[str, npt.NDArray[np.generic]]:
    group = group_of(tensor.shape[1]) if groups and name.endswith(INT4_MATRICES) else None
    values, scale = quantise(tensor) if group is None else quantise_groups(tensor, group)
    return {name: values, f"{name}.scale": scale}


def read_back(tensors: dict[str, npt.NDArray[np.generic]]) -> dict[str, F32]:
    """What an engine computes with: the stored tensors as f32."""
    out: dict[str, F32] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == np.uint16:
            out[name] = (tensor.astype(np.uint32) << 16).view(np.float32)
        elif tensor.dtype == np.uint8:
            out[name] = widened_groups(tensor.view(np.uint8), tensors[f"{name}.scale"].view(np.float32))
        elif tensor.dtype == np.int8:
            out[name] = tensor.astype(np.float32) * tensors[f"{name}.scale"].astype(np.float32)
        elif tensor.dtype == np.float16 or (tensor.dtype == np.float32 and not name.endswith(".scale")):
            out[name] = tensor.astype(np.float32)
    return out


def save(directory: Path, tensors: dict[str, npt.NDArray[np.generic]]) -> Path:
    _write(directory / weights_file(0), tensors)
    return directory


def save_ranks(directory: Path, tensors: dict[str, npt.NDArray[np.generic]], settings: EngineConfig) -> Path:
    """The files of every rank that `settings` say there are."""
    arch = settings.architecture
    for rank in range(settings.tp):
        shard = shard_of(arch, settings.layout, rank)
        parts = {name: stored_part(name, tensor, arch, shard) for name, tensor in tensors.items()}
        held = {name: np.ascontiguousarray(part) for name, part in parts.items() if part is not None}
        _write(directory / weights_file(rank), held)
    return directory


def _write(path: Path, tensors: dict[str, npt.NDArray[np.generic]]) -> None:
    bf16 = [name for name, tensor in tensors.items() if tensor.dtype == np.uint16]
    save_file(tensors, str(path), metadata={"bf16_as_u16": json.dumps(bf16)})


def config(
    arch: Architecture,
    *,
    engine: str = "openvino",
    precision: Precision = "f32",
    kv_dtype: KVDtype = "f32",
    profile: RoleProfile = PROFILE,
    max_seq_tokens: int = 256,
    tokens_per_block: int = 32,
    tp: int = 1,
) -> EngineConfig:
    return EngineConfig(
        format=1,
        engine=engine,
        role="mixed",
        model="tiny",
        tp=tp,
        precision=precision,
        architecture=arch,
        layout=KVLayout(
            num_layers=arch.num_hidden_layers,
            kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            tokens_per_block=tokens_per_block,
            dtype=kv_dtype,
            tp=tp,
        ),
        profile=profile,
        max_seq_tokens=max_seq_tokens,
        end_ids=(),
        fingerprint="tiny",
        versions={},
        cpu_features=(),
        emulated={"prefill_tokens_per_s": 1000.0, "decode_step_ms": 10.0},
    )


def load_openvino(settings: EngineConfig, directory: Path) -> ScheduledEngine:
    return openvino.load(settings, directory, pool_name=f"test-{next(_names)}", generation="g")


def load_emulated(settings: EngineConfig) -> ScheduledEngine:
    """An emulated engine whose steps take no time."""
    return emulated.load(
        settings,
        Path(),
        pool_name=f"test-{next(_names)}",
        generation="g",
        sleep=lambda seconds: None,
        clock=lambda: 0.0,
    )


def load_local(settings: EngineConfig, directory: Path) -> ScheduledEngine:
    """The engine of `settings.tp` ranks, each a thread of this process; they end with it."""
    module = {"openvino": openvino, "emulated": emulated}[settings.engine]
    ranks = LocalRanks.make(settings.tp)
    name = f"test-{next(_names)}"

    def follow(rank: LocalRanks) -> None:
        follower = module.join(settings, directory, pool_name=f"{name}.{rank.rank}", generation="g", ranks=rank)
        with contextlib.closing(follower), contextlib.suppress(threading.BrokenBarrierError):  # after an abort
            follower.run()

    for rank in ranks[1:]:
        threading.Thread(target=follow, args=(rank,), daemon=True).start()
    return module.load(settings, directory, pool_name=name, generation="g", ranks=ranks[0])
