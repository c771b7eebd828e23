"""Rotary position embedding as a config.json describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpd.build.bounds import MOST_POSITIONS
from trtpd.build.config_fields import Fields
from trtpd.build.families import Family, ModelRules
from trtpd.build.manifest import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from trtpd.errors import CheckpointError

_PER_LAYER = ("full_attention", "sliding_attention")
_KINDS = ("linear", "llama3", "yarn")
_MENDS = {
    "dynamic": "without rope_scaling it is the same model up to its original length",
    "longrope": "take a checkpoint made for its original length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """As the fields of Architecture."""

    theta: float
    scaling: RopeScaling | None = None
    local_theta: float | None = None


def rope_of(config: dict[str, Any], where: Path, family: Family, rules: ModelRules, *, positions: int) -> Rope:
    """Takes `rope_theta` with `rope_scaling` and, where layers differ, `rope_local_base_freq`, or the newer
    `rope_parameters` that holds all. Raises CheckpointError for a kind that `rules` don't take."""
    fields = Fields(config, where)
    fields.must_be("partial_rotary_factor", 1.0)
    new, new_fields = fields.part("rope_parameters")
    if any(key in new for key in _PER_LAYER):
        return _per_layer(new, new_fields, where, family, rules, positions)
    if new and family.local_rope_theta is not None:
        raise fields.wrong("rope_parameters", f"it must hold {' and '.join(_PER_LAYER)}, whose rotation differs")
    key = "rope_parameters" if new else "rope_scaling"
    scaling_fields = fields.part(key)[1]
    theta = scaling_fields.number("rope_theta", fields.number("rope_theta", family.rope_theta))
    local = family.local_rope_theta
    return Rope(
        theta=theta,
        scaling=_scaling(scaling_fields, key, where, rules, positions),
        local_theta=None if local is None else fields.number("rope_local_base_freq", local),
    )


def _per_layer(
    new: dict[str, Any], fields: Fields, where: Path, family: Family, rules: ModelRules, positions: int
) -> Rope:
    if family.local_rope_theta is None:
        raise CheckpointError(
            f"{where}: rope_parameters differ by layer ({', '.join(new)}), which a {family.model_class} doesn't have"
        )
    whole, local = (fields.part(key)[1] for key in _PER_LAYER)
    if local.text("rope_type", "default") != "default":
        raise local.wrong("rope_type", 'layers with a sliding window take only "default"')
    return Rope(
        theta=whole.number("rope_theta", family.rope_theta),
        scaling=_scaling(whole, "rope_parameters.full_attention", where, rules, positions),
        local_theta=local.number("rope_theta", family.local_rope_theta),
    )


def _scaling(fields: Fields, key: str, where: Path, rules: ModelRules, positions: int) -> RopeScaling | None:
    kind = fields.text("rope_type", fields.text("type", "default"))
    fields.must_be("partial_rotary_factor", 1.0)
    if kind == "default":
        return None
    taken = [name for name in _KINDS if name in rules.rope_types]
    if kind not in taken:
        known = ", ".join(f'"{name}"' for name in ("default", *taken))
        mend = _MENDS.get(kind, "take a checkpoint with one of these")
        raise CheckpointError(f'{where}: {key}.rope_type is "{kind}"; {known} are supported: {mend}')
    if kind == "linear":
        return LinearScaling(factor=fields.number("factor"))
    return _llama3(fields, key, where) if kind == "llama3" else _yarn(fields, positions)


def _llama3(fields: Fields, key: str, where: Path) -> Llama3Scaling:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if not low < high:
        raise CheckpointError(f"{where}: {key}.low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=fields.count("original_max_position_embeddings", most=MOST_POSITIONS),
    )


def _yarn(fields: Fields, positions: int) -> YarnScaling:
    """Where no attention_factor is given it follows from the factor, or from mscale over mscale_all_dim."""
    factor = fields.number("factor")
    attention = fields.optional_number("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor)
        if fields.has("mscale") and fields.has("mscale_all_dim"):
            over, under = (fields.number(name) for name in ("mscale", "mscale_all_dim"))
            attention = yarn_attention_factor(factor, over) / yarn_attention_factor(factor, under)
    original = fields.count("original_max_position_embeddings", positions, most=MOST_POSITIONS)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What YaRN scales cos and sin by."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_config(rope: Rope) -> dict[str, Any]:
    """The keys of a config.json that `rope_of` reads `rope` from."""
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.local_theta is not None:
        found["rope_local_base_freq"] = rope.local_theta
    if rope.scaling is not None:
        kinds = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}
        kind = kinds.get(type(rope.scaling))
        assert kind is not None, "a config.json has no word for factors per frequency"
        numbers = {name: getattr(rope.scaling, name) for name in rope.scaling.__struct_fields__}
        found["rope_scaling"] = {"rope_type": kind, **numbers}
    return found
