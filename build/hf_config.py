"""config.json of a Hugging Face folder, to and from Architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtpd.build.bounds import MOST_LAYERS, MOST_POSITIONS, MOST_TOKENS
from trtpd.build.config_fields import Fields
from trtpd.build.families import FAMILIES, OWN_GRAPH, Family, ModelRules
from trtpd.build.hf_rope import Rope, rope_config, rope_of
from trtpd.build.manifest import Architecture, Quantization
from trtpd.errors import CheckpointError

_WINDOWED, _FULL = "sliding_attention", "full_attention"


def architecture_from_config(
    config: dict[str, Any], where: Path, rules: ModelRules = OWN_GRAPH, *, quantization: Quantization | None = None
) -> Architecture:
    """The architecture a config.json describes. Raises CheckpointError for a model that `rules` don't take.

    `quantization` is what files beside it say of the weights; the config's own word counts where there is none.
    """
    family = _family(config, where, rules)
    fields = Fields(config, where)
    _refuse_variants(fields, family, rules)
    if rules.quantised:
        quantization = quantization or quantization_of(config, where)
    else:
        fields.must_be("quantization_config", {})
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads or None)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {head_dim}; rotary embedding needs an even one")
    positions = fields.count("max_position_embeddings", 2048, most=MOST_POSITIONS)
    layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    window, window_layers = _windows(fields, where, family, layers, positions, rules)
    rope = rope_of(config, where, family, rules, positions=positions)
    return Architecture(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size", most=MOST_TOKENS),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied),
        rope_scaling=rope.scaling,
        family=family.name,
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        quantization=quantization,
        sliding_window=window,
        window_layers=window_layers,
        local_rope_theta=rope.local_theta,
        query_pre_attn_scalar=fields.optional_number("query_pre_attn_scalar", family.query_pre_attn_scalar),
        final_logit_softcapping=fields.optional_number("final_logit_softcapping"),
    )


def _family(config: dict[str, Any], where: Path, rules: ModelRules) -> Family:
    names = config.get("architectures") or [config.get("model_type", "nothing")]
    taken = [FAMILIES[name] for name in rules.families]
    for family in taken:
        if names in ([family.model_class], [family.model_type]):
            return family
    said = ", ".join(map(str, names)) if isinstance(names, list) else json.dumps(names)
    only = [family.model_class for family in taken]
    choice = f"only {only[0]} is" if len(only) == 1 else f"{', '.join(only)} are"
    raise CheckpointError(f"{where}: the model is {said}; {choice} supported")


def _refuse_variants(fields: Fields, family: Family, rules: ModelRules) -> None:
    """What would make another model of the family than the graph computes."""
    for key in {family.activation_key, "hidden_act"}:
        fields.must_be(key, family.activation)
    fields.must_be("mlp_bias", False)
    fields.must_lack("attn_logit_softcapping")
    fields.must_be("use_bidirectional_attention", False)
    if not family.attention_bias:
        fields.must_be("attention_bias", False)
    if family.query_pre_attn_scalar is None:
        fields.must_lack("query_pre_attn_scalar")
    if not rules.softcapped:
        fields.must_lack("final_logit_softcapping")


def _windows(
    fields: Fields, where: Path, family: Family, layers: int, positions: int, rules: ModelRules
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and the layers that have it: none where it is as long as the longest sequence. Absent is not
    null here: then it is the family's usual one."""
    switched_off = family.window_rule == "switched" and not fields.flag("use_sliding_window")
    if switched_off or fields.is_null("sliding_window"):
        return None, ()
    window = fields.count("sliding_window", family.sliding_window or positions, most=MOST_POSITIONS)
    if window >= positions:
        return None, ()
    if not rules.windows or family.window_rule == "none":
        raise CheckpointError(
            f"{where}: sliding_window is {window} with {positions} positions; only full attention is supported here: "
            "set max_position_embeddings to the window's size to use the model within it"
        )
    chosen = _window_layers(fields, family, layers)
    return (window, chosen) if chosen else (None, ())


def _window_layers(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    if family.window_rule == "all":
        fields.must_be("layer_types", [_WINDOWED] * layers)
        return tuple(range(layers))
    if fields.has("layer_types"):
        kinds = fields.listed("layer_types")
        if len(kinds) != layers or not set(kinds) <= {_WINDOWED, _FULL}:
            raise fields.wrong("layer_types", f"it must hold {_WINDOWED} or {_FULL} for each of {layers} layers")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == _WINDOWED)
    if family.window_rule == "switched":
        first = fields.count("max_window_layers", 28, least=0)
        return tuple(range(first, layers))
    return pattern_layers(layers, fields.count("sliding_window_pattern", 6))


def pattern_layers(layers: int, pattern: int) -> tuple[int, ...]:
    """All layers but every `pattern`th."""
    return tuple(layer for layer in range(layers) if (layer + 1) % pattern)


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


def config_from_architecture(architecture: Architecture, token_ids: dict[str, int]) -> dict[str, Any]:
    """A config.json for an architecture, read back as the same one; `token_ids` holds bos, eos and pad as far as they
    are known."""
    a, family = architecture, FAMILIES[architecture.family]
    config: dict[str, Any] = {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "attention_bias": a.attention_bias,
        family.activation_key: family.activation,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_hidden_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab_size,
        "rms_norm_eps": a.rms_norm_eps,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tie_word_embeddings,
        "torch_dtype": "float32",
    }
    config |= rope_config(Rope(theta=a.rope_theta, scaling=a.rope_scaling, local_theta=a.local_rope_theta))
    config |= _window_config(a, family)
    for key in ("query_pre_attn_scalar", "final_logit_softcapping"):
        if getattr(a, key) is not None:
            config[key] = getattr(a, key)
    if family.name == "llama":
        config["mlp_bias"] = False
    return config | {f"{name}_token_id": token_ids[name] for name in ("bos", "eos", "pad") if name in token_ids}


def _window_config(a: Architecture, family: Family) -> dict[str, Any]:
    if family.window_rule == "none":
        return {}
    found: dict[str, Any] = {"sliding_window": a.sliding_window}
    if family.window_rule == "switched":
        found["use_sliding_window"] = a.sliding_window is not None
    if family.window_rule != "all":
        windowed = set(a.window_layers)
        found["layer_types"] = [_WINDOWED if layer in windowed else _FULL for layer in range(a.num_hidden_layers)]
    return found
