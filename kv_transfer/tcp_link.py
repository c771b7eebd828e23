"""The sink's end of TCP: one connection to one source, used by one thread, with no wait that has no end."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from trtpd.errors import LayoutError, LeaseError, PeerGoneError, TransferError, TransferTimeoutError
from trtpd.kv_transfer.asks import Open, Status
from trtpd.kv_transfer.puller import Interrupted
from trtpd.kv_transfer.tcp_wire import (
    ANSWER_BYTES,
    GREETING_BYTES,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    REPLY,
    Request,
    TcpAddress,
    mac_of,
    pack_request,
    same,
)

CONNECT_S = 2.0
ANSWER_S = 2.0
LOOK_S = 0.05
RECEIVE_VIEWS = 512


def never() -> bool:
    return False


class TcpLink:
    """Connects when first used, and again after it was cut. `name` is the source's in messages."""

    def __init__(self, address: TcpAddress, *, name: str, generation: str, fingerprint: str, secret: bytes) -> None:
        self._address, self.name = address, name
        self._opening = Open(generation, fingerprint)
        self._key = secret + address.token
        self._sock: socket.socket | None = None
        self._requests = 0

    def connect(self) -> None:
        """Raises PeerGoneError if nobody of this generation listens there, LayoutError, TransferTimeoutError."""
        if self._sock is not None:
            return
        target = (self._address.host, self._address.port)
        try:
            self._sock = socket.create_connection(target, timeout=CONNECT_S)
        except TimeoutError as error:
            raise TransferTimeoutError(f"{self.name} at {target} can't be reached within {CONNECT_S} s") from error
        except OSError as error:
            raise PeerGoneError(f"{self.name} at {target} is not there: {error.strerror or error}") from error
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests = 0
        try:
            self._greet()
            self._open()
        except ConnectionError as error:
            self.close()
            raise PeerGoneError(f"{self.name} at {target} hung up: {error}") from error
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        until_s = time.monotonic() + CONNECT_S
        greeting = self._receive_bytes(GREETING_BYTES, until_s)
        if not greeting.startswith(MAGIC):
            raise TransferError(f"{self.name} speaks another protocol ({greeting[: len(MAGIC)]!r}): update it")
        source_nonce, sink_nonce = greeting[len(MAGIC) :], os.urandom(NONCE_BYTES)
        answer = MAGIC + sink_nonce + mac_of(self._key, b"sink", source_nonce, sink_nonce)
        assert len(answer) == ANSWER_BYTES
        self._send(answer, until_s)
        try:
            proof = self._receive_bytes(MAC_BYTES, until_s)
        except ConnectionError as error:
            raise PeerGoneError(
                f"{self.name} did not let this sink in: it has restarted, or the two have different keys"
            ) from error
        if not same(proof, mac_of(self._key, b"source", source_nonce, sink_nonce)):
            raise TransferError(f"who listens in place of {self.name} does not know the key: check the network")

    def _open(self) -> None:
        status, _ = self._exchange(self._opening, 0, time.monotonic() + CONNECT_S)
        if status is Status.OTHER_GENERATION:
            raise LeaseError(f"{self.name} has restarted: its former offers are void")
        if status is Status.OTHER_LAYOUT:
            raise LayoutError(f"{self.name} holds another layout than its offer says: rebuild both engines")

    def ask(self, request: Request, size_bytes: int = 0, interrupted: Callable[[], bool] = never) -> bytes | None:
        """The answer, of exactly `size_bytes`; None if the source doesn't hold what it is asked about. A connection
        that was cut meanwhile is made anew. Raises PeerGoneError, TransferError, Interrupted."""
        fresh = self._sock is None
        self.connect()
        until_s = time.monotonic() + ANSWER_S
        try:
            return self._held(*self._exchange(request, size_bytes, until_s, interrupted))
        except ConnectionError as error:
            self.close()
            if fresh:
                raise PeerGoneError(f"{self.name} has hung up: {error}") from error
            return self.ask(request, size_bytes, interrupted)

    def read(
        self,
        request: Request,
        batches: Iterable[Sequence[memoryview]],
        size_bytes: int,
        *,
        timeout_s: float,
        interrupted: Callable[[], bool],
        arrived: Callable[[int], None],
    ) -> bool:
        """Receives the answer into `batches` of views, which have `size_bytes` together; `arrived` is told each
        batch's number. False if the source doesn't hold it. Whatever is raised (PeerGoneError, TransferError,
        Interrupted), nothing is written into the views any more."""
        self.connect()
        until_s = time.monotonic() + timeout_s
        try:
            self._send(pack_request(request), until_s)
            status, announced = self._reply_header(until_s, interrupted)
            if self._held(status, b"") is None:
                return False
            if announced != size_bytes:
                raise TransferError(f"{self.name} sends {announced} bytes where {size_bytes} were asked for")
            for number, views in enumerate(batches):
                self._receive_into(list(views), until_s, interrupted)
                arrived(number)
            return True
        except ConnectionError as error:
            self.close()
            self._hung_up(error)
            raise AssertionError from error
        except BaseException:
            self.close()  # in the midst of an answer: the rest must not be taken for another
            raise

    def _hung_up(self, error: ConnectionError) -> None:
        """Tells a source that has died from a connection that was cut. Always raises."""
        self.connect()
        raise TransferError(f"the connection to {self.name} was cut ({error}): pull again") from error

    def _exchange(
        self, request: Request, size_bytes: int, until_s: float, interrupted: Callable[[], bool] = never
    ) -> tuple[Status, bytes]:
        try:
            self._send(pack_request(request), until_s)
            status, announced = self._reply_header(until_s, interrupted)
            if announced != (size_bytes if status is Status.OK else 0):
                raise TransferError(f"{self.name} answers with {announced} bytes, not {size_bytes}")
            return status, self._receive_bytes(announced, until_s)
        except (TransferError, Interrupted):
            self.close()  # its answer may still come, and must not be taken for another
            raise

    def _held(self, status: Status, data: bytes) -> bytes | None:
        if status is Status.NOT_HELD:
            return None
        if status is not Status.OK:
            raise TransferError(f"{self.name} refused a request: {status.name.lower()}")
        return data

    def _reply_header(self, until_s: float, interrupted: Callable[[], bool]) -> tuple[Status, int]:
        number, status, size_bytes = REPLY.unpack(self._receive_bytes(REPLY.size, until_s, interrupted))
        expected, self._requests = self._requests, self._requests + 1
        if number != expected or status not in set(Status):
            raise TransferError(f"{self.name} answered out of order ({number}, {status})")
        return Status(status), size_bytes

    def gone(self) -> bool:
        """True if the source has hung up and can't be reached again. Takes no longer than a connect."""
        if self._sock is None or not _hangs_up(self._sock):
            return False
        self.close()
        try:
            self.connect()
        except (PeerGoneError, LeaseError):
            return True
        except TransferError:
            return False
        return False

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _send(self, data: bytes, until_s: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(select.POLLOUT, until_s, never)
            assert self._sock is not None
            view = view[self._sock.send(view) :]

    def _receive_bytes(self, size_bytes: int, until_s: float, interrupted: Callable[[], bool] = never) -> bytes:
        buffer = bytearray(size_bytes)
        if size_bytes:
            self._receive_into([memoryview(buffer)], until_s, interrupted)
        return bytes(buffer)

    def _receive_into(self, views: list[memoryview], until_s: float, interrupted: Callable[[], bool]) -> None:
        assert self._sock is not None
        at = 0
        while at < len(views):
            try:
                count = self._sock.recvmsg_into(views[at : at + RECEIVE_VIEWS])[0]
            except BlockingIOError:
                self._wait(select.POLLIN, until_s, interrupted)
                continue
            if interrupted():
                raise Interrupted
            if count == 0:
                raise ConnectionResetError("end of stream")
            while at < len(views) and count >= len(views[at]):
                count -= len(views[at])
                at += 1
            if count:
                views[at] = views[at][count:]

    def _wait(self, events: int, until_s: float, interrupted: Callable[[], bool]) -> None:
        assert self._sock is not None
        poll = select.poll()
        poll.register(self._sock, events)
        while not poll.poll(LOOK_S * 1000):
            if interrupted():
                raise Interrupted
            if time.monotonic() >= until_s:
                raise TransferTimeoutError(f"{self.name} does not answer: it hangs, or the network is cut")


def _hangs_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
