"""Whether an engine takes a model, once its architecture is known."""

from __future__ import annotations

from pathlib import Path

from trtpd.build.families import FAMILIES, ModelRules
from trtpd.build.manifest import Architecture
from trtpd.errors import CheckpointError


def refuse_unless_taken(architecture: Architecture, rules: ModelRules, where: Path) -> None:
    """Raises CheckpointError for a model that `rules` don't take, naming what it has."""
    a = architecture
    if a.family not in rules.families:
        taken = ", ".join(FAMILIES[name].model_class for name in rules.families)
        raise CheckpointError(f"{where}: the model is a {FAMILIES[a.family].model_class}; {taken} are supported")
    if a.window_layers and not rules.windows:
        raise CheckpointError(
            f"{where}: the model has a sliding window of {a.sliding_window} tokens; only full attention is supported "
            "by this engine: build it with engine openvino"
        )
    if a.rope_scaling is not None and a.rope_scaling.__struct_config__.tag not in rules.rope_types:
        raise CheckpointError(
            f"{where}: the model has rope scaling of kind {a.rope_scaling.__struct_config__.tag}; "
            f"{', '.join(rules.rope_types)} are supported by this engine: build it with engine openvino"
        )
    if a.final_logit_softcapping is not None and not rules.softcapped:
        raise CheckpointError(
            f"{where}: the model's logits are softcapped, which isn't supported by this engine: build it with engine "
            "openvino"
        )
