"""The worker of one instance, kept running: started, watched, restarted alone when it dies, stopped.

All of it happens in one thread, because the worker is told to die with the thread that started it. The worker
also ends when its standard input does, so nothing outlives a stub that is killed. A worker of several ranks is
kept through its mpirun: that dies with the keeper's thread, and the ranks with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtpd.build.manifest import RoleName
from trtpd.errors import EngineError, ServeError, TrtpdError
from trtpd.kv_transfer.hands import copying_environment
from trtpd.kv_transfer.pool import sweep
from trtpd.runtime.serve.processes import is_stopped
from trtpd.runtime.serve.rundir import tail
from trtpd.runtime.worker.assembly import tagged
from trtpd.runtime.worker.gpus import GpuBinding
from trtpd.runtime.worker.group import GroupFolder
from trtpd.runtime.worker.link import report_death
from trtpd.runtime.worker.mpirun import Hosts, Mpi, find_mpi, group_command, group_environment
from trtpd.runtime.worker.parent import signal_on_parents_death

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
LOAD_TIMEOUT_S = 300.0
STEADY_S = 30.0
"""A worker that ran this long is restarted without delay when it dies."""
SIGNAL_S = 2.0
LOOK_S = 0.1
LAST_LINES = 60
"""Of a log; mpirun adds up to thirty to a rank's own last one."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's one line on standard output."""

    ready: bool
    generation: str
    local: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """How to start one instance's worker. `hosts` as in mpirun.py, for one of several ranks; `gpus` those it gets;
    `role` and `tag` as in assembly.py's Place."""

    build: Path
    instance: str
    router: str
    run_dir: Path
    keys: Path | None = None
    ranks: int = 1
    hosts: Hosts = None
    gpus: GpuBinding | None = None
    role: RoleName | None = None
    tag: str = ""

    def argv(self) -> list[str]:
        return [sys.executable, *self._arguments()]

    def group_argv(self, mpi: Mpi, folder: Path, environment: Mapping[str, str]) -> list[str]:
        """Of a worker of several ranks that meet in `folder`."""
        arguments = [*self._arguments(), "--group", str(folder)]
        return group_command(
            mpi,
            sys.executable,
            arguments,
            ranks=self.ranks,
            folder=folder,
            environment=environment,
            hosts=self.hosts,
        )

    def _arguments(self) -> list[str]:
        flags = {"--build": self.build, "--instance": self.instance, "--router": self.router}
        flags |= {"--run-dir": self.run_dir}
        flags |= {name: value for name, value in self._optional().items() if value}
        return ["-m", "trtpd.runtime.worker", *(str(part) for flag in flags.items() for part in flag)]

    def _optional(self) -> dict[str, Path | str | None]:
        return {"--keys": self.keys, "--role": self.role, "--tag": self.tag}

    @property
    def log_path(self) -> Path:
        return self.run_dir / "logs" / f"{self.instance}.log"


