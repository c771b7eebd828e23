"""What a build directory says of itself: manifest.json, and config.json in each engine directory.

BUILD/
  manifest.json      Manifest
  tokenizer/         tokenizer.json, tokenizer_config.json, generation_config.json as the checkpoint had them
  prefill/ decode/ mixed/   config.json (EngineConfig), and what the engine loads: rank<N>.safetensors, or for
                     tensorrt_llm engine/ (compiled) or llm_args.yaml and model/ (LLM API)
  model_repo/        the Triton model repository
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from trtpd import __version__
from trtpd.build.decoding import typed_json
from trtpd.build.machine import cpu_features, installed_version
from trtpd.errors import EngineError, InputError, LayoutError
from trtpd.kv_transfer.layout import KVLayout

FORMAT = 1
MANIFEST = "manifest.json"
ENGINE_CONFIG = "config.json"
REBUILD = "build it again with `trtpd build pipeline.yaml -o BUILD --force`"
_ENGINE_PACKAGES = {"openvino": ("openvino",), "tensorrt_llm": ("tensorrt_llm",)}
RoleName = Literal["prefill", "decode", "mixed"]
Precision = Literal["f32", "bf16", "f16", "int8", "int4", "fp8"]
Settings = dict[str, Any]


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, tag="linear"):
    """All rotary frequencies divided by `factor`."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, tag="llama3"):
    """Names as in a Hugging Face config."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, tag="yarn"):
    """Names as in a Hugging Face config; `attention_factor` is the final one that scales cos and sin."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class FactorScaling(msgspec.Struct, frozen=True, kw_only=True, tag="factors"):
    """Each rotary frequency divided by its own factor: what a GGUF file keeps of llama3 scaling."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's weights are stored, names as in TensorRT-LLM: linear weights in `quant_algo`, except
    in modules that a pattern of `exclude_modules` names; `kv_cache_quant_algo` says that it brings scales for
    a KV cache of that kind."""

    quant_algo: str
    kv_cache_quant_algo: str | None = None
    exclude_modules: tuple[str, ...] = ()


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a decoder, names as in a Hugging Face config. `family` is a name of families.py, where the
    table says how it is built; `attention_bias` and `qk_norm` repeat what stands there.

    `window_layers` are the numbers of those layers whose tokens see only the last `sliding_window` tokens, their own
    included · `local_rope_theta`: the rotary base of these layers, which then have no `rope_scaling`; None: as all ·
    `query_pre_attn_scalar`: attention scores are divided by its root; None: by that of head_dim ·
    `final_logit_softcapping`: a logit is c * tanh(logit / c) of it.
    """

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
    family: str = "llama"
    attention_bias: bool = False
    qk_norm: bool = False
    quantization: Quantization | None = None
    sliding_window: int | None = None
    window_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    query_pre_attn_scalar: float | None = None
    final_logit_softcapping: float | None = None


class RoleProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a role's engine its own. Made by roles.py.

    `max_step_tokens`: tokens one step may compute · `chunk_tokens`: of one prompt in one step · `max_batch`:
    sequences running at once · `kv_blocks`: size of the KV pool · `threads` and `cores` (CPU numbers, empty:
    any) · `widen_weights`: narrow weights become f32 at load, the same values: faster to compute with, but more to read
    and to hold · `growth_kept`: the share of what a running sequence may still grow by that is kept free for it (1: it
    is never preempted) · `prefix_cache`: whether prompts that begin alike share KV blocks, and of
    `prefix_cache_blocks` that no sequence has the content is kept for that at most (None: of all).
    """

    max_step_tokens: int
    chunk_tokens: int
    max_batch: int
    kv_blocks: int
    threads: int
    cores: tuple[int, ...] = ()
    widen_weights: bool = False
    growth_kept: float = 1.0
    prefix_cache: bool = False
    prefix_cache_blocks: int | None = None


class TensorRTConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a tensorrt_llm role was built with and must be run with.

    `release` is the line it was built for ("1.2"). `mode` "engine": compiled, `settings` are the flags of
    trtllm-build without paths; "llm_api": `settings` are the arguments of the LLM class. `transceiver` is
    spelled as that release wants it. `sm` is the compute capability of `gpu` (90 for 9.0).
    """

    release: str
    mode: Literal["engine", "llm_api"]
    gpu: str
    sm: int
    dtype: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    transceiver: str
    max_tokens_in_buffer: int
    kv_transfer_timeout_ms: int | None
    max_prompt_tokens: int
    chunked_context: bool
    free_gpu_memory_fraction: float
    settings: Settings


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json of an engine directory: all an engine needs besides its weights.

    `fingerprint` and `pair_fingerprint` as in RoleEntry and Manifest: the second is what two instances of a
    pair must share, and what an instance tells the router.
    """

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
    pair_fingerprint: str = ""
    tensorrt_llm: TensorRTConfig | None = None

    @property
    def pairing_key(self) -> str:
        return self.layout.pairing_key

    @property
    def processes(self) -> int:
        """How many processes of ours an instance is: one for each rank, but the LLM class starts its ranks itself."""
        return 1 if self.tensorrt_llm is not None and self.tensorrt_llm.mode == "llm_api" else self.tp


class _FormatOnly(msgspec.Struct, frozen=True):
    format: int = 0


class RoleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One role in the manifest. `fingerprint` covers weights, layout, versions and build settings.

    `cores` says for each instance which CPUs are its own (absent: the profile's).
    """

    directory: str
    fingerprint: str
    engine: str
    precision: Precision
    layout: KVLayout
    instances: tuple[str, ...]
    cores: dict[str, tuple[int, ...]] = {}


class PrecisionError(msgspec.Struct, frozen=True, kw_only=True):
    """How far a precision is from f32 on the build's fixed text, over `tokens` positions: mean KL divergence, mean
    absolute error of the log-probability of the text's next token, root mean square error of the logits (their mean
    taken off), the share of positions with the same best token, and both perplexities."""

    tokens: int
    kl_nats: float
    log_prob_error: float
    logit_error: float
    same_best: float
    perplexity: float
    f32_perplexity: float


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """What the build found of a precision: figures, or why there are none (`skipped`). `key` names what they depend
    on."""

    key: str
    figures: PrecisionError | None = None
    skipped: str | None = None


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `trtpd build --tune` measured for one variant of a role: `seconds` of a prefill of `batch` prompts of
    `tokens` tokens, or of a decode step of `batch` sequences with a context of `tokens`."""

    kind: Literal["prefill", "decode"]
    tokens: int
    batch: int
    chunk_tokens: int
    widen_weights: bool
    seconds: float
    threads: int = 0
    precision: str = ""


