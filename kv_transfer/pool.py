"""SharedPool: the KV memory of one rank, in one /dev/shm file that other processes of this host may map.

The file is control area first (header, one epoch per block, lease slots), then K and V of each layer, every
array from a page of its own. A process that attaches maps the KV read-only: it can't harm what it reads.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from trtpd.errors import CapacityError, InternalError, LayoutError, LeaseError
from trtpd.kv_transfer.layout import KVLayout

Array = npt.NDArray[np.generic]

SHM_DIR = Path("/dev/shm")
PREFIX = "trtpd-"
NUMPY_DTYPE: dict[str, npt.DTypeLike] = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}

_MAGIC = b"trtpdKV\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ64s32s")
_EPOCHS_AT = 4096
_LEASE_WORDS = 8
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FILE_NAME = re.compile(
    r"(?P<rest>[A-Za-z0-9_.-]{1,200})\.(?P<pid>\d{1,10})\.(?P<start>\d{1,20})\.[0-9a-f]{8}"
)


class PoolAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool is: the name of its file in /dev/shm, its size, its generation and its rank."""

    name: str
    size_bytes: int
    num_blocks: int
    generation: str
    tp_rank: int = 0
    pp_rank: int = 0


class SharedPool:
    """K and V per layer as numpy arrays `[num_blocks, heads, tokens_per_block, head_dim]` over shared memory.

    bf16 is held as uint16. Beside the KV lies a control area: magic, version, generation, layout digest, one
    64-bit epoch per block, and lease slots. The creator owns the file: `close` unlinks it. A pool that is
    only attached never unlinks. Pages are touched at creation. `heads` and the layers are those of the rank.
    """

    layout: KVLayout
    num_blocks: int
    keys: list[Array]
    values: list[Array]
    address: PoolAddress
    leases: npt.NDArray[np.uint64]
    """One row of 64-bit words per lease slot, as many slots as blocks; `leases.py` says what they mean."""

    def __init__(self, fd: int, address: PoolAddress, layout: KVLayout, *, owner: bool) -> None:
        """Maps `fd`, which it then owns. Use `create` or `attach`."""
        self.layout, self.num_blocks, self.address = layout, address.num_blocks, address
        self._fd, self._owner, self._closed = fd, owner, False
        plan = _plan(layout, address.num_blocks, address.tp_rank, address.pp_rank)
        kv_bytes = address.size_bytes - plan.kv_at
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        kv_prot = mmap.PROT_READ | mmap.PROT_WRITE if owner else mmap.PROT_READ
        self._control = mmap.mmap(fd, plan.kv_at, flags)
        self._kv = mmap.mmap(fd, kv_bytes, flags, kv_prot, offset=plan.kv_at)
        blocks = address.num_blocks
        self._epochs = np.frombuffer(self._control, np.uint64, blocks, _EPOCHS_AT)
        self.leases = np.frombuffer(self._control, np.uint64, blocks * _LEASE_WORDS, plan.leases_at).reshape(
            blocks, _LEASE_WORDS
        )
        if not owner:
            self._epochs.flags.writeable = False
        arrays = [
            np.frombuffer(self._kv, NUMPY_DTYPE[layout.dtype], plan.items, i * plan.stride_bytes).reshape(
                plan.shape
            )
            for i in range(2 * plan.layers)
        ]
        self.keys, self.values = arrays[0::2], arrays[1::2]

    @classmethod
    def create(
        cls,
        name: str,
        layout: KVLayout,
        num_blocks: int,
        *,
        generation: str,
        tp_rank: int = 0,
        pp_rank: int = 0,
        directory: Path = SHM_DIR,
    ) -> SharedPool:
        """Raises CapacityError when /dev/shm has no room (value and mend in the message)."""
        if not _NAME.fullmatch(name) or not 0 < len(generation.encode()) <= 64 or num_blocks < 1:
            raise InternalError(
                f"pool {name!r}, generation {generation!r}, {num_blocks} blocks: not a valid pool"
            )
        size_bytes = _plan(layout, num_blocks, tp_rank, pp_rank).size_bytes
        tail = hashlib.sha256(generation.encode()).hexdigest()[:8]
        file_name = f"{PREFIX}{name}.{os.getpid()}.{_start_ticks(os.getpid())}.{tail}"
        path = directory / file_name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise InternalError(f"{path} exists: this process has this pool already") from error
        address = PoolAddress(
            name=file_name,
            size_bytes=size_bytes,
            num_blocks=num_blocks,
            generation=generation,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # held while the creator lives, whatever pid namespace it lives in
            _allocate(fd, size_bytes, name, directory)
            pool = cls(fd, address, layout, owner=True)
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise
        pool._path = path
        _HEADER.pack_into(pool._control, 0, *_header(address, layout))
        return pool

    @classmethod
    def attach(cls, address: PoolAddress, layout: KVLayout, *, directory: Path = SHM_DIR) -> SharedPool:
        """Maps another process's pool. Raises LeaseError if it is gone or of another generation,
        LayoutError if it is of another layout."""
        if not _FILE_NAME.fullmatch(address.name) or not address.name.startswith(PREFIX):
            raise LeaseError(f"{address.name!r} is not the name of a KV pool")
        _check_address(address, layout)
        path = directory / address.name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise LeaseError(
                f"KV pool {path} can't be opened ({error.strerror}): its process is gone"
            ) from error
        try:
            _check_file(fd, address, layout)
            pool = cls(fd, address, layout, owner=False)
        except BaseException:
            os.close(fd)
            raise
        pool._path = path
        return pool

    def epochs_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The current epoch of each block."""
        return tuple(self._epochs[np.asarray(blocks, np.intp)].tolist())

    def bump(self, blocks: Sequence[int]) -> None:
        """Called by the allocator when blocks are freed: what is still being copied out of them is void."""
        if not self._owner:
            raise InternalError(f"{self.address.name}: only the creator of a pool moves its epochs")
        np.add.at(self._epochs, np.asarray(blocks, np.intp), np.uint64(1))

    def gone(self) -> bool:
        """True once the creator has closed the pool or died. A closed pool is gone."""
        if self._closed:
            return True
        if self._owner:
            return False
        if bytes(self._control[: len(_MAGIC)]) != _MAGIC or os.fstat(self._fd).st_nlink == 0:
            return True
        return _lock_is_free(self._fd)

    def close(self) -> None:
        """Unmaps; the creator unlinks. Idempotent. Arrays still referenced elsewhere stay readable."""
        if self._closed:
            return
        self._closed = True
        if self._owner:
            self._control[: len(_MAGIC)] = bytes(len(_MAGIC))
            self._path.unlink(missing_ok=True)
        self.keys, self.values = [], []
        self._epochs = self.leases = np.empty((0, _LEASE_WORDS), np.uint64)
        for mapping in (self._control, self._kv):
            try:
                mapping.close()
            except BufferError:
                continue  # someone holds an array over it: unmapped when that array dies
        os.close(self._fd)

    _path: Path


class _Plan(msgspec.Struct, frozen=True):
    """Where things lie in the file."""

    layers: int
    shape: tuple[int, int, int, int]
    items: int
    stride_bytes: int
    leases_at: int
    kv_at: int
    size_bytes: int


def _plan(layout: KVLayout, num_blocks: int, tp_rank: int, pp_rank: int) -> _Plan:
    layers, heads = len(layout.rank_layers(pp_rank)), len(layout.rank_heads(tp_rank))
    shape = (num_blocks, heads, layout.tokens_per_block, layout.head_dim)
    items = num_blocks * heads * layout.tokens_per_block * layout.head_dim
    stride_bytes = _whole_pages(items * layout.itemsize_bytes)
    leases_at = _whole_pages(_EPOCHS_AT + num_blocks * 8)
    kv_at = _whole_pages(leases_at + num_blocks * _LEASE_WORDS * 8)
    return _Plan(layers, shape, items, stride_bytes, leases_at, kv_at, kv_at + 2 * layers * stride_bytes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _header(address: PoolAddress, layout: KVLayout) -> tuple[bytes, int, int, int, bytes, bytes]:
    ranks = address.tp_rank << 16 | address.pp_rank
    return (
        _MAGIC,
        _VERSION,
        ranks,
        address.num_blocks,
        address.generation.encode(),
        layout.fingerprint.encode(),
    )


def _allocate(fd: int, size_bytes: int, name: str, directory: Path) -> None:
    """Reserves the whole file, so that a full /dev/shm is an error here and not a SIGBUS at a later write."""
    free_bytes = _free_bytes(directory)
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


def _free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def _check_address(address: PoolAddress, layout: KVLayout) -> None:
    """An address comes from a peer: its numbers must agree before anything is mapped by them."""
    if not 0 <= address.tp_rank < layout.tp or not 0 <= address.pp_rank < layout.pp or address.num_blocks < 1:
        raise LayoutError(f"KV pool {address.name}: no rank {address.tp_rank}.{address.pp_rank} in {layout}")
    expected = _plan(layout, address.num_blocks, address.tp_rank, address.pp_rank).size_bytes
    if address.size_bytes != expected:
        raise LayoutError(
            f"KV pool {address.name} says {address.size_bytes} bytes, its layout with {address.num_blocks}"
            f" blocks needs {expected}: the peer has another layout; rebuild both from one pipeline file"
        )


def _check_file(fd: int, address: PoolAddress, layout: KVLayout) -> None:
    size_bytes = os.fstat(fd).st_size
    if size_bytes < _EPOCHS_AT:
        raise LeaseError(f"KV pool {address.name} has {size_bytes} bytes: it is not a pool, or not made yet")
    magic, version, ranks, blocks, generation, fingerprint = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    want = _header(address, layout)
    if (magic, version) != want[:2]:
        raise LeaseError(
            f"KV pool {address.name} is closed or of another format ({magic!r}, version {version})"
        )
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


def _lock_is_free(fd: int) -> bool:
    """True if no living process holds the creator's lock on this file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def sweep(prefix: str = PREFIX, *, directory: Path = SHM_DIR) -> list[str]:
    """Unlinks pools whose creator (its pid and start time are in the file name) is gone. Their names."""
    removed = []
    for name in sorted(os.listdir(directory)):
        match = _FILE_NAME.fullmatch(name)
        if match is None or not name.startswith(prefix):
            continue
        if _start_ticks(int(match["pid"])) == int(match["start"]):
            continue
        if _unlink_unlocked(directory / name):
            removed.append(name)
    return removed


def _unlink_unlocked(path: Path) -> bool:
    """A process of another pid namespace is not seen in /proc, but its lock is."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # swept by someone else meanwhile, or another user's
    try:
        if not _lock_is_free(fd):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
