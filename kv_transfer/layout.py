"""KVLayout: how one engine lays out the KV cache, and what two engines must share to pair."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Literal

from trtpd.errors import LayoutError

KVDtype = Literal["f32", "bf16", "f16", "fp8"]
DTYPE_BYTES: dict[str, int] = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1}

CONVERTIBLE = frozenset({"f32", "bf16"})
"""Dtypes a sink can make of each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """KV cache of one engine: per layer one K and one V array `[block][head][token][dim]`, contiguous.

    `kv_heads` and `num_layers` are the model's; a rank holds the ranges `rank_heads` and `rank_layers` give.
    Raises LayoutError for sizes that can't be.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: KVDtype
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "tokens_per_block", "tp", "pp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise LayoutError(f"KV layout: {name} is {value!r}; it must be a whole number of at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"KV layout: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")

    @property
    def itemsize_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def rank_heads(self, tp_rank: int) -> range:
        """KV heads a tensor-parallel rank holds; ranges may be uneven, and tp > kv_heads shares heads."""
        if self.tp > self.kv_heads:
            head = tp_rank * self.kv_heads // self.tp
            return range(head, head + 1)
        small, extra = divmod(self.kv_heads, self.tp)
        start = tp_rank * small + min(tp_rank, extra)
        return range(start, start + small + (1 if tp_rank < extra else 0))

    def rank_layers(self, pp_rank: int) -> range:
        """Layers a pipeline-parallel rank holds."""
        small, extra = divmod(self.num_layers, self.pp)
        start = pp_rank * small + min(pp_rank, extra)
        return range(start, start + small + (1 if pp_rank < extra else 0))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V a token holds over all ranks, head duplication not counted."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.itemsize_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.tokens_per_block)

    @property
    def pairing_key(self) -> str:
        """Equal for two engines whose KV can be exchanged (TP and PP may differ; they are re-laid out)."""
        return f"{self.num_layers}l{self.kv_heads}h{self.head_dim}d{self.tokens_per_block}t{self.dtype}"

    def pairing_key_for(self, *, convert_dtype: bool) -> str:
        """`pairing_key`, the same for f32 and bf16 where one becomes the other on the way."""
        convertible = convert_dtype and self.dtype in CONVERTIBLE
        return self.pairing_key.removesuffix(self.dtype) + "f32|bf16" if convertible else self.pairing_key

    @property
    def fingerprint(self) -> str:
        """Digest over every field."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]
