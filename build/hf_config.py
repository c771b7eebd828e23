"""config.json of a Hugging Face folder, to and from Architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtpd.build.bounds import MOST_LAYERS, MOST_POSITIONS, MOST_TOKENS, MOST_WIDE
from trtpd.build.families import FAMILIES, PLAIN_LLAMA, Family, ModelRules
from trtpd.build.manifest import Architecture, Quantization, RopeScaling
from trtpd.errors import CheckpointError

ARCHITECTURE = "LlamaForCausalLM"
_MOST_NUMBER = 1e30


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError if missing, unreadable, not JSON or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); it may be truncated") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


class _Fields:
    """Typed access to a config's keys; errors name the file, the key and the value."""

    def __init__(self, config: dict[str, Any], where: Path, prefix: str = "") -> None:
        self._config = config
        self._where = where
        self._prefix = prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = MOST_WIDE) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._where}: {self._prefix}{key} is {json.dumps(value)}; it must be a whole number of at least 1"
            )
        if value > most:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is {value}; it must be at most {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_NUMBER:
            raise CheckpointError(
                f"{self._where}: {self._prefix}{key} is {json.dumps(value)}; it must be a number above 0 "
                f"and at most {_MOST_NUMBER:g}"
            )
        return float(value)

    def must_be(self, key: str, wanted: Any) -> None:
        value = self._config.get(key)
        if value is not None and value != wanted:
            raise CheckpointError(
                f"{self._where}: {self._prefix}{key} is {json.dumps(value)}; only {json.dumps(wanted)} is supported"
            )


def architecture_from_config(
    config: dict[str, Any], where: Path, rules: ModelRules = PLAIN_LLAMA, *, quantization: Quantization | None = None
) -> Architecture:
    """The architecture a config.json describes. Raises CheckpointError for a model that `rules` don't take.

    Takes `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both. `quantization` is
    what files beside it say of the weights; the config's own word counts where there is none.
    """
    family = _family(config, where, rules)
    fields = _Fields(config, where)
    fields.must_be("hidden_act", "silu")
    fields.must_be("mlp_bias", False)
    if family.model_class in (ARCHITECTURE, "Qwen3ForCausalLM"):
        fields.must_be("attention_bias", False)
    if rules.quantised:
        quantization = quantization or quantization_of(config, where)
    else:
        fields.must_be("quantization_config", {})
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    head_dim = fields.count("head_dim", hidden // heads or None)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {head_dim}; rotary embedding needs an even one")
    positions = fields.count("max_position_embeddings", 2048, most=MOST_POSITIONS)
    _full_attention(config, where, family, positions)
    rope_theta, rope_scaling = _rope(config, where)
    return Architecture(
        num_hidden_layers=fields.count("num_hidden_layers", most=MOST_LAYERS),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size", most=MOST_TOKENS),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        max_position_embeddings=positions,
        tie_word_embeddings=_flag(config, "tie_word_embeddings", where),
        rope_scaling=rope_scaling,
        family=family.name,
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        quantization=quantization,
    )


def _family(config: dict[str, Any], where: Path, rules: ModelRules) -> Family:
    names = config.get("architectures") or [config.get("model_type", "nothing")]
    taken = [FAMILIES[name] for name in rules.families]
    for family in taken:
        if names in ([family.model_class], [family.name]):
            return family
    only = [family.model_class for family in taken]
    choice = f"only {only[0]} is" if len(only) == 1 else f"{', '.join(only)} are"
    raise CheckpointError(f"{where}: the model is {', '.join(map(str, names))}; {choice} supported")


def _full_attention(config: dict[str, Any], where: Path, family: Family, positions: int) -> None:
    """Raises CheckpointError if tokens see only those in a window: no engine here has one."""
    window = config.get("sliding_window")
    if window is None or (family.window_flag is not None and not config.get(family.window_flag)):
        return
    if not isinstance(window, int) or window < positions:
        raise CheckpointError(
            f"{where}: sliding_window is {json.dumps(window)} with {positions} positions; only full attention "
            "is supported: set max_position_embeddings to the window's size to use the model within it"
        )


def quantization_of(config: dict[str, Any], where: Path) -> Quantization | None:
    """What a config.json's quantization_config (made by ModelOpt) says. Raises CheckpointError for any other."""
    found = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict) or found.get("quant_method") != "modelopt":
        raise CheckpointError(
            f"{where}: quantization_config is {json.dumps(found)}; only FP8 made by ModelOpt is supported"
        )
    scheme = found.get("kv_cache_scheme") or {}
    kv = found.get("kv_cache_quant_algo") or ("FP8" if scheme.get("num_bits") == 8 else None)
    return checked_quantization(found.get("quant_algo"), kv, found.get("ignore") or [], where)


def checked_quantization(quant_algo: Any, kv_algo: Any, excluded: Any, where: Path) -> Quantization:
    """A Quantization out of a file's values. Raises CheckpointError for a kind that can't be converted."""
    if quant_algo != "FP8":
        raise CheckpointError(f"{where}: quant_algo is {json.dumps(quant_algo)}; only FP8 (one scale a tensor) is read")
    if kv_algo not in (None, "FP8"):
        raise CheckpointError(f"{where}: kv_cache_quant_algo is {json.dumps(kv_algo)}; only FP8 is read")
    if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
        raise CheckpointError(f"{where}: the list of excluded modules is {json.dumps(excluded)}; it must hold names")
    return Quantization(quant_algo="FP8", kv_cache_quant_algo=kv_algo, exclude_modules=tuple(excluded))


def _flag(config: dict[str, Any], key: str, where: Path) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} is {json.dumps(value)}; it must be true or false")
    return value


def _rope(config: dict[str, Any], where: Path) -> tuple[float, RopeScaling | None]:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{where}: {key} is {json.dumps(scaling)}; it must be an object")
    theta_default = _Fields(config, where).number("rope_theta", 10000.0)
    theta = _Fields(scaling, where, f"{key}.").number("rope_theta", theta_default)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f'{where}: {key}.rope_type is {json.dumps(kind)}; only "default" and "llama3" are supported'
        )
    fields = _Fields(scaling, where, f"{key}.")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if not low < high:
        raise CheckpointError(f"{where}: {key}.low_freq_factor {low} is not below high_freq_factor {high}")
    return theta, RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=fields.count("original_max_position_embeddings", most=MOST_POSITIONS),
    )


def config_from_architecture(architecture: Architecture, token_ids: dict[str, int]) -> dict[str, Any]:
    """A config.json for an architecture; `token_ids` holds bos, eos and pad as far as they are known."""
    a = architecture
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_hidden_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab_size,
        "rms_norm_eps": a.rms_norm_eps,
        "rope_theta": a.rope_theta,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tie_word_embeddings,
        "torch_dtype": "float32",
    }
    assert a.rope_scaling is None, "checkpoints we write come from GGUF files, which we refuse with scaling"
    return config | {f"{name}_token_id": token_ids[name] for name in ("bos", "eos", "pad") if name in token_ids}
