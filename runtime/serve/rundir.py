"""The run directory of one `trtpd serve`: private, named after its launcher, gone when it ends.

RUN/
  logs/            one file per process
  stubs/NAME       Identity of the Triton stub that runs model NAME
  drain            present once serving ends: the instant (monotonic clock) at which streams are cut
  backends/        what tritonserver takes for its backend directory
  model_repo       the build's models, under a name that a shell takes as it is; build/model_repo for a build whose
                   path is not ASCII
  router.ipc ...   sockets
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import msgspec
import psutil

from trtpd.runtime.serve.processes import Identity, kill_all, own_identity
from trtpd.runtime.worker.group import sweep_groups

SHM_DIR = Path("/dev/shm")
SHORT_TMP = Path("/tmp")
PREFIX = "trtpd-run."
REGION_PREFIX = "trtpd-triton."
SOCKET_PATH_BYTES = 100
"""Linux allows 107 for a socket's path; the longest name of ours must fit behind the directory."""

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
_OWNER = re.compile(r"[a-z-]+\.(\d+)\.(\d+)\.")


def make_run_dir() -> Path:
    """A new one, readable by this user only."""
    owner = own_identity()
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner.pid}.{owner.start_ticks}.", dir=_base()))
    for name in ("logs", "stubs", "backends"):
        (path / name).mkdir()
    return path


def link_repository(run_dir: Path, build: Path) -> Path:
    """The model repository as Triton is to be told of it: a plain path, whatever that of `build` looks like."""
    build = build.resolve()
    if str(build).isascii():
        link = run_dir / "model_repo"
        link.symlink_to(build / "model_repo")
        return link
    return _mirror(build, run_dir / "build") / "model_repo"


def _mirror(build: Path, mirror: Path) -> Path:
    """A build under another name: folders that resolve to themselves, and links below. For a stub's interpreter, which
    takes every path for ASCII."""
    models = [path for path in (build / "model_repo").iterdir() if path.is_dir()]
    others = [path for path in build.iterdir() if path.name != "model_repo"]
    for path in others + [file for model in models for file in model.iterdir()]:
        link = mirror / path.relative_to(build)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return mirror


def region_prefix() -> str:
    """What the shared memory of this launcher's Triton begins with."""
    owner = own_identity()
    return f"{REGION_PREFIX}{owner.pid}.{owner.start_ticks}."


def sweep_leftovers() -> list[str]:
    """Removes run directories and Triton's shared memory of launchers that are gone, and the folders of groups whose
    keepers are. Returns their names. Stubs of such launchers are ended first: one that was talking to its server when
    that was killed waits for ever, deaf to its own watch."""
    found = leftovers()
    for path in found:
        kill_all(stub_processes(path))
        remove(path)
    return [path.name for path in found] + sweep_groups(SHM_DIR)


def leftovers() -> list[Path]:
    """Run directories and Triton's shared memory of this user's launchers that are gone. What another user has left
    there, or put there for us to find, is none of ours."""
    candidates = [*_base().glob(f"{PREFIX}*"), *SHM_DIR.glob(f"{REGION_PREFIX}*")]
    return [path for path in candidates if _owner_is_gone(path.name) and _is_ours(path)]


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # somebody else sweeps too
        return False


def sweep_regions(prefix: str) -> list[str]:
    """Removes Triton's shared memory with this prefix, whoever made it. Returns the names."""
    regions = list(SHM_DIR.glob(f"{prefix}*"))
    for path in regions:
        remove(path)
    return [path.name for path in regions]


def remove(path: Path) -> None:
    """A file or a tree; what is gone already, or another user's, is left alone."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return


def note_stub(run_dir: Path, model: str) -> None:
    """Called in a stub: says which process runs `model`."""
    path = run_dir / "stubs" / model
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(own_identity()))
    fresh.replace(path)


def stub_of(run_dir: Path, model: str) -> Identity | None:
    """The stub that last said it runs `model`."""
    try:
        return msgspec.json.decode((run_dir / "stubs" / model).read_bytes(), type=Identity)
    except FileNotFoundError:
        return None


def stubs(run_dir: Path) -> list[Identity]:
    """Every stub that has said what it runs."""
    found = (stub_of(run_dir, path.name) for path in (run_dir / "stubs").glob("*") if path.suffix != ".new")
    return [stub for stub in found if stub is not None]


def stub_processes(run_dir: Path) -> list[psutil.Process]:
    """Those of them that run. One may end by itself meanwhile."""
    found = []
    for stub in stubs(run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            if stub.alive:
                found.append(psutil.Process(stub.pid))
    return found


def forget_stub(run_dir: Path, model: str) -> None:
    (run_dir / "stubs" / model).unlink(missing_ok=True)


def announce_drain(run_dir: Path, until_s: float) -> None:
    """Tells `pd` when (monotonic clock) what still runs is to be cut."""
    fresh = run_dir / "drain.new"
    fresh.write_text(repr(until_s))
    fresh.replace(run_dir / "drain")


def drain_until_s(run_dir: Path) -> float | None:
    """None while serving goes on; long ago if the launcher was killed: the server is told to end then, and would wait
    for streams that nobody cuts."""
    try:
        return float((run_dir / "drain").read_text())
    except FileNotFoundError:
        return 0.0 if _owner_is_gone(run_dir.name) else None


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def keep_log(log: Path) -> Path | None:
    """Copies a log to where it stays, for this user only, in the place of the last one kept; None if it can't be."""
    kept = Path(tempfile.gettempdir()) / f"trtpd-last-{os.getuid()}-{log.name}"
    try:
        handle, fresh = tempfile.mkstemp(dir=kept.parent, prefix=f"{kept.name}.")
        with os.fdopen(handle, "wb") as copy, log.open("rb") as source:
            shutil.copyfileobj(source, copy)
        os.replace(fresh, kept)
    except OSError:
        return None
    return kept


def _base() -> Path:
    """Where run directories are made: the temporary directory, unless its name leaves no room for a socket's, or has
    characters that mean something to a shell: Triton starts its stubs through one and quotes nothing."""
    base = tempfile.gettempdir()
    fits = len(base) <= SOCKET_PATH_BYTES // 2 and _PLAIN.fullmatch(base)
    return Path(base) if fits else SHORT_TMP


def _owner_is_gone(name: str) -> bool:
    match = _OWNER.match(name)
    return match is not None and not Identity(int(match[1]), int(match[2])).alive
