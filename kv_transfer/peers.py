"""Pools of other processes that a sink has mapped."""

from __future__ import annotations

import threading

from trtpd.errors import LayoutError, LeaseError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import PoolAddress, SharedPool

WARM_STEP_BYTES = 16 << 20


class Peer:
    """A mapped pool. `users` pulls read it; it stays mapped as long as there are any."""

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self.users = 0
        self.warmed_bytes = 0


class PeerPools:
    """Mapped pools by (name, generation), dropped when their file or process is gone: a dead peer's memory is
    not freed by the system while it is mapped here. Thread-safe."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, str], Peer] = {}
        self._lock = threading.Lock()

    def get(self, address: PoolAddress, layout: KVLayout) -> Peer:
        """Maps the pool if that is new. Raises LayoutError, LeaseError, TransferError."""
        with self._lock:
            peer = self._peers.get((address.name, address.generation))
            if peer is None:
                self._drop_gone()
                peer = Peer(SharedPool.attach(address, layout))
                self._peers[address.name, address.generation] = peer
            elif (peer.pool.address, peer.pool.layout) != (address, layout):
                raise LayoutError(f"KV pool {address.name} is mapped as {peer.pool.layout}, offered as {layout}")
            return peer

    def use(self, peer: Peer) -> None:
        """Keeps it mapped until as many `leave`. Raises LeaseError if it was dropped since `get`."""
        with self._lock:
            if peer not in self._peers.values():
                raise LeaseError(f"KV pool {peer.pool.address.name} is gone: its process has ended")
            peer.users += 1

    def leave(self, peer: Peer) -> None:
        with self._lock:
            peer.users -= 1

    def tend(self) -> bool:
        """Drops what is gone, or else maps in some pages of a pool that is not warm yet; False if all are."""
        with self._lock:
            self._drop_gone()
            for peer in self._peers.values():
                if peer.warmed_bytes < peer.pool.kv_bytes:
                    peer.warmed_bytes = peer.pool.warm(peer.warmed_bytes, WARM_STEP_BYTES)
                    return True
            return False

    def _drop_gone(self) -> None:
        for key, peer in list(self._peers.items()):
            if not peer.users and peer.pool.gone():
                del self._peers[key]
                peer.pool.close()

    def close(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.pool.close()
            self._peers.clear()
