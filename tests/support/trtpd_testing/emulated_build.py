"""A build directory for emulated engines, written in a moment and without the builder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trtpd.build.manifest import (
    FORMAT,
    Architecture,
    EngineConfig,
    Manifest,
    RoleEntry,
    RoleName,
    RoleProfile,
    current_versions,
    write_json,
)
from trtpd.kv_transfer.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=8, tokens_per_block=4, dtype="f32")
VOCAB = 1000


def engine_config(
    role: RoleName, *, kv_blocks: int = 64, tp: int = 1, prefix_cache: bool = False, **costs: float
) -> EngineConfig:
    """An emulated engine of 256 tokens at most, in chunks of 16; `costs` as in StepCosts, else nearly none."""
    return EngineConfig(
        format=FORMAT,
        engine="emulated",
        role=role,
        model="toy",
        tp=tp,
        precision="f32",
        architecture=Architecture(
            num_hidden_layers=LAYOUT.num_layers,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=LAYOUT.kv_heads,
            head_dim=LAYOUT.head_dim,
            vocab_size=VOCAB,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        ),
        layout=replace(LAYOUT, tp=tp),
        profile=RoleProfile(
            max_step_tokens=32,
            chunk_tokens=16,
            max_batch=8,
            kv_blocks=kv_blocks,
            threads=1,
            prefix_cache=prefix_cache,
        ),
        max_seq_tokens=256,
        end_ids=(2,),
        fingerprint=f"toy-{role}",
        versions=current_versions("emulated"),
        cpu_features=(),
        emulated={"prefill_tokens_per_s": 1e6, "decode_step_ms": 0.0} | costs,
        pair_fingerprint="toy",
    )


def write_build(
    folder: Path,
    *roles: RoleName,
    kv_blocks: int = 64,
    lease_s: float = 5.0,
    path: str = "auto",
    tp: Mapping[RoleName, int] | None = None,
    prefix_cache: bool = False,
    **costs: float,
) -> Path:
    """A build with one instance per role, named ROLE_0, of `tp` ranks (else one), whose KV moves by `path`."""
    entries: dict[str, RoleEntry] = {}
    for role in roles:
        size = (tp or {}).get(role, 1)
        config = engine_config(role, kv_blocks=kv_blocks, tp=size, prefix_cache=prefix_cache, **costs)
        (folder / role).mkdir(parents=True)
        write_json(folder / role / "config.json", config)
        entries[role] = RoleEntry(
            directory=role,
            fingerprint=config.fingerprint,
            engine="emulated",
            precision="f32",
            layout=config.layout,
            instances=(f"{role}_0",),
        )
    manifest = Manifest(
        format=FORMAT,
        trtpd=current_versions("emulated")["trtpd"],
        model="toy",
        pair_fingerprint="toy",
        roles=entries,
        settings={
            "model": "toy",
            "engine": "emulated",
            "pools": {role: {} for role in roles},
            "transfer": {"lease_s": lease_s, "digests": True, "one_piece_tokens": 8, "path": path},
        },
    )
    write_json(folder / "manifest.json", manifest)
    return folder
