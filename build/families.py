"""Which decoders trtpd knows, by the class their config.json names, and which of them an engine takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of decoder. All are alike but for what stands here: `attention_bias`, biases of q, k and v;
    `qk_norm`, a norm of q and k per head; `window_flag`, the config key without which `sliding_window` means
    nothing (None: it always means something)."""

    name: str
    model_class: str
    attention_bias: bool = False
    qk_norm: bool = False
    window_flag: str | None = None


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="llama", model_class="LlamaForCausalLM"),
        Family(name="mistral", model_class="MistralForCausalLM"),
        Family(name="qwen2", model_class="Qwen2ForCausalLM", attention_bias=True, window_flag="use_sliding_window"),
        Family(name="qwen3", model_class="Qwen3ForCausalLM", qk_norm=True, window_flag="use_sliding_window"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """The models an engine takes. `quantised`: also with weights that are stored in FP8."""

    families: tuple[str, ...] = ("llama",)
    quantised: bool = False


PLAIN_LLAMA = ModelRules()
ALL_FAMILIES = ModelRules(families=tuple(FAMILIES), quantised=True)
