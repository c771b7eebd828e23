"""The sink's end of NIXL: an agent per source, used by one thread.

An agent of its own, because ending it is the one way to be sure that a source that hangs writes nothing into our
blocks later: a transfer that was cancelled, or whose peer was removed, still arrives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from trtpd.errors import LayoutError, LeaseError, PeerGoneError, TransferError, TransferTimeoutError
from trtpd.kv_transfer.asks import Check, Open, Renew, Status
from trtpd.kv_transfer.nixl_agent import NixlAgent
from trtpd.kv_transfer.nixl_wire import Join, Leave, NixlAddress, Note, Ping, Push, pack_note, unpack_answer
from trtpd.kv_transfer.pool import Words
from trtpd.kv_transfer.puller import Interrupted
from trtpd.kv_transfer.ranks import RankPools

CONNECT_S = 10.0
ANSWER_S = 2.0
NAP_S = 100e-6
SPIN_S = 1.0
"""Of a write: so long UCX moves it on without a pause, since it moves only when called."""
PING_S = 0.1
GONE_S = 0.25


def never() -> bool:
    return False


class NixlLink:
    """Connects when first used, and again after it was closed. `name` is the source's in messages."""

    def __init__(
        self,
        address: NixlAddress,
        *,
        name: str,
        own_address: str,
        opening: Open,
        pools: RankPools,
        buffer: Words | None,
    ) -> None:
        """`buffer` is memory beside the pools that the source may write into."""
        self._address, self.name, self._own_address = address, name, own_address
        self._opening, self._pools, self.buffer = opening, pools, buffer
        self._agent: NixlAgent | None = None
        self._source = ""
        self._number = 0
        self._pinged_s = 0.0

    def connect(self) -> None:
        """Raises PeerGoneError if the source can't be reached, LeaseError, LayoutError, TransferError."""
        if self._agent is not None:
            return
        agent = NixlAgent(f"sink-{os.getpid()}-{os.urandom(6).hex()}", self._own_address)
        self._agent = agent
        try:
            agent.register([(pool.grid.ctypes.data, pool.kv_bytes) for pool in self._pools])
            if self.buffer is not None:
                agent.register([(self.buffer.ctypes.data, self.buffer.nbytes)])
            self._source = agent.add(self._address.metadata, who=self.name)
            join = Join(agent.metadata(memory=True), self._opening)
            status, _ = self._answer_to(self._send(join), time.monotonic() + CONNECT_S, never)
        except BaseException:
            self.close()
            raise
        if status is not Status.OK:
            self.close()
            raise self._refused(status)

    def _refused(self, status: Status) -> TransferError:
        if status is Status.OTHER_GENERATION:
            return LeaseError(f"{self.name} has restarted: its former offers are void")
        if status is Status.OTHER_LAYOUT:
            return LayoutError(f"{self.name} holds another layout than its offer says: rebuild both engines")
        return TransferError(f"{self.name} refused a request: {status.name.lower()}")

    def ask(self, request: Renew | Check, size_bytes: int, interrupted: Callable[[], bool]) -> bytes | None:
        """The answer, of exactly `size_bytes`; None if the source doesn't hold what it is asked about. Raises
        PeerGoneError, TransferError, Interrupted."""
        status, data = self._exchange(request, ANSWER_S, interrupted)
        if status is Status.NOT_HELD:
            return None
        if status is not Status.OK or len(data) != size_bytes:
            self.close()
            raise self._refused(status)
        return data

    def push(self, request: Push, *, timeout_s: float, interrupted: Callable[[], bool]) -> bool:
        """Has the source write. False if it doesn't hold that. Whatever is raised (as by `ask`), nothing is written
        into the blocks any more."""
        status, _ = self._exchange(request, timeout_s, interrupted)
        if status not in (Status.OK, Status.NOT_HELD):
            self.close()
            raise self._refused(status)
        return status is Status.OK

    def _exchange(
        self, request: Renew | Check | Push, timeout_s: float, interrupted: Callable[[], bool]
    ) -> tuple[Status, bytes]:
        self.connect()
        try:
            until_s, moves = time.monotonic() + timeout_s, isinstance(request, Push)
            return self._answer_to(self._send(request), until_s, interrupted, moves=moves)
        except BaseException:
            self.close()
            raise

    def _send(self, ask: Join | Leave | Ping | Renew | Check | Push) -> int:
        assert self._agent is not None
        self._number += 1
        try:
            self._agent.tell(self._source, pack_note(Note(self._address.token, self._number, ask)))
        except PeerGoneError as error:
            raise PeerGoneError(f"{self.name} has died: prefill the request elsewhere") from error
        return self._number

    def _answer_to(
        self, number: int, until_s: float, interrupted: Callable[[], bool], *, moves: bool = False
    ) -> tuple[Status, bytes]:
        """Waits for it; `moves` if KV comes with it. Pings all the while, since only sending shows that a peer has
        died."""
        assert self._agent is not None
        self._pinged_s = time.monotonic()
        spin_until_s = self._pinged_s + (SPIN_S if moves else 0.0)
        while True:
            for name, note in self._agent.notes():
                if name == self._source:
                    answered, status, data = unpack_answer(note)
                    if answered == number:
                        return status, data
            if interrupted():
                raise Interrupted
            now_s = time.monotonic()
            if now_s >= until_s:
                raise TransferTimeoutError(f"{self.name} does not answer: it hangs, or the network is cut")
            if now_s - self._pinged_s >= PING_S:
                self._send(Ping())
                self._pinged_s = now_s
            time.sleep(0.0 if now_s < spin_until_s else NAP_S)

    def gone(self) -> bool:
        """True if the source is known to be dead. Looks now and then."""
        now_s = time.monotonic()
        if self._agent is None or now_s - self._pinged_s < GONE_S:
            return False
        self._pinged_s = now_s
        try:
            self._send(Ping())
            self._agent.notes()
        except PeerGoneError:
            self.close()
            return True
        return False

    def close(self) -> None:
        if self._agent is None:
            return
        agent, self._agent = self._agent, None
        agent.close()
