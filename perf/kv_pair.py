"""A source of KV in a process of its own and a sink in this one, to measure hand-offs between them.

python -m trtpd.perf.kv_pair SETUP    (made by KVPair: serves one command per line of standard input)
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec

from trtpd.errors import CapacityError, TrtpdError
from trtpd.kv_transfer.base import PullResult, TransferSettings
from trtpd.kv_transfer.factory import make_sink, make_source
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.kv_transfer.pool import SharedPool
from trtpd.kv_transfer.ranks import RankPools

WAIT_S = 120.0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the source's process is made of. `digest_every` as in TransferSettings."""

    layout: KVLayout
    num_blocks: int
    transport: str
    generation: str
    digest_every: int
    cores: tuple[int, ...] = ()


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One command: `what` is offer, publish, seal or end."""

    what: str
    request_id: int
    tokens: int = 0
    blocks: tuple[int, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` is what the command took."""

    seconds: float
    body: bytes = b""


class KVPair:
    """Both ends. Raises TrtpdError if one can't be made, CapacityError if there is no room."""

    def __init__(self, setup: Setup) -> None:
        self._woken = threading.Event()
        self._pool = SharedPool.create("bench-sink", setup.layout, setup.num_blocks, generation=setup.generation)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trtpd.perf.kv_pair", msgspec.json.encode(setup).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # a Ctrl-C is for this process; the other ends with its input
        )
        try:
            assert self._process.stdout is not None
            if not (line := self._process.stdout.readline()).startswith(b"ready"):
                raise CapacityError(line.decode().strip() or "the source's process did not start")
            settings = settings_of(setup)
            self._sink = make_sink(RankPools([self._pool]), settings, wake=self._woken.set)
        except BaseException:
            self._end_process()
            self._pool.close()
            raise

    @property
    def pool(self) -> SharedPool:
        """The sink's."""
        return self._pool

    def close(self) -> None:
        self._sink.close()
        self._end_process()
        self._pool.close()

    def _end_process(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def ask(self, ask: Ask) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(ask) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Answer)

    def begin(self, request_id: int, tokens: int, of: tuple[int, ...], to: tuple[int, ...]) -> None:
        """Offers and begins to pull."""
        answer = self.ask(Ask(what="offer", request_id=request_id, tokens=tokens, blocks=of))
        self._sink.begin(msgspec.msgpack.decode(answer.body, type=Offer), to)

    def publish(self, request_id: int, tokens: int) -> None:
        answer = self.ask(Ask(what="publish", request_id=request_id, tokens=tokens))
        self._sink.ready(msgspec.msgpack.decode(answer.body, type=Chunk))

    def finish(self, request_id: int) -> tuple[PullResult, float, float]:
        """Seals and waits: the result, the seconds from the seal's arrival on, and those the seal itself took.
        Raises TrtpdError if the pull failed."""
        answer = self.ask(Ask(what="seal", request_id=request_id))
        seal = msgspec.msgpack.decode(answer.body, type=Seal)
        self._woken.clear()
        began_s = time.perf_counter()
        self._sink.sealed(seal)
        while not (results := self._sink.progress()):
            if not self._woken.wait(WAIT_S):
                raise TrtpdError(f"no end of the hand-off within {WAIT_S} s")
            self._woken.clear()
        seconds = time.perf_counter() - began_s
        self.ask(Ask(what="end", request_id=request_id))
        if results[0].error:
            raise TrtpdError(f"the hand-off failed: {results[0].error}")
        return results[0], seconds, answer.seconds


def settings_of(setup: Setup) -> TransferSettings:
    return TransferSettings(
        instance="bench",
        generation=setup.generation,
        digest_every=setup.digest_every,
        one_piece_tokens=0,
        path=setup.transport,
        lease_s=WAIT_S,
    )


def serve(setup: Setup) -> None:
    """The source's process, until standard input ends."""
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    try:
        pool = SharedPool.create("bench-source", setup.layout, setup.num_blocks, generation=setup.generation)
        for number, array in enumerate(pool.keys + pool.values):
            array[:] = number
        source = make_source(RankPools([pool]), settings_of(setup))
    except TrtpdError as error:
        print(error, flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line, type=Ask)
        key, began_s = (ask.request_id, 1), time.perf_counter()
        body: Any = None
        if ask.what == "offer":
            body = source.offer(key, prompt_tokens=ask.tokens, blocks=ask.blocks)
        elif ask.what == "publish":
            body = source.publish(key, ready_tokens=ask.tokens)
        elif ask.what == "seal":
            body = source.seal(key, first_token=0, first_log_prob=None, seed=0)
        else:
            source.end(key)
        answer = Answer(seconds=time.perf_counter() - began_s, body=msgspec.msgpack.encode(body) if body else b"")
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    source.close()
    pool.close()


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=Setup))
