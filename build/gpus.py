"""What each GPU model has, and what a role's engine can do on it. Published figures, nothing measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtpd.build.manifest import Architecture, Precision

DEFAULT_GPU = "h100"
_MIB = 1 << 20
_BANDWIDTH_SHARE = 0.7
_RESERVED_BYTES = 4 << 30
"""For activations, CUDA's context and communication buffers, on each GPU."""

_BUFFER_PERCENT = 20
"""Of the room beside the weights, for the buffers that KV is sent from and received into."""

BATCH_LIMIT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`sm` is the compute capability (90 for 9.0); memory as the driver reports it; `words` mark the driver's
    name of the model."""

    name: str
    sm: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    words: tuple[str, ...]


GPUS: dict[str, Gpu] = {
    name: Gpu(name=name, sm=sm, memory_bytes=mib * _MIB, bandwidth_bytes_per_s=tb_per_s * 1e12, words=words)
    for name, sm, mib, tb_per_s, words in (
        ("a100_40gb", 80, 40_960, 1.55, ("a100", "40gb")),
        ("a100", 80, 81_920, 2.04, ("a100",)),
        ("l4", 89, 23_034, 0.30, ("l4",)),
        ("l40s", 89, 46_068, 0.86, ("l40s",)),
        ("gh200", 90, 97_871, 4.0, ("gh200",)),
        ("h100", 90, 81_559, 3.35, ("h100",)),
        ("h200", 90, 143_771, 4.8, ("h200",)),
        ("gb200", 100, 189_471, 8.0, ("gb200",)),
        ("b200", 100, 183_359, 8.0, ("b200",)),
    )
}


def known_gpu(model: str) -> str | None:
    """The name in GPUS of a model as the driver calls it ("NVIDIA H100 80GB HBM3"), None if it isn't there."""
    words = set(model.lower().replace("-", " ").split())
    return next((gpu.name for gpu in GPUS.values() if set(gpu.words) <= words), None)


def choose_gpu(asked: str | None, found: Sequence[str]) -> Gpu:
    """The GPU to build for: the one asked for, else the first one here that is known, else DEFAULT_GPU."""
    here = next((name for name in map(known_gpu, found) if name), None)
    return GPUS[asked or here or DEFAULT_GPU]


KV_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1}
WEIGHT_BYTES: dict[Precision, float] = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1, "int4": 0.78, "fp8": 1}
"""Of a linear weight, on average: int4 is for half of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one instance of a role can hold and do: `weights_bytes` over its `tp` GPUs, `kv_token_bytes` for a
    token of KV (heads shared out, duplicates counted)."""

    gpu: Gpu
    tp: int
    weights_bytes: int
    kv_token_bytes: int
    memory_share: float

    @property
    def room_tokens(self) -> int:
        """Tokens of KV that fit beside the weights, in the cache and in transfer buffers; 0 if not even the
        weights fit."""
        usable = self.gpu.memory_bytes * self.memory_share - _RESERVED_BYTES
        return max(0, int(self.tp * usable - self.weights_bytes) // self.kv_token_bytes)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the cache gets."""
        return self.room_tokens * (100 - _BUFFER_PERCENT) // 100

    @property
    def buffer_tokens(self) -> int:
        """The longest prompt for which the send and the receive buffer fit into the rest."""
        return self.room_tokens * _BUFFER_PERCENT // 200

    def step_s(self, batch: int, context_tokens: int) -> float:
        """About the time of a decode step: it reads all weights and all KV once."""
        read = self.weights_bytes + batch * context_tokens * self.kv_token_bytes
        return read / self.tp / (self.gpu.bandwidth_bytes_per_s * _BANDWIDTH_SHARE)

    def batch(self, *, prompt_tokens: int, answer_tokens: int, tpot_s: float | None) -> int:
        """The largest batch of such requests whose KV fits and whose step keeps the target, at least 1."""
        largest = min(BATCH_LIMIT, self.kv_tokens // (prompt_tokens + answer_tokens))
        context = prompt_tokens + answer_tokens // 2
        while largest > 1 and tpot_s is not None and self.step_s(largest, context) > tpot_s:
            largest = largest * 7 // 8
        return max(1, largest // 8 * 8 if largest >= 8 else largest)


def kv_token_bytes(architecture: Architecture, *, itemsize_bytes: int, tp: int) -> int:
    """Bytes of KV one token takes over all ranks; with more ranks than KV heads each rank has one of its own."""
    heads = max(architecture.num_key_value_heads, tp)
    return 2 * architecture.num_hidden_layers * heads * architecture.head_dim * itemsize_bytes
