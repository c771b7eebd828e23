"""The source's end of TCP: one thread that serves blocks of the pools of all ranks to those who may have them.

Bytes go from the pool's file to the socket (sendfile): the kernel sends the pool's own pages. A connection has at most
one request in work and no buffer that grows, there are at most so many connections, and one that doesn't move in time
is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trtpd.errors import InternalError, TransferError
from trtpd.kv_transfer.asks import Check, Open, Renew, Status
from trtpd.kv_transfer.grants import Grant, Grants
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.tcp_wire import (
    ANSWER_BYTES,
    GREETING_BYTES,
    LENGTH,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    REPLY,
    REQUEST_LIMIT_BYTES,
    Read,
    Request,
    mac_of,
    same,
    unpack_request,
)

log = logging.getLogger("trtpd.kv_transfer")

STRANGERS_LIMIT = 16
PEERS_LIMIT = 256
GREETING_S = 3.0
STALL_S = 30.0
SWEEP_S = 0.5
SEND_BYTES = 8 << 20
"""What one connection is sent before others get their turn."""


class Extent:
    """Bytes of a pool's file that are still to be sent."""

    __slots__ = ("at", "fd", "left")

    def __init__(self, fd: int, at: int, left: int) -> None:
        self.fd, self.at, self.left = fd, at, left


class _Connection:
    """One peer. What it waits for is in `inbox` and `wanted`; what it is sent is `head`, then `extent`, then `more`."""

    def __init__(self, sock: socket.socket, now_s: float) -> None:
        self.sock = sock
        self.nonce = os.urandom(NONCE_BYTES)
        self.known = False
        self.opened = False
        self.requests = 0
        self.inbox = bytearray()
        self.wanted = ANSWER_BYTES
        self.head = bytearray(MAGIC + self.nonce)
        self.extent: Extent | None = None
        self.more: Iterator[Extent] = iter(())
        self.moved_s = now_s

    @property
    def sending(self) -> bool:
        return bool(self.head) or self.extent is not None

    def reply(self, status: Status, data: bytes = b"") -> None:
        self._reply(status, len(data))
        self.head += data

    def reply_from(self, extents: Iterator[Extent], size_bytes: int) -> None:
        """OK, with that many bytes of pools."""
        self._reply(Status.OK, size_bytes)
        self.more, self.extent = extents, next(extents)

    def _reply(self, status: Status, size_bytes: int) -> None:
        self.head += REPLY.pack(self.requests, status, size_bytes)
        self.requests += 1

    def send(self) -> int:
        """Sends some of what there is, as far as the socket takes it at once; the bytes. Raises OSError."""
        if self.head:
            count = self.sock.send(self.head, socket.MSG_MORE if self.extent is not None else 0)
            del self.head[:count]
            return count
        assert self.extent is not None
        extent = self.extent
        count = os.sendfile(self.sock.fileno(), extent.fd, extent.at, extent.left)
        if count == 0:
            raise OSError(f"the pool's file ends before byte {extent.at + extent.left}")
        extent.at, extent.left = extent.at + count, extent.left - count
        if not extent.left:
            self.extent = next(self.more, None)
        return count


