"""Weights of an OpenVINO engine directory: rank<N>.safetensors, one file per tensor-parallel rank.

The graph is built and compiled at load (a paged-attention graph can't be re-imported), so a build holds
weights in the role's precision and `config.json`. What an engine may rely on:

- Tensors are named as in Hugging Face; linear weights are `[out, in]`, row-major.
- Each file holds its rank's part of the linear weights and biases, as sharding.py cuts them. What every rank has whole
  (embedding and norms) is in rank 0's file only.
- Norms and biases are F32 in every build, as the checkpoint has them: what a family adds to a norm is not in them.
- f32 builds: everything is F32.
- bf16 builds: every other tensor is bf16, stored as U16 bit patterns, since numpy has no bf16.
- f16 builds: every other tensor is F16. A weight beyond its range is refused.
- int8 builds: a linear weight W is I8 under its own name, and `<name>.scale` beside it is F32 of shape
  `[out, 1]`; the weight is `W * scale`. W is quantised before it is cut, so its values don't depend on tp.
  `model.embed_tokens.weight` is bf16 as above.
- `lm_head.weight` is there if the head is untied. A tied head uses `model.embed_tokens.weight`, except in
  int8 and int4 builds, which hold an I8 `lm_head.weight` with its scale too: the head is a fifth of a small model's
  traffic.
- int4 builds: as int8, but INT4_MATRICES are U8 `[out, in / 2]`, two values a byte as quantise.py packs them, with
  `<name>.scale` F32 `[out, in / group]`; I8 where no group size divides their inputs. They are cut by rows, so no rank
  count cuts a group.
- Matrices come first, in the order of computation, then vectors and scales; the data begins at a multiple of 64
  bytes. So q, k and v of a layer, and gate and up, are each one matrix to whoever maps the file.
- Each file's metadata: `bf16_as_u16` is a JSON list of the names of all bf16 tensors, `weights` names the
  weights (equal for files of one engine, and for engines of equal content).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpd.build.backends.base import Job, Progress
from trtpd.build.checkpoint import Checkpoint
from trtpd.build.files import digest_of, link_or_copy
from trtpd.build.manifest import Architecture, EngineConfig, Precision
from trtpd.build.quantise import group_of, quantise, quantise_groups
from trtpd.build.shapes import EMBEDDING, HEAD, expected_shapes
from trtpd.build.sharding import Shard, cut_of, shard_of
from trtpd.build.tensors import F32Array, TensorFile, TensorSpec, TensorWriter, bf16_bits
from trtpd.errors import CheckpointError

SCALE = ".scale"
WEIGHTS_FORMAT = 2
INT4_MATRICES = ("gate_proj.weight", "up_proj.weight")
"""Half of a layer's weights. The others spoil more than they save: of SmolLM2 (KL from f32 in nats) int4 for these two
gives 0.09, for all matrices 0.41."""

StoredArray = npt.NDArray[Any]


def weights_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank{rank}.safetensors"


def stored_specs(architecture: Architecture, precision: Precision, shard: Shard) -> list[TensorSpec]:
    """The tensors of a rank's file, in order."""
    specs = (_rank_spec(spec, architecture, shard) for spec in _whole_specs(architecture, precision))
    return [spec for spec in specs if spec is not None]


def stored_part(name: str, array: StoredArray, architecture: Architecture, shard: Shard) -> StoredArray | None:
    """What a rank's file holds of a stored tensor: its part, all, or None."""
    matrix = name.removesuffix(SCALE)
    cut = cut_of(matrix, architecture.head_dim, shard)
    if cut is None:
        return array if shard.rank == 0 else None
    # A scale belongs to an output channel: it is cut with the rows, and whole beside cut columns.
    return array if name != matrix and cut.axis == 1 else cut.of(array)


def write_weights(
    checkpoint: Checkpoint,
    architecture: Architecture,
    precision: Precision,
    directory: Path,
    *,
    shards: Sequence[Shard],
    key: str,
    progress: Callable[[int, int], None],
) -> None:
    """Writes a file for each of `shards` into `directory`, one whole tensor in memory at a time;
    `progress(done, total)` in bytes.

    Raises CheckpointError for a weight that isn't finite, OSError as the file system does.
    """
    whole = _whole_specs(architecture, precision)
    by_rank = {shard: stored_specs(architecture, precision, shard) for shard in shards}
    total = sum(spec.size_bytes for specs in by_rank.values() for spec in specs)
    with ExitStack() as open_files:
        writers = {
            shard: open_files.enter_context(
                TensorWriter(directory / weights_file(shard.rank), specs, _metadata(specs, key))
            )
            for shard, specs in by_rank.items()
        }
        for spec, array in zip(whole, _stored_arrays(checkpoint, whole), strict=True):
            for shard, writer in writers.items():
                part = stored_part(spec.name, array, architecture, shard)
                if part is not None:
                    writer.write(part)
            progress(sum(writer.written_bytes for writer in writers.values()), total)


