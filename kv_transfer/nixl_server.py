"""The source's end of NIXL: one thread with an agent, which answers asks and writes KV into the memory of sinks.

The source writes and the sink never reads. Over a network without RDMA a read is emulated by the process that is
read from, and UCX ends that process when the reader dies in the midst: a dead decode would take its prefill along.
A writer whose reader dies gets an error.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtpd.errors import InternalError, PeerGoneError, TransferError
from trtpd.kv_transfer.asks import Check, Renew, Status
from trtpd.kv_transfer.grants import Grant, Grants
from trtpd.kv_transfer.nixl_agent import NixlAgent, Pieces
from trtpd.kv_transfer.nixl_wire import Join, Leave, Note, Ping, Push, pack_answer, unpack_note
from trtpd.kv_transfer.ranks import RankPools

log = logging.getLogger("trtpd.kv_transfer")

START_S = 30.0
PEERS_LIMIT = 256
WRITES_LIMIT = 4
BUSY_NAP_S = 50e-6
IDLE_NAP_S = 2e-3
BUSY_S = 0.05
SPIN_S = 1.0
"""A write moves only when NIXL is called. One that takes longer than this goes to a sink that stands still, or over a
network that is slower than any nap."""


@dataclass(slots=True)
class _Peer:
    """A sink that has joined. `writes` are under way."""

    heard_s: float
    writes: list[Any] = field(default_factory=list)


class NixlServer:
    """Answers from a thread until `close`. `clock` is the source's; `counters` only grow."""

    def __init__(
        self,
        pools: RankPools,
        grants: Grants,
        *,
        name: str,
        address: str,
        token: bytes,
        clock: Callable[[], float],
    ) -> None:
        """Raises TransferError if NIXL can't be had."""
        self._pools, self._grants, self._token, self._clock = pools, grants, token, clock
        self._name, self._address = name, address
        self._peers: dict[str, _Peer] = {}
        self._wrote_s = 0.0
        self.counters = {"joined": 0, "strangers": 0, "bad_asks": 0, "lost": 0}
        self.metadata = b""
        self._failure: TransferError | None = None
        self._broken: Exception | None = None
        self._started = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise TransferError(f"NIXL did not start within {START_S} s")
        self.check()

    def close(self) -> None:
        """Ends the thread and its agent. No byte of a pool is read after it has returned."""
        self._closing = True
        self._thread.join()

    def check(self) -> None:
        """Raises TransferError if NIXL has failed, InternalError if a bug of ours has ended the thread."""
        if self._failure is not None:
            raise self._failure
        if self._broken is not None:
            raise InternalError(f"the thread that serves KV over NIXL has ended: {self._broken!r}") from self._broken

    def _run(self) -> None:
        try:
            agent = NixlAgent(self._name, self._address)
        except TransferError as error:
            self._failure = error
            self._started.set()
            return
        try:
            agent.register([(pool.grid.ctypes.data, pool.kv_bytes) for pool in self._pools])
            self.metadata = agent.metadata(memory=False)
            self._started.set()
            self._serve(agent)
        except TransferError as error:
            self._failure = error
            self._started.set()
            log.error("NIXL has failed: nothing is sent over it any more: %s", error)
        except Exception as error:  # noqa: BLE001 - the thread's end: `check` tells whoever relies on it
            self._broken = error
            self._started.set()
        finally:
            agent.close()

    def _serve(self, agent: NixlAgent) -> None:
        """NIXL has nothing to wait on, so this looks often while there is work, and seldom when there is none."""
        active_s = time.monotonic()
        while not self._closing:
            notes = agent.notes()
            for name, data in notes:
                self._hear(agent, name, data)
            writing = self._tend_writes(agent)
            now_s = time.monotonic()
            active_s = now_s if notes or writing else active_s
            if writing and now_s - self._wrote_s < SPIN_S:
                time.sleep(0.0)
            else:
                time.sleep(BUSY_NAP_S if now_s - active_s < BUSY_S else IDLE_NAP_S)

    def _tend_writes(self, agent: NixlAgent) -> bool:
        for peer in self._peers.values():
            peer.writes = [write for write in peer.writes if not agent.ended(write)]
        return any(peer.writes for peer in self._peers.values())

    def _hear(self, agent: NixlAgent, name: str, data: bytes) -> None:
        try:
            note = unpack_note(data)
            if not hmac.compare_digest(note.token, self._token):
                raise TransferError("it does not know the token")
        except TransferError as error:
            self.counters["strangers"] += 1
            log.warning("a note to the KV source from %r was dropped: %s", name[:80], error)
            return
        try:
            self._answer(agent, name, note)
        except PeerGoneError:
            self.counters["lost"] += 1
            self._forget(agent, name)
        except TransferError as error:
            self.counters["bad_asks"] += 1
            log.warning("an ask of %r was refused: %s", name[:80], error)
            self._tell(agent, name, pack_answer(note.number, Status.BAD_REQUEST))

    def _tell(self, agent: NixlAgent, name: str, answer: bytes) -> None:
        """An answer to one that has gone meanwhile is not needed."""
        try:
            agent.tell(name, answer)
        except PeerGoneError:
            self._forget(agent, name)

    def _answer(self, agent: NixlAgent, name: str, note: Note) -> None:
        ask = note.ask
        if isinstance(ask, Join):
            agent.tell(name, pack_answer(note.number, self._join(agent, name, ask)))
            return
        peer = self._peers.get(name)
        if peer is None:
            raise PeerGoneError(f"{name} has not joined")
        peer.heard_s = time.monotonic()
        if isinstance(ask, Leave):
            self._forget(agent, name)
        elif not isinstance(ask, Ping):
            self._answer_for(agent, name, peer, note)

    def _answer_for(self, agent: NixlAgent, name: str, peer: _Peer, note: Note) -> None:
        """What concerns one hold."""
        ask = note.ask
        assert isinstance(ask, Renew | Check | Push)
        key = (ask.request_id, ask.attempt)
        grant = self._grants.held(key)
        if grant is None or (isinstance(ask, Renew) and not self._grants.renew(key, self._clock())):
            agent.tell(name, pack_answer(note.number, Status.NOT_HELD))
        elif isinstance(ask, Renew):
            agent.tell(name, pack_answer(note.number, Status.OK))
        elif isinstance(ask, Check):
            epochs = np.array(self._pools.control.epochs_of(grant.blocks), "<u8").tobytes()
            agent.tell(name, pack_answer(note.number, Status.OK, epochs))
        else:
            of, to = self._pieces(ask, grant)
            if len(peer.writes) >= WRITES_LIMIT:
                raise TransferError(f"{len(peer.writes)} writes are under way")
            self._wrote_s = time.monotonic()
            peer.writes.append(agent.write(name, of, to, pack_answer(note.number, Status.OK)))

    def _join(self, agent: NixlAgent, name: str, ask: Join) -> Status:
        control = self._pools.control
        known = agent.add(ask.metadata, who=name)
        if known != name:
            agent.forget(known)
            raise TransferError(f"it gives the address of {known[:80]!r}")
        if len(self._peers) >= PEERS_LIMIT:
            self._forget(agent, min(self._peers, key=lambda peer: self._peers[peer].heard_s))
        self._peers[name] = _Peer(time.monotonic())
        self.counters["joined"] += 1
        if ask.opening.generation != control.address.generation:
            return Status.OTHER_GENERATION
        return Status.OK if ask.opening.fingerprint == control.layout.fingerprint else Status.OTHER_LAYOUT

    def _forget(self, agent: NixlAgent, name: str) -> None:
        self._peers.pop(name, None)
        agent.forget(name)

    def _pieces(self, ask: Push, grant: Grant) -> tuple[Pieces, Pieces]:
        """What to write from where to where. Raises TransferError for what is not the hold's."""
        pool = self._pools.by_rank.get((ask.tp_rank, ask.pp_rank))
        if pool is None:
            raise TransferError(f"rank {ask.tp_rank}.{ask.pp_rank} is not here")
        arrays, _, heads, _ = pool.cells.shape
        fits = ask.first_array < ask.end_array <= arrays and ask.first_head < ask.end_head <= heads
        blocks = sum(count for _, _, count in ask.runs)
        within = 0 < blocks <= len(grant.blocks) and all(
            block in grant.allowed for first, _, count in ask.runs for block in range(first, first + count)
        )
        if not fits or not within or len(ask.into) != ask.end_array - ask.first_array:
            raise TransferError(f"it asks for KV outside of request {ask.request_id}")
        head_bytes = pool.cells[0, 0, 0].nbytes
        wide = ask.end_head - ask.first_head
        whole = wide == heads and ask.stride_bytes == heads * head_bytes
        spans = [
            (block, sink + block - first, count if whole else 1)
            for first, sink, count in ask.runs
            for block in ([first] if whole else range(first, first + count))
        ]
        source, sink, count = np.array(spans, np.uint64).T
        of_base = pool.grid.ctypes.data + np.arange(ask.first_array, ask.end_array) * pool.grid.strides[0]
        of = _addresses(of_base + ask.first_head * head_bytes, source, heads * head_bytes)
        to = _addresses(np.array(ask.into, np.uint64), sink, ask.stride_bytes)
        sizes = np.tile(count * np.uint64(wide * head_bytes), len(ask.into))
        nothing = np.zeros_like(sizes)
        return np.stack([of, sizes, nothing], 1), np.stack([to, sizes, nothing], 1)


def _addresses(bases: Any, blocks: Pieces, stride_bytes: int) -> Pieces:
    """Of every block in every array, arrays first."""
    found: Pieces = (bases.astype(np.uint64)[:, None] + blocks[None, :] * np.uint64(stride_bytes)).reshape(-1)
    return found
