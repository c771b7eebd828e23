"""Which part of which tensor each rank of a TensorRT-LLM checkpoint gets. Pure: names and shapes, no values.

- q, k and v are split one by one and then stacked, so a rank's attention.qkv is [q_r; k_r; v_r].
- mlp.fc is Hugging Face's gate_proj and mlp.gate its up_proj.
- With more ranks than KV heads each head stands on several ranks.
- The head is padded with zero rows to a multiple of the ranks; a tied one is stored all the same.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from trtpd.build.manifest import Architecture

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows (axis 0) or columns (axis 1) `start` to `stop` of a source tensor."""

    source: str
    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tensor of one rank: its pieces below each other, then zero rows up to `shape`.

    `scales` are source scalars. Without pieces the tensor is their maximum; with pieces each piece is FP8 in
    its own scale (in the same order) and comes out in their maximum.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    scales: tuple[str, ...] = ()


def tp_faults(architecture: Architecture, tp: int) -> list[tuple[str, int]]:
    """Why a model can't be split over `tp` ranks: what must divide, with its number; empty if it can."""
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    faults = []
    if heads % tp:
        faults.append(("attention heads", heads))
    if kv_heads % tp and tp % kv_heads:
        faults.append(("KV heads", kv_heads))
    if architecture.intermediate_size % tp:
        faults.append(("intermediate size", architecture.intermediate_size))
    return faults


