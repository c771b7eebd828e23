"""One worker process: `python -m trtpd.runtime.worker --build BUILD --instance NAME --router ADDR --run-dir DIR`.

It prints one JSON line on standard output when it can serve, logs to standard error, and ends with exit 0 on
SIGTERM after a short drain, or when its standard input is closed. Exit 1: it failed; 2: it was started wrongly.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from trtpd.errors import TrtpdError
from trtpd.runtime.worker.assembly import Place, Worker, assemble
from trtpd.runtime.worker.leader import Leader
from trtpd.runtime.worker.parent import die_with_parent, watch_pipe

log = logging.getLogger("trtpd.worker")


def main(argv: list[str] | None = None) -> int:
    """Runs one worker to its end; the exit status."""
    parent_pid = os.getppid()
    arguments = parse(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s {arguments.instance} %(levelname)s %(message)s",
    )
    worker: Worker | None = None
    stop = Stop(arguments.drain_s)
    reason = "stopped"
    try:
        stop.listen(parent=arguments.parent)
        if arguments.parent:
            die_with_parent(parent_pid)
            watch_pipe(sys.stdin.fileno(), stop.parent_gone)
        worker = assemble(
            Place(
                build=arguments.build,
                instance=arguments.instance,
                router=arguments.router,
                run_dir=arguments.run_dir,
                keys=arguments.keys,
            )
        )
        stop.leader = worker.leader
        announce(worker, arguments.instance)
        worker.leader.run()
    except StoppedError:
        log.info("stopped while loading")
    except TrtpdError as error:
        reason = f"{error.code}: {error}"
        log.error("%s", error)
        return error.exit_code
    except Exception as error:
        reason = f"internal: {error!r}"
        log.critical("a bug of ours: %r", error, exc_info=True)
        return 1
    finally:
        if worker is not None:
            worker.close(reason)
    return 0


class StoppedError(BaseException):
    """SIGTERM came before there was a leader to drain."""


class Stop:
    """SIGTERM drains the leader; a second one, or a parent that is gone, ends it at once.

    A Ctrl-C reaches every process of a terminal. A worker with a parent leaves it to that to say when to stop.
    """

    def __init__(self, drain_s: float) -> None:
        self.leader: Leader | None = None
        self._grace_s = drain_s

    def listen(self, *, parent: bool) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN if parent else self._on_signal)

    def parent_gone(self) -> None:
        """From any thread."""
        self._grace_s = 0.0
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.leader is None:
            raise StoppedError
        self.leader.request_stop(self._grace_s)
        self._grace_s = 0.0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trtpd.runtime.worker", description="One worker: an engine and its leader."
    )
    parser.add_argument("--build", type=Path, required=True, help="build directory")
    parser.add_argument("--instance", required=True, help="which instance of the build this is")
    parser.add_argument("--router", required=True, help="the router's address (ipc:// or tcp://)")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the local socket goes")
    parser.add_argument("--keys", type=Path, help="folder of CURVE keys; needed beyond loopback")
    parser.add_argument("--drain-s", type=float, default=5.0, help="grace for what runs on SIGTERM")
    parser.add_argument(
        "--no-parent",
        dest="parent",
        action="store_false",
        help="do not end with the starting process or when standard input closes",
    )
    return parser.parse_args(argv)


def announce(worker: Worker, instance: str) -> None:
    ready = {
        "ready": True,
        "instance": instance,
        "generation": worker.hello.generation,
        "role": worker.hello.role,
        "pid": os.getpid(),
        "local": worker.local_address,
        "load_s": round(worker.load_s, 3),
        "prefill_tokens_per_s": round(worker.hello.prefill_tokens_per_s, 1),
        "kv_blocks": worker.hello.kv_blocks,
    }
    print(json.dumps(ready), flush=True)


if __name__ == "__main__":
    sys.exit(main())