class RoleTuning(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried for a role, what was chosen and why; `complete` is false where time ran out before all was
    tried."""

    tried: tuple[TrialResult, ...]
    chosen: dict[str, int | bool | str | tuple[int, ...]]
    why: tuple[str, ...]
    complete: bool


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json. `pair_fingerprint` is equal in all roles of one build: pairs never cross it.

    `settings` is the resolved pipeline file (defaults filled in) as plain data. `tuning_key` names what `tuning` was
    found for · `accuracy`: by precision, of those in use other than f32.
    """

    format: int
    trtpd: str
    model: str
    pair_fingerprint: str
    roles: dict[str, RoleEntry]
    settings: dict[str, object]
    tuning: dict[str, RoleTuning] = {}
    tuning_key: str = ""
    accuracy: dict[str, Accuracy] = {}


class _Pools(msgspec.Struct, frozen=True):
    elastic: bool = False


class _PoolSettings(msgspec.Struct, frozen=True):
    pools: _Pools = _Pools()


def is_elastic(manifest: Manifest) -> bool:
    """Whether instances may take the other role of the pair (`pools.elastic`). Raises InputError."""
    return settings_as(manifest.settings, _PoolSettings).pools.elastic


_Settings = TypeVar("_Settings")


def settings_as(settings: Mapping[str, object], kind: type[_Settings]) -> _Settings:
    """The part of a manifest's settings that `kind` names. Raises InputError for one that was edited by hand into what
    can't be."""
    try:
        return msgspec.convert(settings, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"the settings in {MANIFEST} are wrong ({error}); {REBUILD}") from error


def rebuild(build: Path | None) -> str:
    """The mend for a build at `build` (None: not known) that can't be used."""
    return REBUILD if build is None else REBUILD.replace("BUILD", shlex.quote(str(build)))


def read_manifest(build: Path) -> Manifest:
    """Raises InputError if `build` is not a build directory of this format (value and mend in the
    message)."""
    path = build / MANIFEST
    if build.is_file():
        raise InputError(
            f"{build}: a file, not a build directory; if it is a pipeline file, build it with "
            f"`trtpd build {shlex.quote(str(build))} -o BUILD` and give BUILD"
        )
    if not build.is_dir():
        raise InputError(f"{build}: no such build directory; make one with `trtpd build pipeline.yaml -o {build}`")
    if not path.is_file():
        raise InputError(f"{build}: not a build directory ({MANIFEST} is missing); {rebuild(build)}")
    try:
        manifest = _decode(path, Manifest)
        if not manifest.roles:
            raise ValueError("roles is empty")
    except (OSError, ValueError, LayoutError) as error:
        raise InputError(f"{path}: {error}; {rebuild(build)}") from error
    return manifest


def read_engine_config(directory: Path) -> EngineConfig:
    """Raises EngineError if missing, truncated or of another format."""
    path, mend = directory / ENGINE_CONFIG, rebuild(directory.parent)
    try:
        return _decode(path, EngineConfig)
    except FileNotFoundError as error:
        raise EngineError(f"{directory}: not an engine directory ({ENGINE_CONFIG} is missing); {mend}") from error
    except (OSError, ValueError, LayoutError) as error:
        raise EngineError(f"{path}: {error}; {mend}") from error


def write_json(path: Path, value: Manifest | EngineConfig) -> None:
    """Writes one of the two files."""
    path.write_bytes(json_of(value))


def json_of(value: Manifest | EngineConfig) -> bytes:
    """What stands in one of the two files, readable for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def current_versions(engine: str) -> dict[str, str]:
    """Versions that a build for `engine` depends on, as installed now."""
    packages = _ENGINE_PACKAGES.get(engine, ())
    return {"trtpd": __version__} | {package: installed_version(package) for package in packages}


def current_features(engine: str) -> tuple[str, ...]:
    """CPU features that a build for `engine` depends on, as found here. Raises EngineError."""
    return cpu_features(openvino=True) if engine == "openvino" else ()


def load_faults(config: EngineConfig) -> list[str]:
    """Why an engine can't be loaded here, one phrase each; empty if it can.

    A CPU that lacks a feature of the build's is a fault, one that has more is not.
    """
    now = current_versions(config.engine)
    faults = [
        f"built with {package} {built}, here is {now.get(package, 'none')}"
        for package, built in config.versions.items()
        if now.get(package, "none") != built
    ]
    missing = sorted(set(config.cpu_features) - set(current_features(config.engine)))
    if missing:
        faults.append(f"built on a CPU with {', '.join(missing)}, which this one lacks")
    return faults


def check_loadable(config: EngineConfig, build: Path | None = None) -> None:
    """Raises EngineError, in one line with the mend, if versions or CPU features differ from those of `build`."""
    if faults := load_faults(config):
        raise EngineError(f"{config.role} engine of {config.model}: {'; '.join(faults)}; {rebuild(build)}")


_Kind = TypeVar("_Kind", Manifest, EngineConfig)


def _decode(path: Path, kind: type[_Kind]) -> _Kind:
    """Checks the format first, so that another version is called that and not a broken file."""
    raw = path.read_bytes()
    found = typed_json(raw, _FormatOnly).format
    if found != FORMAT:
        raise ValueError(f"build format {found}, this trtpd ({__version__}) reads format {FORMAT}")
    return typed_json(raw, kind)
