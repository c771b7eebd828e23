"""Model checkpoints: a Hugging Face folder or a GGUF file, as an Architecture and a lazy source of tensors.

Tensors have Hugging Face names and come one at a time, as float32 or as they are stored, so memory is bounded
by the largest of them. Which models are taken is the engine's to say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import xxhash

from trtpd.build.bounds import refuse_further_layers
from trtpd.build.chat_template import chat_template
from trtpd.build.config_fields import read_json
from trtpd.build.families import OWN_GRAPH, ModelRules
from trtpd.build.gguf_model import GgufFile
from trtpd.build.gguf_names import gguf_name
from trtpd.build.gguf_tokenizer import TEMPLATE_FIELD, build_tokenizer, special_ids, write_tokenizer
from trtpd.build.hf_config import architecture_from_config, checked_quantization
from trtpd.build.manifest import Architecture, Quantization
from trtpd.build.rules import refuse_unless_taken
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import F32Array, TensorFile
from trtpd.build.tokenizer_files import check_tokenizer
from trtpd.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's stored values; `dtype` is the safetensors name (BF16 and F8_E4M3 are bit patterns)."""

    dtype: str
    values: npt.NDArray[Any]


class TensorSource(Protocol):
    """Where a checkpoint's tensors come from."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by Hugging Face name."""

    def read(self, name: str) -> F32Array:
        """One tensor by its Hugging Face name, in memory of its own. Raises CheckpointError."""

    def stored(self, name: str) -> StoredTensor:
        """One tensor as it is stored, read as far as it is looked at. Raises CheckpointError."""

    def files(self) -> list[Path]:
        """The files that hold the tensors; none if there is only a configuration."""

    def check_tokenizer(self) -> None:
        """Raises CheckpointError if there is no tokenizer, or one that can't be read."""

    def write_tokenizer(self, folder: Path) -> None:
        """Puts the tokenizer's files into `folder`. Raises CheckpointError as check_tokenizer does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint. `end_ids` are the tokens that end an answer, as the checkpoint gives them."""

    path: Path
    architecture: Architecture
    end_ids: tuple[int, ...]
    source: TensorSource

    @property
    def name(self) -> str:
        """What the model is called in a build: the folder's or the file's name."""
        return self.path.stem if self.path.suffix == ".gguf" else self.path.name

    def read(self, name: str) -> F32Array:
        """As TensorSource.read."""
        return self.source.read(name)

    def digest(self) -> str:
        """Digest of the files' content: equal for equal weights."""
        state = xxhash.xxh3_128()
        for path in self.source.files():
            with path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    state.update(piece)
        return str(state.hexdigest())


def open_checkpoint(path: Path, rules: ModelRules = OWN_GRAPH) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file and checks it whole: files, architecture, every shape.

    Raises CheckpointError, one line, also for a model that `rules` don't take. Reads no tensor yet.
    """
    if path.is_dir():
        return _open_folder(path, rules)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such model; give a Hugging Face folder or a .gguf file, or run `trtpd fetch smollm2`"
        )
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: neither a Hugging Face folder nor a .gguf file")
    checkpoint = checkpoint_of(GgufFile(path))
    refuse_unless_taken(checkpoint.architecture, rules, path)
    return checkpoint


def open_architecture(path: Path, rules: ModelRules = OWN_GRAPH) -> Checkpoint:
    """As open_checkpoint without looking at the weights, which may be absent: for engines that have none, and
    for plans."""
    if path.is_dir():
        config = read_json(path / "config.json")
        return Checkpoint(
            path=path.resolve(),
            architecture=_architecture(path, config, rules),
            end_ids=_end_ids(path, config),
            source=_FolderSource(path, {}, []),
        )
    return open_checkpoint(path, rules)


def has_weights(path: Path) -> bool:
    """Whether there is any file of weights at `path`, whole or not."""
    return path.is_file() or any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file()


def _architecture(folder: Path, config: dict[str, Any], rules: ModelRules) -> Architecture:
    quantization = _modelopt_file(folder) if rules.quantised else None
    return architecture_from_config(config, folder / "config.json", rules, quantization=quantization)


def _modelopt_file(folder: Path) -> Quantization | None:
    """What ModelOpt's hf_quant_config.json says of the weights, None if there is none."""
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return None
    found = read_json(path).get("quantization")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: quantization is missing")
    excluded = found.get("exclude_modules") or []
    return checked_quantization(found.get("quant_algo"), found.get("kv_cache_quant_algo"), excluded, path)