@dataclass(frozen=True, slots=True)
class Life:
    """One run of a worker: its process, or its mpirun with the folder its ranks meet in."""

    process: subprocess.Popen[bytes]
    group: GroupFolder | None

    def end(self, grace_s: float) -> None:
        """Asks, then signals, then kills; what is stopped hears neither and is killed at once. From any thread;
        `clear_away` is left to the keeper's."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self.group is not None:
            self.group.tell_to_end()
        if self._ends_within(grace_s):
            return
        self._signal(signal.SIGTERM)
        if self._ends_within(SIGNAL_S):
            return
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SIGNAL_S)

    def _ends_within(self, seconds: float) -> bool:
        """False as soon as it is stopped, or a rank of it is: it won't."""
        until_s = time.monotonic() + seconds
        while True:
            left_s = until_s - time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, min(LOOK_S, left_s)))
                return True
            ranks = [] if self.group is None else self.group.alive()
            if left_s <= 0.0 or any(map(is_stopped, [self.process.pid, *ranks])):
                return False

    def _signal(self, signum: signal.Signals) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signum)

    def clear_away(self) -> None:
        """Called once the process has ended: no rank is left, and nothing in /dev/shm."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.group is not None:
            self.group.kill()
            self.group.remove()
            sweep()


class WorkerProcess:
    """See the module. `start`, `stop` and `ready` may be called from any thread but the keeper's own."""

    def __init__(self, command: WorkerCommand, environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = dict(environment) | (command.gpus.environment() if command.gpus else {})
        self._changed = threading.Condition()
        self._ready: Ready | None = None
        self._life: Life | None = None
        self._mpi: Mpi | None = None
        self._deaths = 0
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"keeper-{command.instance}", daemon=True)

    @property
    def ready(self) -> Ready | None:
        """What the running worker said of itself; None while there is none."""
        return self._ready

    def start(self, timeout_s: float) -> Ready:
        """Returns when the worker serves. Raises EngineError with its last words when it dies first (then
        nothing is tried again) or takes longer, or when MPI is missing for one of several ranks."""
        if self._command.ranks > 1:
            self._mpi = find_mpi(sys.executable, self._environment)
        self._keeper.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None or self._deaths > 0, timeout_s)
            ready = self._ready
        if ready is not None:
            return ready
        took_long = self._deaths == 0
        self.stop(grace_s=0.0)
        why = f"was not ready within {timeout_s:g} s" if took_long else "could not start"
        raise EngineError(f"{self._command.instance}: its worker {why}: {_last_words(self._command.log_path)}")

    def stop(self, *, grace_s: float) -> None:
        """Ends the worker: by closing its input, then by signal. Idempotent."""
        self._stopping.set()
        with self._changed:
            life = self._life
        if life is not None:
            life.end(grace_s)
        if self._keeper.is_alive():
            self._keeper.join()

    def _keep(self) -> None:
        backoff_s = 0.0
        while not self._stopping.wait(backoff_s):
            began_s = time.monotonic()
            generation, why = self._live()
            with self._changed:
                self._ready, self._life = None, None
                self._deaths += 1
                self._changed.notify_all()
            if self._stopping.is_set():
                return
            log.error("%s: %s; starting it again", self._command.instance, why)
            if generation is not None:
                self._report(generation, why)
            steady = time.monotonic() - began_s > STEADY_S
            backoff_s = BACKOFF_FIRST_S if steady else min(BACKOFF_MAX_S, max(BACKOFF_FIRST_S, 2 * backoff_s))

    def _live(self) -> tuple[str | None, str]:
        """One life of the worker: its generation if it came to serve, and how it ended."""
        sweep()  # the pools of a worker whose keeper was killed along with it
        try:
            life = self._spawn()
        except (ServeError, OSError) as error:
            with self._command.log_path.open("a") as log_file:
                print(f"{self._command.instance} ERROR {error}", file=log_file)
            return None, f"it can't be started ({error})"
        if life is None:
            return None, "stopping"
        generation = self._await_ready(life.process)
        code = life.process.wait()
        life.clear_away()
        return generation, f"its process ended with code {code}"

    def _spawn(self) -> Life | None:
        """None once stopping: whoever stops has looked for a life already, or will find this one."""
        command, environment, group = self._command, self._environment, None
        argv = command.argv()
        with self._changed, command.log_path.open("ab") as log_file:
            if self._stopping.is_set():
                return None
            if self._mpi is not None:
                group = GroupFolder.make(command.instance, command.ranks)
                environment = group_environment(environment, group.path, hosts=command.hosts)
                argv = command.group_argv(self._mpi, group.path, environment)
            process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.PIPE if group is None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                preexec_fn=_worker_preexec,
                start_new_session=group is not None,  # a terminal's Ctrl-C would have mpirun kill its ranks
            )
            self._life = Life(process, group)
            return self._life

    def _await_ready(self, process: subprocess.Popen[bytes]) -> str | None:
        """Its generation once it serves; None if it ends before. One that takes longer than LOAD_TIMEOUT_S is ended."""
        too_long = threading.Timer(LOAD_TIMEOUT_S, process.kill)
        too_long.daemon = True
        too_long.start()
        try:
            return self._read_ready(process)
        finally:
            too_long.cancel()

    def _read_ready(self, process: subprocess.Popen[bytes]) -> str | None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                ready = msgspec.json.decode(line, type=Ready)
            except msgspec.MsgspecError:
                log.warning("%s said: %s", self._command.instance, line[:200].decode("utf-8", "replace"))
                continue
            with self._changed:
                self._ready = ready
                self._changed.notify_all()
            return ready.generation
        return None

    def _report(self, generation: str, reason: str) -> None:
        command = self._command
        try:
            report_death(
                command.router,
                instance=tagged(command.instance, command.tag),
                generation=generation,
                reason=reason,
                keys=command.keys,
            )
        except TrtpdError as error:  # the router then learns it from the silence
            log.warning("%s: its death could not be reported: %s", command.instance, error)


def worker_environment(base: Mapping[str, str]) -> dict[str, str]:
    """A stub's environment without what only the server needs, and with what makes copies of KV fast."""
    env = copying_environment(base)
    former = env.pop("TRTPD_LD_LIBRARY_PATH", None)
    if former is not None:
        env.pop("LD_LIBRARY_PATH", None)
        if former:
            env["LD_LIBRARY_PATH"] = former
    return env


def _last_words(log_path: Path) -> str:
    """The error a worker ended with; without one, the end of its log."""
    end = tail(log_path, LAST_LINES)
    errors = [line.partition(" ERROR ")[2] for line in end.splitlines() if " ERROR " in line]
    return errors[-1] if errors else end or "it wrote no log"


def _worker_preexec() -> None:
    signal_on_parents_death(signal.SIGKILL)
    # A stub ignores or blocks signals its worker must get.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
