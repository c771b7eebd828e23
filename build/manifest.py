"""What a build directory says of itself: manifest.json, and config.json in each engine directory.

BUILD/
  manifest.json      Manifest
  tokenizer/         tokenizer.json, tokenizer_config.json, generation_config.json as the checkpoint had them
  prefill/ decode/ mixed/   config.json (EngineConfig) and rank<N>.safetensors
  model_repo/        the Triton model repository
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from trtpd.kv_transfer.layout import KVLayout

FORMAT = 1
RoleName = Literal["prefill", "decode", "mixed"]
Precision = Literal["f32", "bf16", "int8"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """The "llama3" scaling of rotary frequencies, names as in a Hugging Face config."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a LlamaForCausalLM, names as in a Hugging Face config."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None


class RoleProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a role's engine its own. Made by roles.py.

    `max_step_tokens`: tokens one step may compute · `chunk_tokens`: of one prompt in one step · `max_batch`:
    sequences running at once · `kv_blocks`: size of the KV pool · `threads` and `cores` (CPU numbers, empty: any).
    """

    max_step_tokens: int
    chunk_tokens: int
    max_batch: int
    kv_blocks: int
    threads: int
    cores: tuple[int, ...] = ()


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json of an engine directory: all an engine needs besides its weights."""

    format: int
    engine: str
    role: RoleName
    model: str
    tp: int
    precision: Precision
    architecture: Architecture
    layout: KVLayout
    profile: RoleProfile
    max_seq_tokens: int
    end_ids: tuple[int, ...]
    fingerprint: str
    versions: dict[str, str]
    cpu_features: tuple[str, ...]
    emulated: dict[str, float] = {}

    @property
    def pairing_key(self) -> str:
        return self.layout.pairing_key


class RoleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One role in the manifest. `fingerprint` covers weights, layout, versions and build settings."""

    directory: str
    fingerprint: str
    engine: str
    precision: Precision
    layout: KVLayout
    instances: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json. `pair_fingerprint` is equal in all roles of one build: pairs never cross it.

    `settings` is the resolved pipeline file (defaults filled in) as plain data.
    """

    format: int
    trtpd: str
    model: str
    pair_fingerprint: str
    roles: dict[str, RoleEntry]
    settings: dict[str, object]


def read_manifest(build: Path) -> Manifest:
    """Raises InputError if `build` is not a build directory of this format (value and mend in the message)."""
    raise NotImplementedError


def read_engine_config(directory: Path) -> EngineConfig:
    """Raises EngineError if missing, truncated or of another format."""
    raise NotImplementedError
