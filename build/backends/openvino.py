"""Weights of an OpenVINO engine directory: rank<N>.safetensors.

The graph is built and compiled at load (a paged-attention graph can't be re-imported), so a build holds
weights in the role's precision and `config.json`. What an engine may rely on:

- Tensors are named as in Hugging Face; linear weights are `[out, in]`, row-major.
- Norms are F32 in every build.
- f32 builds: everything is F32.
- bf16 builds: every other tensor is bf16, stored as U16 bit patterns, since numpy has no bf16.
- int8 builds: a linear weight W is I8 under its own name, and `<name>.scale` beside it is F32 of shape
  `[out, 1]`; the weight is `W * scale`. `model.embed_tokens.weight` is bf16 as above.
- `lm_head.weight` is there if the head is untied. A tied head uses `model.embed_tokens.weight`, except in
  int8 builds, which hold an I8 `lm_head.weight` with its scale too: the head is a fifth of a small model's
  traffic.
- The file's metadata: `bf16_as_u16` is a JSON list of the names of all bf16 tensors, `weights` names the
  weights (equal for files with equal content).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpd.build.backends.base import Job, Progress
from trtpd.build.checkpoint import Checkpoint, expected_shapes
from trtpd.build.files import digest_of, link_or_copy
from trtpd.build.manifest import Architecture, EngineConfig, Precision
from trtpd.build.tensors import F32Array, TensorFile, TensorSpec, bf16_bits, write_tensors
from trtpd.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCALE = ".scale"
WEIGHTS_FORMAT = 1
WEIGHTS_FILE = "rank0.safetensors"

StoredArray = npt.NDArray[Any]


def quantise(weight: F32Array) -> tuple[npt.NDArray[np.int8], F32Array]:
    """Symmetric int8 per output channel: `(values, scale)` with scale of shape [out, 1] such that no weight
    is further than half a scale from values * scale."""
    largest = np.abs(weight).max(axis=1, keepdims=True)
    scale = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny).astype(np.float32)
    values = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    return values, scale


def stored_specs(architecture: Architecture, precision: Precision) -> list[TensorSpec]:
    """The tensors of a weights file, in order."""
    specs: list[TensorSpec] = []
    shapes = expected_shapes(architecture)
    if precision == "int8":
        shapes.setdefault(HEAD, shapes[EMBEDDING])
    for name, shape in shapes.items():
        dtype = _stored_dtype(name, shape, precision)
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape))
        if dtype == "I8":
            specs.append(TensorSpec(name=name + SCALE, dtype="F32", shape=(shape[0], 1)))
    return specs


def write_weights(
    checkpoint: Checkpoint,
    architecture: Architecture,
    precision: Precision,
    directory: Path,
    *,
    key: str,
    progress: Callable[[int, int], None],
) -> None:
    """Writes rank0.safetensors into `directory`, one tensor in memory at a time; `progress(done, total)` in
    bytes.

    Raises CheckpointError for a weight that isn't finite, OSError as the file system does.
    """
    specs = stored_specs(architecture, precision)
    metadata = {
        "bf16_as_u16": json.dumps([spec.name for spec in specs if spec.dtype == "U16"]),
        "weights": key,
    }
    total = sum(spec.size_bytes for spec in specs)
    arrays = _stored_arrays(checkpoint, specs)
    for done in write_tensors(directory / WEIGHTS_FILE, specs, arrays, metadata):
        progress(done, total)


def weights_key(directory: Path) -> str | None:
    """What the weights file in an engine directory holds, None if there is no whole one."""
    try:
        return TensorFile(directory / WEIGHTS_FILE).metadata.get("weights")
    except CheckpointError:
        return None


def _stored_dtype(name: str, shape: tuple[int, ...], precision: Precision) -> str:
    if precision == "f32" or len(shape) == 1:
        return "F32"
    return "U16" if precision == "bf16" or name == EMBEDDING else "I8"


def _stored_arrays(checkpoint: Checkpoint, specs: list[TensorSpec]) -> Iterator[StoredArray]:
    tied = checkpoint.architecture.tie_word_embeddings
    for spec in specs:
        if spec.name.endswith(SCALE):
            continue
        weight = checkpoint.read(EMBEDDING if spec.name == HEAD and tied else spec.name)
        if not np.isfinite(weight).all():
            raise CheckpointError(f"{checkpoint.path}: {spec.name} holds values that aren't finite numbers")
        if spec.dtype == "I8":
            yield from quantise(weight)
        else:
            yield bf16_bits(weight) if spec.dtype == "U16" else weight


class OpenVINOBackend:
    """Weights files, as the Backend the builder knows."""

    def key(self, digest: str, config: EngineConfig) -> str:
        return digest_of(WEIGHTS_FORMAT, digest, config.precision, config.tp, config.architecture)

    def found_key(self, directory: Path) -> str | None:
        return weights_key(directory)

    def write(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path, progress: Progress) -> None:
        for job in jobs:
            stage = f"{job.config.role} weights"
            write_weights(
                checkpoint,
                job.config.architecture,
                job.config.precision,
                job.directory,
                key=job.key,
                progress=functools.partial(progress, stage),
            )

    def link(self, source: Path, config: EngineConfig, directory: Path) -> None:
        link_or_copy(source / WEIGHTS_FILE, directory / WEIGHTS_FILE)

    def steps(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path) -> list[str]:
        return []
