"""RankPools: the pools of a group's ranks on one host, as its leader sees them.

A group's leader (rank 0) maps the pools of all ranks of its host and serves them as one source or one sink. So
the other ranks need no thread and no message for a transfer: they compute, and their KV comes and goes beside
them. Ranks of one group agree on block numbers, since the leader's allocator gives them out.

What the leader owes: KV of a token is published only when every rank has written it, which the last all-reduce
of a step ensures; a sequence joins a step only after its pull has ended. Epochs and leases are those of the
first pool, which the leader created.

So a group's ranks share a host. A sink may also be made over some of the ranks, all stages of each: what a group over
several hosts would have on every one of them. A source needs all its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtpd.errors import InternalError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import PoolAddress, SharedPool


class RankPools:
    """`ranks[0]` is the control pool: its epochs and lease slots speak for all. Closing is the owner's."""

    def __init__(self, ranks: Sequence[SharedPool]) -> None:
        """Raises InternalError for pools that are not of one group."""
        self.ranks = tuple(ranks)
        self.control = self.ranks[0]
        self.layout: KVLayout = self.control.layout
        self.num_blocks = self.control.num_blocks
        self.by_rank = {(pool.address.tp_rank, pool.address.pp_rank): pool for pool in self.ranks}
        for pool in self.ranks:
            same = (pool.layout, pool.num_blocks, pool.address.generation)
            if same != (self.layout, self.num_blocks, self.control.address.generation):
                raise InternalError(f"pools of one group differ: {pool.address} beside {self.control.address}")
        if len(self.by_rank) != len(self.ranks):
            raise InternalError(f"two pools of one rank: {[pool.address.name for pool in self.ranks]}")

    @classmethod
    def of_group(cls, own: SharedPool, others: Sequence[PoolAddress]) -> RankPools:
        """The leader's own pool and those of its other ranks, which it maps writably. Raises TransferError."""
        attached: list[SharedPool] = []
        try:
            for address in others:
                attached.append(SharedPool.attach(address, own.layout, writable=True))
        except BaseException:
            for pool in attached:
                pool.close()
            raise
        return cls((own, *attached))

    def __iter__(self) -> Iterator[SharedPool]:
        return iter(self.ranks)

    @property
    def complete(self) -> bool:
        """Whether all ranks of the layout are here."""
        return len(self.ranks) == self.layout.tp * self.layout.pp

    @property
    def addresses(self) -> tuple[PoolAddress, ...]:
        return tuple(pool.address for pool in self.ranks)

    def bytes_per_block(self) -> int:
        """Bytes of one block over all ranks and layers that are here."""
        return sum(pool.grid[:, 0].nbytes for pool in self.ranks)

    def close_attached(self) -> None:
        """Unmaps the pools of other processes."""
        for pool in self.ranks[1:]:
            pool.close()
