"""Notices that the server of a run has gone, and ends the run: what would still come due has nobody to answer it."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from trtpd.perf.client import Client
from trtpd.perf.process_cpu import host_and_port
from trtpd.perf.transport import Arrived, Ending, Question, Transport

GONE_AFTER_S = 5.0
LOOK_EVERY_S = 0.5
CONNECT_TIMEOUT_S = 2.0


class WatchedTransport:
    """`inner`, whose requests are watched. When one fails, it is looked whether something still listens at the
    server's address; connections that were refused for GONE_AFTER_S, while no stream from before was alive, mean that
    the server has gone, and the client is interrupted. What is then under way has failed (`server_gone`).

    `patient`: a request that failed ends only when it is known whether a server is there, which is looked for no more
    often than every LOOK_EVERY_S. In a closed loop the users would else run through all of their requests in no time,
    while a server stops as well (then it answers, with errors).
    """

    def __init__(self, inner: Transport, listens: Callable[[], Awaitable[bool]], *, patient: bool = False) -> None:
        self.gone = False
        self._inner = inner
        self._listens = listens
        self._patient = patient
        self._client: Client | None = None
        self._numbers = itertools.count()
        self._live: dict[int, float] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")
        self._failed_s = 0.0
        self._away = False

    def watch(self, client: Client) -> None:
        """The client whose run this ends."""
        self._client = client

    @property
    def away_since_s(self) -> float | None:
        """When the server went, in seconds of the run: the first failure after which connections were refused to the
        end. None for one that is there."""
        if not self._away or self._client is None:
            return None
        return max(0.0, self._failed_s - self._client.began_s)

    async def open(self) -> None:
        """See Transport."""
        await self._inner.open()

    def prepare(self, question: Question) -> bytes:
        """See Transport."""
        return self._inner.prepare(question)

    async def send(self, request: bytes, arrived: Arrived) -> Ending:
        """See Transport."""
        number = next(self._numbers)
        self._live[number] = asyncio.get_running_loop().time()
        try:
            ending = await self._inner.send(request, arrived)
        except asyncio.CancelledError:
            if not self.gone:
                raise
            return Ending(state="failed", reason="server_gone", message="connections to the server are refused")
        finally:
            del self._live[number]
        if ending.state == "failed":
            looking = self._look()
            if self._patient:
                try:
                    await asyncio.wait([looking])
                except asyncio.CancelledError:
                    return ending  # whoever cancels it: this is how it ended
        return ending

    async def close(self) -> None:
        """See Transport. A look that is under way is brought to an end."""
        if self._looking is not None and not self._looking.done():
            self._looking.cancel()
            await asyncio.wait([self._looking])
            self._away = not await self._listens()
        await self._inner.close()

    def _look(self) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        if self._looking is None or self._looking.done():
            self._failed_s = loop.time()
            self._looking = loop.create_task(self._until_known())
        return self._looking

    async def _until_known(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._looked_s + LOOK_EVERY_S - loop.time()))
        while not await self._listens():
            self._away = True
            older = any(began_s < self._failed_s for began_s in self._live.values())
            if loop.time() - self._failed_s >= GONE_AFTER_S and not older and self._client is not None:
                self.gone = True
                self._client.interrupt()
                return
            await asyncio.sleep(LOOK_EVERY_S)
        self._away, self._looked_s = False, loop.time()


def listener(address: str) -> Callable[[], Coroutine[Any, Any, bool]]:
    """Looks whether anything listens at HOST:PORT or http://HOST:PORT. Raises InputError for what is neither."""
    host, port = host_and_port(address)
    return lambda: listens(host, port)


async def listens(host: str, port: int) -> bool:
    """False only where a connection is refused: what can't be known is not said to be gone."""
    loop = asyncio.get_running_loop()
    refused = False
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.sock_connect(probe, where)
            except ConnectionRefusedError:
                refused = True
            except OSError:
                continue
            else:
                return True
    return not refused
