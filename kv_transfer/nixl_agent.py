"""The NIXL library, as far as it is used here: imported when first needed, its errors translated in this file.

UCX is told (unless the environment says otherwise): on loopback, to use that device only, so that no port of ours is
open to others; never to write into a process's memory through the kernel (cma, knem) or a shared mapping (xpmem),
since such a writer, stopped in the midst and woken later, still writes when its reader has long given up. Elsewhere it
uses what the machine has, RDMA first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpd.errors import PeerGoneError, TransferError
from trtpd.kv_transfer.host import device_of, is_loopback

UCX_TLS = "^cma,knem,xpmem"
INSTALL = "pip install '.[nixl]' in trtpd's source folder (Linux on x86-64 or arm64)"

Pieces = npt.NDArray[np.uint64]
"""Rows of (address, bytes, 0)."""


def load() -> tuple[Any, Any]:
    """The library and its bindings. Raises TransferError where it isn't installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        from nixl_cu12 import _api, _bindings
    except ImportError as error:
        raise TransferError(f"transfer.path nixl needs NIXL, which is not here ({error}): {INSTALL}") from error
    logger = logging.getLogger("nixl")
    logger.handlers.clear()  # it would write to standard output
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return _api, _bindings


class NixlAgent:
    """One agent, used by one thread, which also drives it: without calls nothing moves."""

    def __init__(self, name: str, address: str) -> None:
        """`address` is this host's in the data network. Raises TransferError."""
        api, self._bindings = load()
        errors = [v for v in vars(self._bindings).values() if isinstance(v, type) and issubclass(v, Exception)]
        self._errors: tuple[type[Exception], ...] = (*errors, RuntimeError)
        self.name = name
        os.environ.setdefault("UCX_TLS", UCX_TLS)
        if is_loopback(address):
            os.environ.setdefault("UCX_NET_DEVICES", device_of(address))
        try:
            self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except self._errors as error:
            raise TransferError(
                f"NIXL can't start here ({error}); UCX_TLS={os.environ['UCX_TLS']}"
                f" UCX_NET_DEVICES={os.environ.get('UCX_NET_DEVICES', '')}"
            ) from error
        self._registered: list[Any] = []
        self._transfers: set[Any] = set()

    def register(self, areas: Iterable[tuple[int, int]]) -> None:
        """Makes memory, as (address, bytes), usable here and to peers who get `metadata`. Raises TransferError."""
        rows = [(address, size_bytes, 0, "") for address, size_bytes in areas]
        try:
            self._registered.append(self._agent.register_memory(rows, "DRAM"))
        except self._errors as error:
            raise TransferError(f"NIXL can't register {len(rows)} areas of KV: {error}") from error

    def metadata(self, *, memory: bool) -> bytes:
        """What a peer needs to reach this agent; with `memory`, also to write into what is registered."""
        if memory:
            return bytes(self._agent.get_agent_metadata())
        nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG)
        return bytes(self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True, backends=["UCX"]))

    def add(self, metadata: bytes, *, who: str) -> str:
        """Makes a peer known; its name. Raises PeerGoneError if it can't be reached."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise PeerGoneError(f"{who} can't be reached by NIXL: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """A peer that has left."""
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            return  # it was not known, or is cut off already

    def tell(self, name: str, note: bytes) -> None:
        """Sends a note. Raises PeerGoneError if the peer has died."""
        try:
            self._agent.send_notif(name, note)
        except self._errors as error:
            raise PeerGoneError(f"{name} is gone ({error})") from error

    def notes(self) -> list[tuple[str, bytes]]:
        """What peers have sent since; also drives everything under way."""
        try:
            notes = self._agent.get_new_notifs()
        except self._errors as error:
            raise TransferError(f"NIXL failed: {error}") from error
        return [(name, bytes(note)) for name, those in notes.items() for note in those]

    def write(self, name: str, of: Pieces, to: Pieces, note: bytes) -> Any:
        """Begins to write pieces into a peer's memory, who then gets the note. Raises PeerGoneError, TransferError."""
        agent = self._agent
        try:
            local, remote = agent.get_xfer_descs(of, "DRAM"), agent.get_xfer_descs(to, "DRAM")
            transfer = agent.initialize_xfer("WRITE", local, remote, name, note)
            agent.transfer(transfer)
        except self._bindings.nixlRemoteDisconnectError as error:
            raise PeerGoneError(f"{name} is gone ({error})") from error
        except self._errors as error:
            raise TransferError(f"NIXL can't write to {name}: {error}") from error
        self._transfers.add(transfer)
        return transfer

    def ended(self, transfer: Any) -> bool:
        """Whether a write is over, or has failed: its reader is told only of the first."""
        try:
            if self._agent.check_xfer_state(transfer) == "PROC":
                return False
        except self._errors:
            pass  # the reader has died, and needs no answer
        self._release(transfer)
        return True

    def _release(self, transfer: Any) -> None:
        self._transfers.discard(transfer)
        try:
            transfer.release()
        except self._errors:
            return  # the agent lets go of it at its end

    def close(self) -> None:
        """Ends the agent: from here on no peer writes into this process's memory through it. Idempotent."""
        if self._agent is None:
            return
        for transfer in list(self._transfers):
            self._release(transfer)
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except self._errors:
                continue
        self._registered.clear()
        self._agent = None
