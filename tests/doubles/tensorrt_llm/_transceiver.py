"""The stand-in for UCX: KV really moves from one process to another, head by head over all ranks of both groups.

A context executor's leader listens on loopback. A fetch names a request and gets its KV whole, or is hung up on: the
real ones know no error either. TRTPD_DOUBLE_FAULTS names a file of JSON; what it says is done while it says it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtpd.kv_transfer.ranks import RankPools
from trtpd.runtime.engine.base import Key, PagedKV


def fault(name: str) -> Any:
    """What the faults file says of `name` now: hold_fetches (seconds), drop_fetches."""
    path = os.environ.get("TRTPD_DOUBLE_FAULTS")
    try:
        return json.loads(Path(path).read_text()).get(name) if path else None
    except (OSError, ValueError):
        return None


class FetchError(Exception):
    """The KV didn't come."""


@dataclass
class Held:
    """KV of a context request. `busy`: a fetch is copying it. `fetched`: it has gone out whole."""

    key: Key
    blocks: tuple[int, ...]
    tokens: int
    since_s: float
    busy: bool = False
    fetched: bool = False


class Transceiver:
    """Both ends: serves what this executor holds, and fetches what others hold."""

    def __init__(self, kv: PagedKV) -> None:
        self._pools = RankPools.of_group(kv.pool, kv.others)
        self._layout = kv.layout
        self._secret = secrets.token_hex(8)
        self._held: dict[int, Held] = {}
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open = True
        self._serving: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, name="transceiver", daemon=True)
        self._thread.start()

    def state(self) -> bytes:
        """The opaque state: where this executor listens, and how its cache is laid out."""
        host, port = self._socket.getsockname()
        return json.dumps({"host": host, "port": port, "secret": self._secret, "cache": self._cache()}).encode()

    def _cache(self) -> dict[str, Any]:
        layout = self._layout
        return {
            "layers": layout.num_layers, "heads": layout.kv_heads, "size": layout.head_dim,
            "tokens": layout.tokens_per_block, "dtype": layout.dtype, "tp": layout.tp,
        }  # fmt: skip

    def hold(self, request_id: int, held: Held) -> None:
        with self._lock:
            self._held[request_id] = held

    def let_go(self, request_id: int) -> bool:
        """Forgets a hold; False while a fetch copies it."""
        with self._lock:
            held = self._held.get(request_id)
            if held is not None and held.busy:
                return False
            self._held.pop(request_id, None)
            return True

    def held(self) -> dict[int, Held]:
        with self._lock:
            return dict(self._held)

    def check(self, state: bytes) -> dict[str, Any]:
        """What a peer's state says. Raises FetchError for one that can't pair."""
        try:
            found: dict[str, Any] = json.loads(state)
            theirs = found["cache"]
        except (ValueError, KeyError, TypeError) as error:
            raise FetchError("the data transceiver state can't be deserialised") from error
        ours = self._cache()
        if any(theirs.get(name) != ours[name] for name in ours if name != "tp"):
            raise FetchError(f"Disaggregated server does not support cacheState {theirs} with {ours}")
        for tp in (theirs["tp"], ours["tp"]):
            if tp & (tp - 1):
                raise FetchError(f"TP size must be a power of two, not {tp}")
        return found

    def fetch(
        self, state: bytes, request_id: int, blocks: Sequence[int], tokens: int, *, stop: Callable[[], bool]
    ) -> None:
        """Copies a peer's KV into `blocks` of every rank here. Raises FetchError."""
        found = self.check(state)
        try:
            with socket.create_connection((found["host"], found["port"]), timeout=2) as peer:
                peer.settimeout(0.1)
                peer.sendall(
                    json.dumps({"secret": found["secret"], "id": request_id, "tokens": tokens}).encode() + b"\n"
                )
                shape = (2 * self._layout.num_layers, len(blocks), *self._block_shape())
                whole = np.empty(shape, self._pools.control.keys[0].dtype)
                _read_into(peer, memoryview(whole.data).cast("B"), stop)
        except OSError as error:
            raise FetchError(f"the connection to the context executor was lost ({error})") from error
        for pool in self._pools:
            heads = self._layout.rank_heads(pool.address.tp_rank)
            for index, array in enumerate(_arrays(pool)):
                array[list(blocks)] = whole[index, :, heads.start : heads.stop]

    def _block_shape(self) -> tuple[int, int, int]:
        return (self._layout.kv_heads, self._layout.tokens_per_block, self._layout.head_dim)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._serving.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            peer.settimeout(10)
            try:
                asked = json.loads(peer.makefile("rb").readline())
                self._send(peer, asked)
            except (OSError, ValueError, KeyError):
                return

    def _send(self, peer: socket.socket, asked: dict[str, Any]) -> None:
        began_s = time.monotonic()
        while self._open and time.monotonic() - began_s < float(fault("hold_fetches") or 0):
            time.sleep(0.02)
        if asked["secret"] != self._secret or fault("drop_fetches"):
            return
        with self._lock:
            held = self._held.get(asked["id"])
            if held is None or held.busy or held.fetched or held.tokens != asked["tokens"]:
                return
            held.busy = True
        try:
            peer.sendall(self._whole(held.blocks))
            held.fetched = True
        finally:
            held.busy = False

    def _whole(self, blocks: tuple[int, ...]) -> memoryview:
        shape = (2 * self._layout.num_layers, len(blocks), *self._block_shape())
        whole = np.empty(shape, self._pools.control.keys[0].dtype)
        for pool in self._pools:
            heads = self._layout.rank_heads(pool.address.tp_rank)
            for index, array in enumerate(_arrays(pool)):
                whole[index, :, heads.start : heads.stop] = array[list(blocks)]
        return memoryview(whole.data).cast("B")

    def close(self) -> None:
        self._open = False
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for thread in self._serving:
            thread.join()
        self._pools.close_attached()


def _arrays(pool: Any) -> list[Any]:
    return [array for pair in zip(pool.keys, pool.values, strict=True) for array in pair]


def _read_into(peer: socket.socket, into: memoryview, stop: Callable[[], bool]) -> None:
    """The real receiver waits for ever; this one until its executor ends the request."""
    done = 0
    while done < len(into):
        if stop():
            raise FetchError("the request was ended while it waited for its KV")
        try:
            count = peer.recv_into(into[done:])
        except TimeoutError:
            continue
        if not count:
            raise FetchError("the context executor hung up")
        done += count
