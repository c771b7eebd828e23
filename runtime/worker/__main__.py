"""One worker process: `python -m trtpd.runtime.worker --build BUILD --instance NAME --router ADDR --run-dir DIR`.

It prints one JSON line on standard output when it can serve, logs to standard error, and ends with exit 0 on
SIGTERM after a short drain, or when its standard input is closed. Exit 1: it failed; 2: it was started wrongly.

An engine of several ranks is started by mpirun, once per rank, with `python -m mpi4py -m trtpd.runtime.worker ...`.
Rank 0 is the worker; the others compute what it tells them and end with it. A rank that fails ends all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trtpd.errors import TrtpdError
from trtpd.runtime.worker.assembly import Place, Worker, assemble, assemble_follower, ranks_of
from trtpd.runtime.worker.board import STEP_LIMIT_S
from trtpd.runtime.worker.garbage import set_aside
from trtpd.runtime.worker.group import Member, join_group, open_keeper_pipe
from trtpd.runtime.worker.leader import Leader
from trtpd.runtime.worker.parent import die_with_parent, watch_pipe
from trtpd.runtime.worker.watchdog import SILENT_S

log = logging.getLogger("trtpd.worker")


def main(argv: list[str] | None = None) -> int:
    """Runs one worker, or one rank of it, to its end; the exit status."""
    parent_pid = os.getppid()
    arguments = parse(argv)
    begin_log(arguments.instance)
    place = Place(
        build=arguments.build,
        instance=arguments.instance,
        router=arguments.router,
        run_dir=arguments.run_dir,
        keys=arguments.keys,
        role=arguments.role,
        tag=arguments.tag,
    )
    member: Member | None = None
    with reported() as outcome:
        if ranks_of(place) > 1:
            die_with_parent(parent_pid, signal.SIGKILL)
            member = join_group(arguments.group, silent_s=arguments.silent_s, step_limit_s=arguments.step_limit_s)
        if member is not None and member.ranks.rank > 0:
            begin_log(f"{arguments.instance}.{member.ranks.rank}")
            follow(place, member)
        else:
            lead(place, member, arguments, parent_pid)
    if member is not None:
        if outcome.reason is not None:
            member.ranks.abort(outcome.reason)
        member.leave()
    return outcome.code


@dataclass(slots=True)
class Outcome:
    """How it ended: the exit status and, unless it was told to when it was serving, why."""

    code: int = 0
    reason: str | None = None


@contextlib.contextmanager
def reported() -> Iterator[Outcome]:
    """Logs what goes wrong in one line, as the exit status it means."""
    outcome = Outcome()
    try:
        yield outcome
    except StoppedError:
        outcome.reason = "stopped while loading"
        log.info("stopped while loading")
    except TrtpdError as error:
        outcome.code, outcome.reason = error.exit_code, str(error)
        log.error("%s", error)
    except Exception as error:
        outcome.code, outcome.reason = 1, f"internal: {error!r}"
        log.critical("a bug of ours: %r", error, exc_info=True)


def lead(place: Place, member: Member | None, arguments: argparse.Namespace, parent_pid: int) -> None:
    """Serves until told to stop. Raises TrtpdError."""
    stop = Stop(arguments.drain_s)
    stop.listen(parent=arguments.parent)
    if arguments.parent and member is None:
        die_with_parent(parent_pid)
        watch_pipe(sys.stdin.fileno(), stop.parent_gone)
    elif arguments.parent and arguments.group is not None:
        watch_pipe(open_keeper_pipe(arguments.group), stop.parent_gone)
    worker = assemble(place, None if member is None else member.ranks)
    reason = "stopped"
    try:
        stop.leader = worker.leader
        if member is not None:
            member.serve(True)
        announce(worker, place.instance)
        set_aside()
        worker.leader.run()
    except Exception as error:
        reason = f"{getattr(error, 'code', 'internal')}: {error}"
        raise
    finally:
        if member is not None:
            member.serve(False)
        worker.close(reason)


def follow(place: Place, member: Member) -> None:
    """Computes what rank 0 tells this rank until that dismisses it. Raises TrtpdError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follower = assemble_follower(place, member.ranks)
    try:
        member.serve(True)
        set_aside()
        follower.run()
    finally:
        member.serve(False)
        follower.close()


def begin_log(name: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", force=True
    )


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
    parser.add_argument("--role", choices=("prefill", "decode"), help="serve this role instead of the instance's own")
    parser.add_argument("--tag", default="", help="ends the name it registers by, behind a dot")
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
    group = parser.add_argument_group("an engine of several ranks")
    group.add_argument("--group", type=Path, help="the group's folder, made by the process that starts mpirun")
    group.add_argument(
        "--silent-s", type=float, default=SILENT_S, help="a rank that doesn't run so long ends the group"
    )
    group.add_argument(
        "--step-limit-s",
        type=float,
        default=STEP_LIMIT_S,
        help="a step that takes longer (and some for each of its tokens) ends the group",
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
