"""SharedPool: the KV memory of one rank, in one /dev/shm file that other processes of this host may map.

The file is control area first (header, one epoch per block, lease slots), then K and V of each layer, every
array from a page of its own. A process that attaches maps the KV read-only: it can't harm what it reads.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtpd.errors import CapacityError, InternalError, LeaseError, TransferError
from trtpd.kv_transfer import pool_file as file
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool_file import PREFIX, SHM_DIR, PoolAddress, leftovers, sweep

__all__ = ["Array", "PoolAddress", "SharedPool", "Words", "leftovers", "sweep"]

Array = npt.NDArray[np.generic]
Words = npt.NDArray[np.unsignedinteger[npt.NBitBase]]
NUMPY_DTYPE: dict[str, npt.DTypeLike] = {
    "f32": np.float32,
    "bf16": np.uint16,
    "f16": np.float16,
    "fp8": np.uint8,
}

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MADV_POPULATE_READ = 22


class SharedPool:
    """K and V per layer as numpy arrays `[num_blocks, heads, tokens_per_block, head_dim]` over shared memory.

    bf16 is held as uint16. Beside the KV lies a control area: magic, version, generation, layout digest, one
    64-bit epoch per block, and lease slots. The creator owns the file: `close` unlinks it. A pool that is
    only attached never unlinks. Pages are touched at creation. `heads` and the layers are those of the rank.

    `grid` is the same memory once more as words, `[array, block, word]`, arrays in the order K and V of the
    first layer, K and V of the second: one numpy copy moves a run of blocks in all layers. `cells` is it with
    the heads apart, `[array, block, head, word]`.
    `leases` has one row of 64-bit words per lease slot, as many as blocks; leases.py says what they mean.
    """

    layout: KVLayout
    num_blocks: int
    keys: list[Array]
    values: list[Array]
    address: PoolAddress
    grid: Words
    cells: Words
    leases: npt.NDArray[np.uint64]

    def __init__(
        self, fd: int, path: Path, address: PoolAddress, layout: KVLayout, *, owner: bool, writable: bool
    ) -> None:
        """Maps `fd`, which it then owns. Use `create` or `attach`."""
        self.layout, self.num_blocks, self.address = layout, address.num_blocks, address
        self._fd, self._path, self._owner, self._closed = fd, path, owner, False
        plan = file.plan_file(layout, address.num_blocks, address.tp_rank, address.pp_rank)
        prot = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)
        self._kv_at, self._stride_bytes = plan.kv_at, plan.stride_bytes
        self._control = mmap.mmap(fd, plan.kv_at, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._kv = mmap.mmap(fd, address.size_bytes - plan.kv_at, flags, prot, offset=plan.kv_at)
        self._view(plan)

    def _view(self, plan: file.Plan) -> None:
        blocks, lease_words = self.num_blocks, self.num_blocks * file.LEASE_WORDS
        self._epochs = np.frombuffer(self._control, np.uint64, blocks, file.EPOCHS_AT)
        self._epochs.flags.writeable = self._owner
        self.leases = np.frombuffer(self._control, np.uint64, lease_words, plan.leases_at).reshape(blocks, -1)
        # np.frombuffer, unlike np.ndarray(buffer=...), keeps the mapping from being closed under its arrays.
        kv = np.frombuffer(self._kv, np.uint8).reshape(2 * plan.layers, plan.stride_bytes)
        rows = kv[:, : blocks * plan.block_bytes]
        words = rows.view(plan.word)
        self.grid = words.reshape(2 * plan.layers, blocks, -1)
        self.cells = words.reshape(2 * plan.layers, blocks, plan.shape[1], -1)
        arrays = [row.view(NUMPY_DTYPE[self.layout.dtype]).reshape(plan.shape) for row in rows]
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
            raise InternalError(f"not a pool: name {name!r}, generation {generation!r}, {num_blocks} blocks")
        tail = hashlib.sha256(generation.encode()).hexdigest()[:8]
        address = PoolAddress(
            name=f"{PREFIX}{name}.{os.getpid()}.{file.start_ticks(os.getpid())}.{tail}",
            size_bytes=file.plan_file(layout, num_blocks, tp_rank, pp_rank).size_bytes,
            num_blocks=num_blocks,
            generation=generation,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
        )
        path = directory / address.name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise InternalError(f"{path} exists: this process has this pool already") from error
        try:
            file.lock_as_creator(fd)
            file.allocate(fd, address.size_bytes, name, directory)
            pool = cls(fd, path, address, layout, owner=True, writable=True)
        except BaseException as error:
            path.unlink()
            os.close(fd)
            if isinstance(error, OSError):
                raise CapacityError(f"KV pool {name!r}: {address.size_bytes} bytes: {error}") from error
            raise
        header = file.header_of(address, layout)
        pool._control[: len(header)] = header
        return pool

    @classmethod
    def attach(
        cls, address: PoolAddress, layout: KVLayout, *, writable: bool = False, directory: Path = SHM_DIR
    ) -> SharedPool:
        """Maps another process's pool; `writable` is for the leader of its own group. Raises LeaseError if it
        is gone or of another generation, LayoutError if it is of another layout. Its pages are mapped when
        touched, or by `warm`."""
        file.check_address(address, layout)
        path = directory / address.name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise LeaseError(f"KV pool {path} is gone ({error.strerror}): its process has ended") from error
        try:
            file.check_file(fd, address, layout)
            return cls(fd, path, address, layout, owner=False, writable=writable)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise TransferError(f"KV pool {path} can't be mapped: {error}") from error
            raise

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
        if self._control[: len(file.MAGIC)] != file.MAGIC or os.fstat(self._fd).st_nlink == 0:
            return True
        return file.creator_is_gone(self._fd)

    def warm(self, offset_bytes: int, size_bytes: int) -> int:
        """Maps in the KV pages from `offset_bytes` on, so that a first copy doesn't pay for it.
        The offset to go on from, which is past the end when all is done."""
        end = min(offset_bytes + size_bytes, len(self._kv))
        start = offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            try:
                self._kv.madvise(_MADV_POPULATE_READ, start, end - start)
            except OSError:
                return len(self._kv)  # a kernel before 5.14: pages come in one by one as they are read
        return end

    @property
    def kv_bytes(self) -> int:
        """Size of the KV area."""
        return 0 if self._closed else len(self._kv)

    def place_of(self, array: int) -> tuple[int, int]:
        """Where an array of `grid` lies: the file's descriptor, which is the pool's, and the offset in bytes."""
        return self._fd, self._kv_at + array * self._stride_bytes

    def close(self) -> None:
        """Unmaps; the creator unlinks. Idempotent. Arrays still referenced elsewhere stay readable."""
        if self._closed:
            return
        self._closed = True
        if self._owner:
            self._control[: len(file.MAGIC)] = bytes(len(file.MAGIC))
            self._path.unlink(missing_ok=True)
        self.keys, self.values = [], []
        self._epochs = np.empty(0, np.uint64)
        self.leases = np.empty((0, file.LEASE_WORDS), np.uint64)
        self.grid, self.cells = np.empty((0, 0, 0), np.uint64), np.empty((0, 0, 0, 0), np.uint64)
        for mapping in (self._control, self._kv):
            try:
                mapping.close()
            except BufferError:
                continue  # someone holds an array over it: unmapped when that array dies
        os.close(self._fd)
