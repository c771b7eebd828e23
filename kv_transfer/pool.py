"""SharedPool: the KV memory of one rank, in one /dev/shm file that other processes of this host may map."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from trtpd.kv_transfer.layout import KVLayout

Array = npt.NDArray[np.generic]


class PoolAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool is: the name of its file in /dev/shm, its size, and the generation that made it."""

    name: str
    size_bytes: int
    num_blocks: int
    generation: str


class SharedPool:
    """K and V per layer as numpy arrays `[num_blocks, heads, tokens_per_block, head_dim]` over shared memory.

    bf16 is held as uint16. Beside the KV lies a control area: magic, version, generation, layout digest, one
    64-bit epoch per block, and lease slots. The creator owns the file: `close` unlinks it. A pool that is only
    attached never unlinks. Pages are touched at creation.
    """

    layout: KVLayout
    num_blocks: int
    keys: list[Array]
    values: list[Array]
    address: PoolAddress

    @classmethod
    def create(cls, name: str, layout: KVLayout, num_blocks: int, *, generation: str) -> SharedPool:
        """Raises CapacityError when /dev/shm has no room (value and mend in the message)."""
        raise NotImplementedError

    @classmethod
    def attach(cls, address: PoolAddress, layout: KVLayout) -> SharedPool:
        """Maps another process's pool. Raises LeaseError if it is gone or of another generation,
        LayoutError if it is of another layout."""
        raise NotImplementedError

    def epochs_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The current epoch of each block."""
        raise NotImplementedError

    def bump(self, blocks: Sequence[int]) -> None:
        """Called by the allocator when blocks are freed: whatever is still being copied out of them is void."""
        raise NotImplementedError

    def close(self) -> None:
        """Unmaps; the creator unlinks. Idempotent."""
        raise NotImplementedError


def sweep(prefix: str = "trtpd-") -> list[str]:
    """Unlinks pools in /dev/shm whose creator (pid and start time are in the file name) is gone. Names removed."""
    raise NotImplementedError