class _FolderSource:
    def __init__(self, folder: Path, tensors: dict[str, TensorFile], files: list[Path]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._files = files

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.specs[name].shape for name, file in self._tensors.items()}

    def read(self, name: str) -> F32Array:
        return self._tensors[name].read(name)

    def stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        file = self._tensors[name]
        return StoredTensor(file.specs[name].dtype, file.read_stored(name))

    def files(self) -> list[Path]:
        return self._files

    def check_tokenizer(self) -> None:
        check_tokenizer(self._folder)

    def write_tokenizer(self, folder: Path) -> None:
        self.check_tokenizer()
        for name in TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def _open_folder(folder: Path, rules: ModelRules) -> Checkpoint:
    config = read_json(folder / "config.json")
    architecture = _architecture(folder, config, rules)
    files = _weight_files(folder)
    opened = {path: TensorFile(path) for path in dict.fromkeys(files.values())}
    tensors: dict[str, TensorFile] = {}
    for name, path in files.items():
        if name not in opened[path].specs:
            raise CheckpointError(f"{path}: {name} is not in it, though the index says so")
        tensors[name] = opened[path]
    checkpoint = Checkpoint(
        path=folder.resolve(),
        architecture=architecture,
        end_ids=_end_ids(folder, config),
        source=_FolderSource(folder, tensors, sorted(opened)),
    )
    _check_shapes(checkpoint)
    return checkpoint


def _weight_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    single, index_path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict.fromkeys(TensorFile(single).specs, single)
    if not index_path.is_file():
        raise CheckpointError(
            f"{folder}: neither model.safetensors nor model.safetensors.index.json is in it; "
            "other weight formats aren't read: download these, or convert the model to safetensors"
        )
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index_path}: weight_map is missing")
    files: dict[str, Path] = {}
    for name, file in weight_map.items():
        path = folder / str(file)
        if path.parent != folder:
            raise CheckpointError(f"{index_path}: {name} is said to be in {file!r}, outside the folder")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though {index_path.name} names it; download it")
        files[name] = path
    return files


def _end_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"{folder}: eos_token_id is {json.dumps(found)}; it must be a whole number or a list")
    return tuple(ids)


class _GgufSource:
    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf

    def shapes(self) -> dict[str, tuple[int, ...]]:
        theirs = self._gguf.shapes()
        ours = ((name, gguf_name(name, self._gguf.family)) for name in expected_shapes(self._gguf.architecture))
        return {name: theirs[stored] for name, stored in ours if stored in theirs}

    def read(self, name: str) -> F32Array:
        return self._gguf.read(name)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor("F32", self._gguf.read(name))

    def files(self) -> list[Path]:
        return [self._gguf.path]

    def check_tokenizer(self) -> None:
        build_tokenizer(self._gguf)
        if template := self._gguf.metadata.get(TEMPLATE_FIELD):
            chat_template({"chat_template": template}, self._gguf.path)

    def write_tokenizer(self, folder: Path) -> None:
        write_tokenizer(self._gguf, folder)


def checkpoint_of(gguf: GgufFile) -> Checkpoint:
    """An opened GGUF file as a checkpoint, checked as by `open_checkpoint`."""
    end = special_ids(gguf).get("eos")
    checkpoint = Checkpoint(
        path=gguf.path.resolve(),
        architecture=gguf.architecture,
        end_ids=() if end is None else (end,),
        source=_GgufSource(gguf),
    )
    _check_shapes(checkpoint)
    return checkpoint


def _check_shapes(checkpoint: Checkpoint) -> None:
    found = checkpoint.source.shapes()
    refuse_further_layers(checkpoint.path, found, "model.layers.", checkpoint.architecture.num_hidden_layers)
    for name, shape in expected_shapes(checkpoint.architecture).items():
        if name not in found:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} is missing (expected shape {list(shape)}); download the "
                "model again, or set its config.json right"
            )
        if found[name] != shape:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {list(found[name])}, but its configuration says {list(shape)}"
            )


def tensors_of(checkpoint: Checkpoint) -> Iterator[tuple[str, F32Array]]:
    """All tensors, one at a time, in the order of computation."""
    for name in expected_shapes(checkpoint.architecture):
        yield name, checkpoint.read(name)