def padded_vocabulary(architecture: Architecture, tp: int) -> int:
    """Rows of the head over all ranks."""
    return -(-architecture.vocab_size // tp) * tp


def excluded(architecture: Architecture, module: str) -> bool:
    """Whether the checkpoint says that a Hugging Face module isn't quantised."""
    quantization = architecture.quantization
    patterns = quantization.exclude_modules if quantization else ()
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


class _Rank:
    """Collects one rank's shards."""

    def __init__(self, architecture: Architecture, *, dtype: str, quantised: bool, tp: int, rank: int) -> None:
        self._arch = architecture
        self._dtype = dtype
        self._quantised = quantised
        self._tp = tp
        self._rank = rank
        self.shards: list[Shard] = []

    def whole(self, name: str, source: str, shape: tuple[int, ...]) -> None:
        """A tensor that every rank has in full."""
        self.shards.append(Shard(name=name, dtype=self._dtype, shape=shape, pieces=(Piece(source, 0, 0, shape[0]),)))

    def share(self, size: int) -> tuple[int, int]:
        """This rank's part of `size` rows or columns."""
        part = size // self._tp
        return self._rank * part, (self._rank + 1) * part

    def kv_share(self) -> tuple[int, int]:
        """This rank's rows of k and v."""
        heads, head_dim = self._arch.num_key_value_heads, self._arch.head_dim
        if heads >= self._tp:
            return self.share(heads * head_dim)
        head = self._rank * heads // self._tp
        return head * head_dim, (head + 1) * head_dim

    def linear(self, name: str, pieces: tuple[Piece, ...], other: int) -> None:
        """A linear layer's weight with `other` columns (of pieces of rows) or rows (of columns), and its scales."""
        modules = [piece.source.removesuffix(".weight") for piece in pieces]
        extent = sum(piece.stop - piece.start for piece in pieces)
        shape = (extent, other) if pieces[0].axis == 0 else (other, extent)
        if not self._quantised or all(excluded(self._arch, module) for module in modules):
            self.shards.append(Shard(name=f"{name}.weight", dtype=self._dtype, shape=shape, pieces=pieces))
            return
        weight_scales = tuple(f"{module}.weight_scale" for module in modules)
        input_scales = tuple(f"{module}.input_scale" for module in modules)
        self.shards += [
            Shard(name=f"{name}.weight", dtype="F8_E4M3", shape=shape, pieces=pieces, scales=weight_scales),
            Shard(name=f"{name}.weights_scaling_factor", dtype="F32", shape=(1,), scales=weight_scales),
            Shard(name=f"{name}.activation_scaling_factor", dtype="F32", shape=(1,), scales=input_scales),
        ]

    def attention(self, layer: str, source: str) -> None:
        a = self._arch
        rows = {
            "q": self.share(a.num_attention_heads * a.head_dim), "k": self.kv_share(), "v": self.kv_share()
        }  # fmt: skip
        weights = tuple(Piece(f"{source}.{part}_proj.weight", 0, *span) for part, span in rows.items())
        self.linear(f"{layer}.attention.qkv", weights, a.hidden_size)
        if a.attention_bias:
            biases = tuple(Piece(f"{source}.{part}_proj.bias", 0, *span) for part, span in rows.items())
            extent = sum(stop - start for start, stop in rows.values())
            name = f"{layer}.attention.qkv.bias"
            self.shards.append(Shard(name=name, dtype=self._dtype, shape=(extent,), pieces=biases))
        if a.qk_norm:
            for part in "qk":
                norm = f"{source}.{part}_norm.weight"
                self.whole(f"{layer}.attention.{part}_layernorm.weight", norm, (a.head_dim,))
        columns = Piece(f"{source}.o_proj.weight", 1, *self.share(a.num_attention_heads * a.head_dim))
        self.linear(f"{layer}.attention.dense", (columns,), a.hidden_size)
        if self._quantised and a.quantization is not None and a.quantization.kv_cache_quant_algo:
            scales = (f"{source}.k_proj.k_scale", f"{source}.v_proj.v_scale")
            name = f"{layer}.attention.kv_cache_scaling_factor"
            self.shards.append(Shard(name=name, dtype="F32", shape=(1,), scales=scales))

    def mlp(self, layer: str, source: str) -> None:
        a = self._arch
        span = self.share(a.intermediate_size)
        self.linear(f"{layer}.mlp.fc", (Piece(f"{source}.gate_proj.weight", 0, *span),), a.hidden_size)
        self.linear(f"{layer}.mlp.gate", (Piece(f"{source}.up_proj.weight", 0, *span),), a.hidden_size)
        self.linear(f"{layer}.mlp.proj", (Piece(f"{source}.down_proj.weight", 1, *span),), a.hidden_size)

    def head(self) -> None:
        a = self._arch
        rows = padded_vocabulary(a, self._tp) // self._tp
        start, stop = self._rank * rows, min(a.vocab_size, (self._rank + 1) * rows)
        piece = Piece(EMBEDDING if a.tie_word_embeddings else HEAD, 0, min(start, a.vocab_size), stop)
        self.shards.append(Shard(name=HEAD, dtype=self._dtype, shape=(rows, a.hidden_size), pieces=(piece,)))


def rank_shards(architecture: Architecture, *, dtype: str, quant_algo: str | None, tp: int, rank: int) -> list[Shard]:
    """All tensors of one rank, in the order of computation. `dtype` and `quant_algo` as in the checkpoint's
    config.json; the model must be splittable (`tp_faults` is empty)."""
    assert not tp_faults(architecture, tp), "checked by lint and by the conversion"
    found = _Rank(architecture, dtype=STORED_DTYPES[dtype], quantised=quant_algo == "FP8", tp=tp, rank=rank)
    hidden = (architecture.hidden_size,)
    found.whole("transformer.vocab_embedding.weight", EMBEDDING, (architecture.vocab_size, *hidden))
    for index in range(architecture.num_hidden_layers):
        layer, source = f"transformer.layers.{index}", f"model.layers.{index}"
        found.whole(f"{layer}.input_layernorm.weight", f"{source}.input_layernorm.weight", hidden)
        found.attention(layer, f"{source}.self_attn")
        found.whole(f"{layer}.post_layernorm.weight", f"{source}.post_attention_layernorm.weight", hidden)
        found.mlp(layer, f"{source}.mlp")
    found.whole("transformer.ln_f.weight", "model.norm.weight", hidden)
    found.head()
    return found.shards