class TcpServer:
    """Listens, and answers from a thread until `close`. `clock` is the source's; `counters` only grow."""

    def __init__(self, pools: RankPools, grants: Grants, *, host: str, key: bytes, clock: Callable[[], float]) -> None:
        """Raises TransferError if it can't listen there."""
        self._pools, self._grants, self._key, self._clock = pools, grants, key, clock
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise TransferError(
                f"can't listen on {host}: {error}; set transfer.listen to an address of this host"
            ) from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.counters = {"accepted": 0, "strangers": 0, "stalled": 0, "bad_requests": 0}
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._closing = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and every connection. What the kernel has taken over by then it may still send; pages that
        have changed meanwhile are found out by their reader, as always, by epoch."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._bell)

    def check(self) -> None:
        """Raises InternalError if a bug of ours has ended the thread."""
        if self._broken is not None:
            raise InternalError(f"the thread that serves KV over TCP has ended: {self._broken!r}") from self._broken

    def _run(self) -> None:
        try:
            self._serve_all()
        except Exception as error:  # noqa: BLE001 - the thread's end: `check` tells whoever relies on it
            self._broken = error

    def _serve_all(self) -> None:
        sweep_s = time.monotonic() + SWEEP_S
        while not self._closing:
            for event, ready in self._selector.select(SWEEP_S):
                if event.fileobj is self._listener:
                    self._accept()
                elif event.data is not None:
                    self._serve(event.data, ready)
            if (now_s := time.monotonic()) >= sweep_s:
                self._sweep(now_s)
                sweep_s = now_s + SWEEP_S

    def _serve(self, connection: _Connection, ready: int) -> None:
        """Moves one connection on. Whatever is wrong with it, the others don't notice."""
        try:
            if ready & selectors.EVENT_WRITE:
                self._send(connection)
            elif ready & selectors.EVENT_READ:
                self._receive(connection)
        except TransferError as error:
            self.counters["bad_requests" if connection.known else "strangers"] += 1
            log.warning("a connection to the KV port was dropped: %s", error)
            self._drop(connection)
        except OSError:
            self._drop(connection)  # the peer is gone: it notices by itself
        except Exception:
            log.exception("a bug in serving KV over TCP: the connection is dropped")
            self._drop(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.counters["accepted"] += 1
            connection = _Connection(sock, time.monotonic())
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_WRITE, connection)
            self._make_room()

    def _make_room(self) -> None:
        """Too many strangers: the oldest goes. Too many peers: the one that has been idle longest."""
        for known, limit in ((False, STRANGERS_LIMIT), (True, PEERS_LIMIT)):
            alike = [connection for connection in self._connections if connection.known is known]
            if len(alike) > limit:
                self.counters["strangers"] += not known
                self._drop(min(alike, key=lambda connection: connection.moved_s))

    def _sweep(self, now_s: float) -> None:
        for connection in list(self._connections):
            idle_s = now_s - connection.moved_s
            if not connection.known and idle_s > GREETING_S:
                self.counters["strangers"] += 1
                self._drop(connection)
            elif connection.sending and idle_s > STALL_S:
                self.counters["stalled"] += 1
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _send(self, connection: _Connection) -> None:
        sent_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while connection.sending and sent_bytes < SEND_BYTES:
                sent_bytes += connection.send()
        connection.moved_s = time.monotonic() if sent_bytes else connection.moved_s
        if not connection.sending:
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.sock.recv(connection.wanted - len(connection.inbox))
        if not data:
            self._drop(connection)
            return
        connection.inbox += data
        if connection.known:
            connection.moved_s = time.monotonic()
        if len(connection.inbox) < connection.wanted:
            return
        message = bytes(connection.inbox)
        if not connection.known:
            self._greet(connection, message)
        elif len(message) == LENGTH.size:
            connection.wanted = LENGTH.size + _length(message)
            return
        else:
            self._answer(connection, unpack_request(message[LENGTH.size :]))
        connection.inbox.clear()
        connection.wanted = LENGTH.size
        if connection.sending:
            self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)

    def _greet(self, connection: _Connection, answer: bytes) -> None:
        """Raises TransferError for a stranger."""
        magic, nonce, mac = answer[: len(MAGIC)], answer[len(MAGIC) : GREETING_BYTES], answer[GREETING_BYTES:]
        if magic != MAGIC:
            raise TransferError(f"a stranger spoke {magic!r} there")
        if len(mac) != MAC_BYTES or not same(mac, mac_of(self._key, b"sink", connection.nonce, nonce)):
            raise TransferError("a peer has another key, or the offer of a process that was here before")
        connection.known = True
        connection.head += mac_of(self._key, b"source", connection.nonce, nonce)

    def _answer(self, connection: _Connection, request: Request) -> None:
        """Raises TransferError for a request that no peer of this version makes."""
        if isinstance(request, Open):
            connection.reply(self._open(request))
            connection.opened = True
            return
        if not connection.opened:
            raise TransferError("a peer asked before it had opened")
        key = (request.request_id, request.attempt)
        if isinstance(request, Renew):
            connection.reply(Status.OK if self._grants.renew(key, self._clock()) else Status.NOT_HELD)
            return
        grant = self._grants.held(key)
        if grant is None:
            connection.reply(Status.NOT_HELD)
        elif isinstance(request, Check):
            epochs = np.array(self._pools.control.epochs_of(grant.blocks), "<u8").tobytes()
            connection.reply(Status.OK, epochs)
        else:
            connection.reply_from(*self._read(request, grant))

    def _open(self, request: Open) -> Status:
        control = self._pools.control
        if request.generation != control.address.generation:
            return Status.OTHER_GENERATION
        return Status.OK if request.fingerprint == control.layout.fingerprint else Status.OTHER_LAYOUT

    def _read(self, request: Read, grant: Grant) -> tuple[Iterator[Extent], int]:
        """Where the bytes lie, and how many. Raises TransferError for what is not the hold's."""
        pool = self._pools.by_rank.get((request.tp_rank, request.pp_rank))
        if pool is None:
            raise TransferError(f"a peer asked for rank {request.tp_rank}.{request.pp_rank}, which is not here")
        arrays, _, heads, _ = pool.cells.shape
        fits = request.first_array < request.end_array <= arrays and request.first_head < request.end_head <= heads
        blocks = sum(count for _, count in request.runs)
        within = 0 < blocks <= len(grant.blocks) and all(
            block in grant.allowed for first, count in request.runs for block in range(first, first + count)
        )
        if not fits or not within:
            raise TransferError(f"a peer asked for KV outside of request {request.request_id}")
        head_bytes = pool.cells[0, 0, 0].nbytes
        size_bytes = blocks * (request.end_array - request.first_array)
        size_bytes *= (request.end_head - request.first_head) * head_bytes
        spans = spans_of(request.runs, range(request.first_head, request.end_head), heads, head_bytes)
        places = (pool.place_of(array) for array in range(request.first_array, request.end_array))
        return (Extent(fd, at + s.start, s.stop - s.start) for fd, at in places for s in spans), size_bytes


def spans_of(runs: Sequence[tuple[int, int]], part: range, heads: int, head_bytes: int) -> list[slice]:
    """Where the bytes of some heads lie within an array of `heads` heads: one span per run if they are all of
    them, else one per block."""
    spans = []
    for first, count in runs:
        whole = len(part) == heads
        for block, blocks in [(first, count)] if whole else [(first + i, 1) for i in range(count)]:
            start = (block * heads + part.start) * head_bytes
            spans.append(slice(start, start + (blocks * heads if whole else len(part)) * head_bytes))
    return spans


def _length(message: bytes) -> int:
    (length,) = LENGTH.unpack(message)
    if not 0 < length <= REQUEST_LIMIT_BYTES:
        raise TransferError(f"a peer announced a request of {length} bytes")
    return int(length)