def weights_key(directory: Path, tp: int) -> str | None:
    """What the `tp` weights files in an engine directory hold, None unless all are whole and of one engine."""
    try:
        keys = {TensorFile(directory / weights_file(rank)).metadata.get("weights") for rank in range(tp)}
    except CheckpointError:
        return None
    return keys.pop() if len(keys) == 1 else None


def _metadata(specs: Sequence[TensorSpec], key: str) -> dict[str, str]:
    return {"bf16_as_u16": json.dumps([spec.name for spec in specs if spec.dtype == "U16"]), "weights": key}


def _whole_specs(architecture: Architecture, precision: Precision) -> list[TensorSpec]:
    matrices: list[TensorSpec] = []
    vectors: list[TensorSpec] = []
    scales: list[TensorSpec] = []
    shapes = expected_shapes(architecture)
    if precision in ("int8", "int4"):
        shapes.setdefault(HEAD, shapes[EMBEDDING])
    for name, shape in shapes.items():
        dtype = _stored_dtype(name, shape, precision)
        group = group_of(shape[-1]) if dtype == "U8" else None
        kept = shape if group is None else (shape[0], shape[1] // 2)
        (matrices if len(shape) > 1 else vectors).append(TensorSpec(name=name, dtype=dtype, shape=kept))
        if dtype in ("I8", "U8"):
            per_row = 1 if group is None else shape[1] // group
            scales.append(TensorSpec(name=name + SCALE, dtype="F32", shape=(shape[0], per_row)))
    return [*matrices, *vectors, *scales]


def _rank_spec(spec: TensorSpec, architecture: Architecture, shard: Shard) -> TensorSpec | None:
    matrix = spec.name.removesuffix(SCALE)
    cut = cut_of(matrix, architecture.head_dim, shard)
    if cut is None:
        return spec if shard.rank == 0 else None
    if spec.name != matrix and cut.axis == 1:
        return spec
    return TensorSpec(name=spec.name, dtype=spec.dtype, shape=cut.shape(spec.shape))


def _stored_dtype(name: str, shape: tuple[int, ...], precision: Precision) -> str:
    if precision == "f32" or len(shape) == 1:
        return "F32"
    if precision == "f16":
        return "F16"
    if precision == "bf16" or name == EMBEDDING:
        return "U16"
    grouped = precision == "int4" and name.endswith(INT4_MATRICES) and group_of(shape[1]) is not None
    return "U8" if grouped else "I8"


def _stored_arrays(checkpoint: Checkpoint, specs: list[TensorSpec]) -> Iterator[StoredArray]:
    tied = checkpoint.architecture.tie_word_embeddings
    scales: dict[str, F32Array] = {}
    for spec in specs:
        if spec.name in scales:
            yield scales[spec.name]
            continue
        weight = checkpoint.read(EMBEDDING if spec.name == HEAD and tied else spec.name)
        if not np.isfinite(weight).all():
            raise CheckpointError(f"{checkpoint.path}: {spec.name} holds values that aren't finite numbers")
        if spec.dtype == "I8":
            values, scales[spec.name + SCALE] = quantise(weight)
            yield values
        elif spec.dtype == "U8":
            group = group_of(weight.shape[1])
            assert group is not None, "such a matrix is stored as I8"
            packed, scales[spec.name + SCALE] = quantise_groups(weight, group)
            yield packed
        elif spec.dtype == "F16":
            yield _as_f16(checkpoint.path, spec.name, weight)
        else:
            yield bf16_bits(weight) if spec.dtype == "U16" else weight


def _as_f16(path: Path, name: str, weight: F32Array) -> npt.NDArray[np.float16]:
    largest = float(np.abs(weight).max(initial=0.0))
    if largest > np.finfo(np.float16).max:
        raise CheckpointError(f"{path}: {name} holds {largest:g}, beyond what f16 can: build with precision bf16")
    return weight.astype(np.float16)


class OpenVINOBackend:
    """Weights files, as the Backend the builder knows."""

    def key(self, digest: str, config: EngineConfig) -> str:
        return digest_of(WEIGHTS_FORMAT, digest, config.precision, config.tp, config.architecture)

    def found_key(self, directory: Path, config: EngineConfig) -> str | None:
        return weights_key(directory, config.tp)

    def write(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path, progress: Progress) -> None:
        for job in jobs:
            stage = f"{job.config.role} weights"
            write_weights(
                checkpoint,
                job.config.architecture,
                job.config.precision,
                job.directory,
                shards=[shard_of(job.config.architecture, job.config.layout, rank) for rank in range(job.config.tp)],
                key=job.key,
                progress=functools.partial(progress, stage),
            )

    def link(self, source: Path, config: EngineConfig, directory: Path) -> None:
        for name in map(weights_file, range(config.tp)):
            link_or_copy(source / name, directory / name)

    def steps(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path) -> list[str]:
        return []
