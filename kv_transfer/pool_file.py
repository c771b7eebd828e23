"""The file under a SharedPool: what lies where, how it is made, checked, and swept when its creator is gone.

A file's name ends in its creator's pid and start time, and the creator holds a shared lock on it: either
tells whether it lives, the lock also across pid namespaces.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from trtpd.errors import CapacityError, LayoutError, LeaseError
from trtpd.kv_transfer.layout import KVLayout

SHM_DIR = Path("/dev/shm")
PREFIX = "trtpd-"
MAGIC = b"trtpdKV\0"
EPOCHS_AT = 4096
LEASE_WORDS = 8

_VERSION = 1
_HEADER = struct.Struct("<8sIIQ64s32s")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}\.(?P<pid>\d{1,10})\.(?P<start>\d{1,20})\.[0-9a-f]{8}")


class PoolAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool is: the name of its file in /dev/shm, its size, its generation and its rank."""

    name: str
    size_bytes: int
    num_blocks: int
    generation: str
    tp_rank: int = 0
    pp_rank: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where things lie in the file of one rank. `word` is the widest unsigned type that one head of a block is
    whole words of; copies move words."""

    layers: int
    shape: tuple[int, int, int, int]
    block_bytes: int
    stride_bytes: int
    word: np.dtype[np.unsignedinteger[npt.NBitBase]]
    leases_at: int
    kv_at: int
    size_bytes: int


def plan_file(layout: KVLayout, num_blocks: int, tp_rank: int, pp_rank: int) -> Plan:
    """`block_bytes` is one block of one array (K or V of one layer)."""
    layers, heads = len(layout.rank_layers(pp_rank)), len(layout.rank_heads(tp_rank))
    head_bytes = layout.tokens_per_block * layout.head_dim * layout.itemsize_bytes
    block_bytes = heads * head_bytes
    stride_bytes = _whole_pages(num_blocks * block_bytes)
    leases_at = _whole_pages(EPOCHS_AT + num_blocks * 8)
    kv_at = _whole_pages(leases_at + num_blocks * LEASE_WORDS * 8)
    return Plan(
        layers=layers,
        shape=(num_blocks, heads, layout.tokens_per_block, layout.head_dim),
        block_bytes=block_bytes,
        stride_bytes=stride_bytes,
        word=np.dtype(f"u{next(width for width in (8, 4, 2) if head_bytes % width == 0)}"),
        leases_at=leases_at,
        kv_at=kv_at,
        size_bytes=kv_at + 2 * layers * stride_bytes,
    )


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def header_of(address: PoolAddress, layout: KVLayout) -> bytes:
    return _HEADER.pack(*_header_fields(address, layout))


def _header_fields(address: PoolAddress, layout: KVLayout) -> tuple[bytes, int, int, int, bytes, bytes]:
    ranks = address.tp_rank << 16 | address.pp_rank
    generation, fingerprint = address.generation.encode(), layout.fingerprint.encode()
    return MAGIC, _VERSION, ranks, address.num_blocks, generation, fingerprint


def allocate(fd: int, size_bytes: int, name: str, directory: Path) -> None:
    """Reserves the whole file, so that a full /dev/shm is an error here and not a SIGBUS at a later write.
    Raises CapacityError."""
    stat = os.statvfs(directory)
    free_bytes = stat.f_bavail * stat.f_frsize
    try:
        if size_bytes > free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise CapacityError(
            f"KV pool {name!r} needs {size_bytes} bytes of {directory}, which has {free_bytes} free"
            f" ({error.strerror}): give it fewer KV blocks, stop what else fills {directory}, or enlarge it"
            f" (mount -o remount,size=... {directory}; in a container --shm-size)"
        ) from error


def check_address(address: PoolAddress, layout: KVLayout) -> None:
    """An address comes from a peer: its parts must agree before anything is opened or mapped by them.
    Raises LeaseError, LayoutError."""
    if not _FILE_NAME.fullmatch(address.name) or not address.name.startswith(PREFIX):
        raise LeaseError(f"{address.name[:200]!r} is not the name of a KV pool")
    ranks_fit = 0 <= address.tp_rank < layout.tp and 0 <= address.pp_rank < layout.pp
    if not ranks_fit or not 0 < address.num_blocks <= 1 << 40:
        raise LayoutError(f"KV pool {address.name}: {address} does not fit {layout}")
    expected = plan_file(layout, address.num_blocks, address.tp_rank, address.pp_rank).size_bytes
    if address.size_bytes != expected:
        raise LayoutError(
            f"KV pool {address.name} says {address.size_bytes} bytes, its layout with {address.num_blocks}"
            f" blocks needs {expected}: the peer has another layout; rebuild both from one pipeline file"
        )


def check_file(fd: int, address: PoolAddress, layout: KVLayout) -> None:
    """What the file says of itself against what the peer said. Raises LeaseError, LayoutError."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes < EPOCHS_AT:
        raise LeaseError(f"KV pool {address.name} has {size_bytes} bytes: it is not a pool, or not made yet")
    magic, version, ranks, blocks, generation, fingerprint = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    want = _header_fields(address, layout)
    if (magic, version) != want[:2]:
        raise LeaseError(f"KV pool {address.name} is closed or of another format ({magic!r} {version})")
    if generation.rstrip(b"\0") != want[4]:
        raise LeaseError(
            f"KV pool {address.name} is of generation {generation.rstrip(bytes(1))!r}, the offer of"
            f" {address.generation!r}: the peer has restarted"
        )
    if (ranks, blocks, fingerprint.rstrip(b"\0"), size_bytes) != (*want[2:4], want[5], address.size_bytes):
        raise LayoutError(
            f"KV pool {address.name} holds another layout than the offer says ({layout}):"
            " rebuild both engines from one pipeline file"
        )


def lock_as_creator(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_SH)


def creator_is_gone(fd: int) -> bool:
    """True if no living process holds the creator's lock on this file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def sweep(prefix: str = PREFIX, *, directory: Path = SHM_DIR) -> list[str]:
    """Unlinks pools whose creator is gone. Their names."""
    return [path.name for path in _unowned(prefix, directory) if _unlocked(path, unlink=True)]


def leftovers(prefix: str = PREFIX, *, directory: Path = SHM_DIR) -> list[Path]:
    """What `sweep` would unlink."""
    return [path for path in _unowned(prefix, directory) if _unlocked(path, unlink=False)]


def _unowned(prefix: str, directory: Path) -> Iterator[Path]:
    """Pools whose creator (its pid and start time are in the file name) is gone as far as this pid namespace knows."""
    for name in sorted(os.listdir(directory)):
        match = _FILE_NAME.fullmatch(name)
        if match is not None and name.startswith(prefix) and start_ticks(int(match["pid"])) != int(match["start"]):
            yield directory / name


def _unlocked(path: Path, *, unlink: bool) -> bool:
    """Whether no creator holds its lock either. False for what is gone meanwhile, or is another user's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        gone = creator_is_gone(fd)
        if gone and unlink:
            path.unlink(missing_ok=True)
        return gone
    finally:
        os.close(fd)
