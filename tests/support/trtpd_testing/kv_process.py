"""A source of KV in a process of its own, to be stopped, killed and restarted by tests.

python -m trtpd_testing.kv_process TRANSPORT    then one command per line on standard input
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from types import TracebackType

from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.offer import Chunk, Offer, Seal, decode_chunk, decode_offer, decode_seal, encode
from trtpd_testing.kv import ENDS, LAYOUT, fill_group, make_group

KEY = (1, 1)


class SourceProcess:
    """The process, seen from the test. Leaving the `with` block kills it."""

    def __init__(self, transport: str, *, lease_s: float = 10.0) -> None:
        path = ":".join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trtpd_testing.kv_process", transport, str(lease_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": path},
        )

    def _ask(self, command: str) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return bytes.fromhex(json.loads(self.process.stdout.readline()))

    def offer(self, tokens: int, blocks: list[int]) -> Offer:
        return decode_offer(self._ask(f"offer {tokens} {' '.join(map(str, blocks))}"))

    def publish(self, tokens: int) -> Chunk:
        return decode_chunk(self._ask(f"publish {tokens}"))

    def seal(self) -> Seal:
        return decode_seal(self._ask("seal"))

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> SourceProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main(transport: str, lease_s: float) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
