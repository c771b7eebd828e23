"""What every socket of the control plane shares: addresses, keys, and a thread that owns the socket.

Keys are a folder: `router.key_secret` (router's host), `worker.key_secret` (workers' hosts), `router.key`
(both), `workers/*.key` (router's host: who may connect), `transfer.key_secret` (workers' hosts: who knows it may
pull KV). `make_keys` writes one for a deployment.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from trtpd.build.files import mend_of
from trtpd.errors import InputError, InternalError, ServeError, TrtpdError
from trtpd.runtime.worker.messages import LIMIT_BYTES

HIGH_WATER_MESSAGES = 20_000
PING_MS = 500
DEAF_MS = 2000
LINGER_MS = 500
IPC_PATH_LIMIT_BYTES = 107
MOST_PORT = 65535
TRANSFER_SECRET = "transfer.key_secret"
TRANSFER_SECRET_BYTES = 32
SECRETS = ("router.key_secret", "worker.key_secret", TRANSFER_SECRET)

Socket = zmq.Socket[bytes]


def is_local(address: str) -> bool:
    """Whether only this host can be at the other end."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str, keys: Path | None) -> None:
    """Raises ServeError for an address no socket of ours may use: unknown, too long, or open without keys."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if not rest or len(os.fsencode(rest)) > IPC_PATH_LIMIT_BYTES:
            raise ServeError(
                f"address {address!r}: the path must have 1 to {IPC_PATH_LIMIT_BYTES} bytes; "
                f"use a shorter run directory"
            )
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or (port.isdecimal() and int(port) <= MOST_PORT)):
        raise ServeError(f"address {address!r} is neither ipc://PATH nor tcp://HOST:PORT (a port is 0 to {MOST_PORT})")
    if keys is None and not is_local(address):
        raise ServeError(
            f"address {address!r} is not loopback and no keys were given: anyone could command the workers; "
            f"give a folder made by `trtpd keys` (--keys DIR), or use 127.0.0.1"
        )


def make_keys(folder: Path) -> None:
    """Writes CURVE keys for one deployment: the router's and the workers'. Raises ServeError if some
    exist."""
    if (folder / "router.key").exists():
        raise ServeError(f"{folder} holds keys already; remove them first, or use another folder")
    workers = folder / "workers"
    fresh = not folder.exists()
    try:
        workers.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        zmq.auth.create_certificates(folder, "router")
        public, _ = zmq.auth.create_certificates(folder, "worker")
        Path(public).rename(workers / "worker.key")
        (folder / TRANSFER_SECRET).write_text(secrets.token_hex(TRANSFER_SECRET_BYTES) + "\n")
        for name in SECRETS:
            (folder / name).chmod(0o600)
    except BaseException as error:
        _remove_keys(folder, whole=fresh)
        if not isinstance(error, OSError):
            raise
        raise ServeError(
            f"keys can't be written to {folder} ({error.strerror}); {mend_of(error, 'choose another folder with -o')}"
        ) from error


def _remove_keys(folder: Path, *, whole: bool) -> None:
    """What was made so far of keys that couldn't be made."""
    if whole:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for name in ("router.key", "worker.key", "workers/worker.key", *SECRETS):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def check_keys(keys: Path, *, router: bool, workers: bool) -> None:
    """Raises InputError for a folder that lacks what the router's or the workers' host needs of it."""
    needed = (["router.key_secret", "workers"] if router else []) + (
        ["worker.key_secret", "router.key", TRANSFER_SECRET] if workers else []
    )
    missing = [name for name in needed if not (keys / name).exists()]
    if missing:
        raise InputError(
            f"--keys {keys}: has no {', '.join(missing)}; make a folder of keys with `trtpd keys -o DIR` and copy it "
            "to each host"
        )


def transfer_secret(keys: Path | None) -> bytes:
    """What workers prove to know when KV leaves the host; nothing without keys. Raises ServeError."""
    if keys is None:
        return b""
    path = keys / TRANSFER_SECRET
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise ServeError(f"can't read the key {path}: {error}; `trtpd keys -o DIR` writes a folder of keys") from error
    if len(secret) < TRANSFER_SECRET_BYTES:
        raise ServeError(f"the key {path} has {len(secret)} bytes, it must have {TRANSFER_SECRET_BYTES} or more")
    return secret


