"""Folders that are made whole or not at all, one maker at a time.

Everything trtpd writes for later (downloads, models, builds) is made beside its place under a temporary
name, put on disk, and then renamed. A maker that dies leaves only the temporary name, which the next one
sweeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from trtpd.errors import InputError, TrtpdError

_MARK = ".trtpd-new"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_LEAST_BYTES = 1 << 20


def cache_dir(environ: dict[str, str] | os._Environ[str] = os.environ) -> Path:
    """Where downloads and converted models are kept: TRTPD_CACHE, else trtpd under XDG_CACHE_HOME."""
    if ours := environ.get("TRTPD_CACHE"):
        return Path(ours)
    xdg = environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else expanded("~/.cache")) / "trtpd"


def expanded(path: str | Path) -> Path:
    """`path` with a leading ~ or ~USER as that home folder. Raises InputError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"{path}: there is no such home folder; write the path out (the cache: set TRTPD_CACHE)"
        ) from error


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an exclusive lock on `path` across processes; the file is there only while someone holds it.
    Blocks until it is free, calling `waiting` once first if it is not. A holder that dies lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _still_at(path, file.fileno()):
                continue  # its former holder removed it: whoever comes now locks another file
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _still_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` that is removed at the end, whatever happens. The caller holds a lock
    that keeps other makers of `target` away; leftovers of dead ones are swept first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{glob.escape(target.name)}{_MARK}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    new = target.with_name(f".{target.name}{_MARK}-{os.getpid()}")
    new.mkdir()
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` that takes its place when the block ends, and vanishes if it raises.

    A folder already at `target` stays in use until the moment of the exchange, and is then removed. Locking
    as for `scratch`.
    """
    with scratch(target) as new:
        yield new
        sync_tree(new)
        _exchange(new, target)


def _exchange(new: Path, target: Path) -> None:
    """Puts `new` at `target`; what was there is at `new` afterwards. At every instant `target` is whole."""
    if target.exists():
        _rename_exchange(new, target)
    else:
        new.rename(target)
    _sync_directory(target.parent)


def _rename_exchange(one: Path, other: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        paths = os.fsencode(one), os.fsencode(other)
        if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(other))
    # Some network file systems have no exchange: two renames, with an instant in which nothing is there.
    aside = one.with_name(one.name + ".old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def sync_tree(folder: Path) -> None:
    """Puts every file and folder under `folder` on disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
        _sync_directory(Path(root))


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(*parts: object) -> str:
    """Names a content: equal for equal parts."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows one, else a copy. Neither file is ever written again."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Makes `target` a folder with the same files as `source`, linked where possible; symbolic links stay such."""
    shutil.copytree(
        source, target, symlinks=True, copy_function=lambda one, other: link_or_copy(Path(one), Path(other))
    )


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file beside its place and renames it, so that a full disk leaves what was there before. What is no plain
    file (/dev/stdout) is written as it is. Raises OSError naming a file."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()
    new = target.with_name(f".{target.name}{_MARK}-{os.getpid()}")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        new.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Looks whether files can be written into `folder`, or it can be made: before long work, not behind it. Leaves
    nothing. Raises InputError."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(_LEAST_BYTES))
            file.flush()
    except OSError as error:
        raise InputError(f"{folder}: can't be written ({error.strerror}); {mend_of(error, ELSEWHERE)}") from error


ELSEWHERE = "choose another place with -o"
CACHE_MEND = "choose another place with TRTPD_CACHE"


@contextlib.contextmanager
def translated(doing: str, error_type: type[TrtpdError], mend: str = ELSEWHERE) -> Iterator[None]:
    """Turns an OSError into one line that says what was being done, with which file, and what to do."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise error_type(f"{doing}: {error.strerror or error}{where}; {mend_of(error, mend)}") from error


def mend_of(error: OSError, mend: str) -> str:
    """`mend`, for a full disk with what else helps."""
    return f"free some space, or {mend}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else mend
