"""GGUF files of the families trtpd knows: their architecture, and their tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trtpd.build.bounds import refuse_further_layers
from trtpd.build.families import FAMILIES
from trtpd.build.gguf_config import Metadata, architecture_of, factor_scaling, gguf_family
from trtpd.build.gguf_header import GgufTensor, read_header
from trtpd.build.gguf_names import ROPE_FACTORS, gguf_name
from trtpd.build.manifest import Architecture
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import F32Array
from trtpd.errors import CheckpointError


def unpermute(rows: F32Array, heads: int) -> F32Array:
    """Undoes GGUF's reordering of a Llama's q and k rows: it interleaves the two halves of a head's rotary
    dimensions."""
    out, columns = rows.shape
    half = out // heads // 2
    return rows.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(out, columns)


class GgufFile:
    """One GGUF file; tensors are dequantised when asked for, by the library of the format's authors. Raises
    CheckpointError for a file that is missing, truncated, not GGUF, of an unknown architecture or quantisation, or
    with tensors that its architecture doesn't have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.metadata: Mapping[str, Any] = header.metadata
        self._tensors = header.tensors
        self._check_tensors(path.stat().st_size)
        kind = self.field("general.architecture")
        read_family = gguf_family(kind, path)
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        architecture = architecture_of(
            Metadata(self.metadata, path, kind),
            read_family,
            path,
            tensors=self._tensors,
            tokens=len(tokens) if isinstance(tokens, list) else 0,
        )
        if ROPE_FACTORS in self._tensors:
            factors = self._dequantised(ROPE_FACTORS).reshape(-1).tolist()
            scaling = factor_scaling(factors, path, head_dim=architecture.head_dim)
            architecture = msgspec.structs.replace(architecture, rope_scaling=scaling)
        self.architecture: Architecture = architecture
        self.family = FAMILIES[architecture.family]
        self._refuse_others()

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value. Raises CheckpointError if it is missing and has no default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing from the GGUF metadata")
        return value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by GGUF name, in Hugging Face's order of dimensions."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> F32Array:
        """A tensor by its Hugging Face name, dequantised, as the Hugging Face checkpoint has it: q and k rows in its
        order, and without what the format adds to norms."""
        array = self._dequantised(gguf_name(name, self.family))
        if self.family.norm_offset and name.endswith("norm.weight"):
            return array - np.float32(self.family.norm_offset)
        if self.family.gguf_interleaved and name.endswith("q_proj.weight"):
            return unpermute(array, self.architecture.num_attention_heads)
        if self.family.gguf_interleaved and name.endswith("k_proj.weight"):
            return unpermute(array, self.architecture.num_key_value_heads)
        return array

    def _dequantised(self, name: str) -> F32Array:
        tensor = self._tensors[name]
        raw = np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=(_size_bytes(tensor),))
        values = _dequantise(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        return np.array(values, np.float32).reshape(tensor.shape)

    def _check_tensors(self, file_bytes: int) -> None:
        for tensor in self._tensors.values():
            _check_kind(tensor, self.path)
            end = tensor.offset + _size_bytes(tensor)
            if end > file_bytes:
                raise CheckpointError(
                    f"{self.path}: truncated: {tensor.name} ends at byte {end}, the file holds {file_bytes}; "
                    "download it again"
                )

    def _refuse_others(self) -> None:
        """A tensor that nobody reads would make another model."""
        refuse_further_layers(self.path, self._tensors, "blk.", self.architecture.num_hidden_layers)
        known = {gguf_name(name, self.family) for name in expected_shapes(self.architecture)} | {ROPE_FACTORS}
        others = sorted(self._tensors.keys() - known)
        if others:
            raise CheckpointError(
                f"{self.path}: holds {others[0][:80]}, which a {self.family.model_class} doesn't have; "
                "use the model's Hugging Face folder instead"
            )


def _check_kind(tensor: GgufTensor, where: Path) -> None:
    """Raises CheckpointError unless the gguf package can dequantise it."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
    except ValueError as error:
        raise CheckpointError(
            f"{where}: {tensor.name} is quantised as type {tensor.kind}, which is unknown: use a model in Q4_K_M, Q8_0 "
            "or F16"
        ) from error
    values, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % values:
        raise CheckpointError(
            f"{where}: {tensor.name} has rows of {tensor.shape[-1]} values, but {kind.name} packs {values} together; "
            "download it again"
        )
    try:
        _dequantise(np.zeros((1, size_bytes), np.uint8), tensor.kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{where}: {tensor.name} is quantised as {kind.name}, which can't be read: use a model in Q4_K_M, Q8_0 "
            "or F16"
        ) from error


def _dequantise(stored: npt.NDArray[np.uint8], kind: int) -> F32Array:
    """Rows of packed bytes as their values; those of F32 are a view."""
    import gguf

    with np.errstate(all="ignore"):  # that all are finite is checked where they are used
        values: F32Array = gguf.dequantize(stored, gguf.GGMLQuantizationType(kind))
    return values


def _size_bytes(tensor: GgufTensor) -> int:
    import gguf

    values, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    return int(np.prod(tensor.shape, dtype=np.int64)) // int(values) * int(size_bytes)
