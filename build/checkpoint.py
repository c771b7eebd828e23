"""Model checkpoints: a Hugging Face folder or a GGUF file, as an Architecture and a lazy source of tensors.

Only LlamaForCausalLM. Tensors have Hugging Face names and come one at a time as float32, so memory is
bounded by the largest of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from trtpd.build.gguf_model import GgufFile, gguf_name
from trtpd.build.gguf_tokenizer import special_ids, write_tokenizer
from trtpd.build.hf_config import architecture_from_config, read_json
from trtpd.build.manifest import Architecture
from trtpd.build.tensors import F32Array, TensorFile
from trtpd.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_READ_BYTES = 4 << 20


class TensorSource(Protocol):
    """Where a checkpoint's tensors come from."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by Hugging Face name."""

    def read(self, name: str) -> F32Array:
        """One tensor by its Hugging Face name, in memory of its own. Raises CheckpointError."""

    def files(self) -> list[Path]:
        """The files that hold the tensors."""

    def write_tokenizer(self, folder: Path) -> None:
        """Puts the tokenizer's files into `folder`. Raises CheckpointError if there is none."""


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


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of a LlamaForCausalLM with its shape, in the order of computation."""
    a = architecture
    q, kv = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for layer in range(a.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (a.hidden_size,),
            prefix + "self_attn.q_proj.weight": (q, a.hidden_size),
            prefix + "self_attn.k_proj.weight": (kv, a.hidden_size),
            prefix + "self_attn.v_proj.weight": (kv, a.hidden_size),
            prefix + "self_attn.o_proj.weight": (a.hidden_size, q),
            prefix + "post_attention_layernorm.weight": (a.hidden_size,),
            prefix + "mlp.gate_proj.weight": (a.intermediate_size, a.hidden_size),
            prefix + "mlp.up_proj.weight": (a.intermediate_size, a.hidden_size),
            prefix + "mlp.down_proj.weight": (a.hidden_size, a.intermediate_size),
        }
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tie_word_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file and checks it whole: files, architecture, every shape.

    Raises CheckpointError, one line. Reads no tensor yet.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such model; give a Hugging Face folder or a .gguf file, or run `trtpd fetch smollm2`"
        )
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: neither a Hugging Face folder nor a .gguf file")
    return checkpoint_of(GgufFile(path))


def open_architecture(path: Path) -> Checkpoint:
    """As open_checkpoint without looking at the weights, which may be absent: for engines that have none."""
    if path.is_dir():
        config = read_json(path / "config.json")
        source = _FolderSource(path, {}, [])
        return Checkpoint(
            path=path.resolve(),
            architecture=architecture_from_config(config, path / "config.json"),
            end_ids=_end_ids(path, config),
            source=source,
        )
    return open_checkpoint(path)


class _FolderSource:
    def __init__(self, folder: Path, tensors: dict[str, TensorFile], files: list[Path]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._files = files

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.specs[name].shape for name, file in self._tensors.items()}

    def read(self, name: str) -> F32Array:
        return self._tensors[name].read(name)

    def files(self) -> list[Path]:
        return self._files

    def write_tokenizer(self, folder: Path) -> None:
        if not (self._folder / "tokenizer.json").is_file():
            raise CheckpointError(f"{self._folder}: tokenizer.json is missing; download it with the model")
        for name in TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def _open_folder(folder: Path) -> Checkpoint:
    config_path = folder / "config.json"
    config = read_json(config_path)
    architecture = architecture_from_config(config, config_path)
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
            "other weight formats aren't read"
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
        ours = ((name, gguf_name(name)) for name in expected_shapes(self._gguf.architecture))
        return {name: theirs[stored] for name, stored in ours if stored in theirs}

    def read(self, name: str) -> F32Array:
        return self._gguf.read(name)

    def files(self) -> list[Path]:
        return [self._gguf.path]

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
    for name, shape in expected_shapes(checkpoint.architecture).items():
        if name not in found:
            raise CheckpointError(f"{checkpoint.path}: tensor {name} is missing (expected shape {list(shape)})")
        if found[name] != shape:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {list(found[name])}, but its configuration says {list(shape)}"
            )


def tensors_of(checkpoint: Checkpoint) -> Iterator[tuple[str, F32Array]]:
    """All tensors, one at a time, in the order of computation."""
    for name in expected_shapes(checkpoint.architecture):
        yield name, checkpoint.read(name)
