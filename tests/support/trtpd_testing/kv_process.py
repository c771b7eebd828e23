"""A source of KV in a process of its own, to be stopped, killed and restarted by tests.

python -m trtpd_testing.kv_process TRANSPORT    then one command per line on standard input
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.offer import Chunk, Offer, Seal, decode_chunk, decode_offer, decode_seal, encode
from trtpd_testing.kv import ENDS, LAYOUT, fill_group, make_group

KEY = (1, 1)


class _Process:
    """The process, seen from the test. Leaving the `with` block kills it."""

    def __init__(self, *arguments: str) -> None:
        path = ":".join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trtpd_testing.kv_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": path},
        )

    def _tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return str(json.loads(self.process.stdout.readline()))

    def stop(self) -> None:
        """SIGSTOP, until every thread stands still."""
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
            threading.Event().wait(0.001)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class SourceProcess(_Process):
    """Holds one request."""

    def __init__(self, transport: str, *, lease_s: float = 10.0) -> None:
        super().__init__("source", transport, str(lease_s))

    def _ask(self, command: str) -> bytes:
        self._tell(command)
        return bytes.fromhex(self._hear())

    def offer(self, tokens: int, blocks: list[int]) -> Offer:
        return decode_offer(self._ask(f"offer {tokens} {' '.join(map(str, blocks))}"))

    def publish(self, tokens: int) -> Chunk:
        return decode_chunk(self._ask(f"publish {tokens}"))

    def seal(self) -> Seal:
        return decode_seal(self._ask("seal"))


class SinkProcess(_Process):
    """Pulls one request again and again, after a first time that is told."""

    def __init__(self, transport: str, layout: KVLayout) -> None:
        super().__init__("sink", transport, msgspec.json.encode(layout).decode())

    def pull(self, offer: Offer, seal: Seal) -> str | None:
        """The error of the first pull; then it goes on."""
        self._tell(f"{encode(offer).hex()} {encode(seal).hex()}")
        return None if (heard := self._hear()) == "None" else heard


def serve_source(transport: str, lease_s: float) -> None:
    """Serves commands until standard input ends."""
    pools = make_group("child", LAYOUT, "child")
    fill_group(pools)
    settings = TransferSettings(instance="prefill_9", generation="child", lease_s=lease_s)
    source = ENDS[transport][0](pools, settings)
    for line in sys.stdin:
        command, *numbers = line.split()
        answer: Offer | Chunk | Seal
        if command == "offer":
            tokens, *blocks = map(int, numbers)
            answer = source.offer(KEY, prompt_tokens=tokens, blocks=blocks)
        elif command == "publish":
            answer = source.publish(KEY, ready_tokens=int(numbers[0]))
        else:
            answer = source.seal(KEY, first_token=5, first_log_prob=None, seed=0)
        print(json.dumps(encode(answer).hex()), flush=True)


def serve_sink(transport: str, layout: KVLayout) -> None:
    """Pulls what one line names, for ever."""
    pools, woken = make_group("child", layout, "child"), threading.Event()
    settings = TransferSettings(instance="decode_9", generation="child", one_piece_tokens=0)
    sink = ENDS[transport][1](pools, settings, wake=woken.set)
    offer_hex, seal_hex = sys.stdin.readline().split()
    offer, seal = decode_offer(bytes.fromhex(offer_hex)), decode_seal(bytes.fromhex(seal_hex))
    for number in itertools.count():
        sink.begin(offer, list(range(len(offer.blocks))))
        sink.sealed(seal)
        while not (results := sink.progress()):
            woken.wait(1)
            woken.clear()
        if number == 0:
            print(json.dumps(str(results[0].error)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "source":
        serve_source(sys.argv[2], float(sys.argv[3]))
    else:
        serve_sink(sys.argv[2], msgspec.json.decode(sys.argv[3], type=KVLayout))