def open_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    """A socket with our limits: bounded frames, bounded queues, a short linger, and no faith in a connection that is
    silent: once the network is back, TCP would keep one that was cut waiting for as long as the cut had lasted."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAF_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, DEAF_MS)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, LIMIT_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    return socket


def bind(socket: Socket, address: str, keys: Path | None) -> ThreadAuthenticator | None:
    """Binds; with `keys` only their workers get through, checked by the authenticator returned.

    The caller stops the authenticator at the end. Raises ServeError when the address is taken or can't be
    had.
    """
    check_address(address, keys)
    authenticator = None
    try:
        if keys is not None:
            public, secret = _certificate(keys / "router.key_secret")
            if not (keys / "workers").is_dir():
                raise ServeError(f"{keys} has no folder workers/ with the public keys that may connect")
            authenticator = ThreadAuthenticator(socket.context)
            authenticator.start()
            authenticator.configure_curve(domain="*", location=str(keys / "workers"))
            socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
        socket.bind(address)
    except zmq.ZMQError as error:
        if authenticator is not None:
            authenticator.stop()
        raise ServeError(f"can't listen on {address}: {error}; is another router or worker using it?") from error
    return authenticator


def connect(socket: Socket, address: str, keys: Path | None) -> None:
    """Dials; nothing is queued while there is no connection. Raises ServeError for a bad address or keys."""
    check_address(address, keys)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    try:
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey = _certificate(keys / "worker.key_secret")
            socket.curve_serverkey = _certificate(keys / "router.key", secret=False)[0]
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ServeError(f"can't dial {address}: {error}") from error


def send_now(socket: Socket, parts: Sequence[bytes]) -> None:
    """Sends without waiting; what can't go now is dropped (numbered messages are asked for again)."""
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return


def _certificate(path: Path, *, secret: bool = True) -> tuple[bytes, bytes]:
    try:
        public_key, secret_key = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ServeError(f"can't read the key {path}: {error}; `trtpd keys -o DIR` writes a folder of keys") from error
    if secret and secret_key is None:
        raise ServeError(f"{path} holds no secret key")
    return public_key, secret_key or b""


class SocketThread:
    """A thread that owns one socket: incoming frames, posted items and passing time go to three callables.

    They run in the thread. An exception in one of them stops it; `check` raises it in the caller's thread.
    """

    def __init__(
        self,
        socket: Socket,
        *,
        name: str,
        on_frames: Callable[[list[bytes]], None],
        on_item: Callable[[Any], None],
        on_time: Callable[[], float],
        on_failure: Callable[[], None],
        monitor: Callable[[int], None] | None = None,
    ) -> None:
        """`on_time` returns the seconds until it is to be called again; `monitor` gets the socket's
        events."""
        self._socket = socket
        self._on_frames = on_frames
        self._on_item = on_item
        self._on_time = on_time
        self._on_failure = on_failure
        self._monitor = monitor
        self._items: collections.deque[Any] = collections.deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, item: Any) -> None:
        """Hands an item to `on_item`. From any thread; returns at once. Nothing happens after `close`."""
        if self._stopping:
            return
        self._items.append(item)
        os.eventfd_write(self._bell, 1)

    def check(self) -> None:
        """Raises what stopped the thread, if anything did."""
        if self._failure is not None:
            if isinstance(self._failure, TrtpdError):
                raise self._failure
            raise InternalError(f"{self._thread.name} stopped: {self._failure!r}") from self._failure

    def close(self) -> None:
        """Sends what was posted, then ends the thread and closes the socket."""
        if not self._stopping:
            self._stopping = True
            os.eventfd_write(self._bell, 1)
            if self._thread.ident is not None:
                self._thread.join()
            self._socket.close()
            os.close(self._bell)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - kept for the owner, see check()
            self._failure = error
            self._on_failure()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        events = self._socket.get_monitor_socket() if self._monitor else None
        if events is not None:
            poller.register(events, zmq.POLLIN)
        wait_s = 0.0
        try:
            while not self._stopping or self._items:
                poller.poll(max(1, int(wait_s * 1000)))
                if events is not None:
                    self._read_monitor(events)
                self._read_socket()
                self._read_items()
                wait_s = self._on_time()
        finally:  # left open it would keep the context from ever ending
            if events is not None:
                self._socket.disable_monitor()
                events.close()

    def _read_socket(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)

    def _read_items(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        while self._items:
            self._on_item(self._items.popleft())

    def _read_monitor(self, events: Socket) -> None:
        assert self._monitor is not None
        while events.poll(0):
            parts = events.recv_multipart()
            self._monitor(int.from_bytes(parts[0][:2], "little"))
