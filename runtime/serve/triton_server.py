"""The tritonserver process: its command line, its start and its end."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from trtpd.errors import ServeError
from trtpd.runtime.serve import rundir
from trtpd.runtime.serve.preflight import Ports
from trtpd.runtime.serve.processes import descendants, kill_all
from trtpd.runtime.serve.server_package import ServerPackage
from trtpd.runtime.serve.triton_http import KEY_HEADER
from trtpd.runtime.worker.parent import signal_on_parents_death

EXIT_TIMEOUT_S = 5
LOOK_S = 2.0
LAST_LINES = 200
ERROR_CHARS = 200
NO_GPU_REMARK = "CudaDriverHelper has not been initialized"
"""What every start without a GPU logs as an error."""
STACK_BYTES = 256 << 20
"""For each of the server's threads, of which only what is used becomes memory: its HTTP front parses a form (what curl
says a body is unless told otherwise) on its stack, and a large one would end the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """All a server is started with. `models`: how many it will load; the backend is linked into `run_dir` already.

    `control_key` has to come with every call that changes the server (a load may bring the model's code along): who
    may ask for answers may not do that. It stands in the server's command line, so it keeps out the network and not
    other users of this host.
    """

    package: ServerPackage
    host: str
    ports: Ports
    models: int
    repository: Path
    run_dir: Path
    environment: Mapping[str, str]
    control_key: str
    load_timeout_s: float
    verbose: bool = False


_STAMP = re.compile(r"[EF]\d{4} \d\d:\d\d:[\d.]+ \d+ \S+\] ")


class TritonServer:
    """One process and all below it. It ends with the thread that calls `start`."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._log = plan.run_dir / "logs" / "tritonserver.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._below: set[psutil.Process] = set()
        self._looked_s = 0.0

    def start(self) -> None:
        """Returns at once. The models are not loaded."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                env=self._plan.environment,
                cwd=self._plan.run_dir,  # stubs put their working directory on sys.path
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at a terminal is for the launcher alone
                preexec_fn=_prepare,
            )

    def check(self) -> None:
        """Raises ServeError with its last error if it is gone. To be called every few seconds while it runs."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise ServeError(f"tritonserver {how}{self.last_words()}")
        if self._process is not None and time.monotonic() - self._looked_s > LOOK_S:
            self._look_below(self._process.pid)

    def last_words(self) -> str:
        """Its last error and where its log is kept, to go behind what became of it; one line."""
        said = last_error(rundir.tail(self._log, LAST_LINES))
        kept = rundir.keep_log(self._log)
        return (f": {said}" if said else "") + (f"; its log is kept in {kept}" if kept is not None else "")

    def terminate(self) -> None:
        """Asks it to end and waits a while."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT_S + 10)

    def kill(self) -> None:
        """Ends it and every process below it at once. Idempotent."""
        if self._process is None:
            return
        self._look_below(self._process.pid)
        if self._process.poll() is None:
            self._process.kill()
        kill_all(self._below)
        self._process.wait()

    def _look_below(self, pid: int) -> None:
        """Those below a process that is gone can't be found any more, so they are remembered while it runs; a stub may
        have said since who it is."""
        self._looked_s = time.monotonic()
        found = set(descendants(pid))
        for stub in rundir.stub_processes(self._plan.run_dir):
            found |= {stub, *descendants(stub.pid)}
        self._below = found | {process for process in self._below if process.is_running()}

    def _command(self) -> list[str]:
        plan = self._plan
        host, ports = plan.host, plan.ports
        python = {
            "shm-default-byte-size": 4 << 20,
            "shm-region-prefix-name": rundir.region_prefix(),
            "stub-timeout-seconds": int(plan.load_timeout_s),
        }
        control = f"model-repository,trace,logging:{KEY_HEADER}={plan.control_key}"
        return [
            str(plan.package.binary),
            f"--model-repository={plan.repository}",
            f"--backend-directory={plan.run_dir / 'backends'}",
            f"--cache-directory={plan.package.caches}",
            "--model-control-mode=explicit",
            "--disable-auto-complete-config",
            f"--model-load-thread-count={max(4, plan.models)}",
            f"--http-thread-count={max(8, 2 * plan.models)}",
            *(f"--{front}-address={host}" for front in ("http", "grpc", "metrics")),
            f"--http-port={ports.http}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-port={ports.metrics}",
            f"--http-restricted-api={control}",
            f"--grpc-restricted-protocol={control}",
            "--allow-gpu-metrics=false",
            "--allow-cpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--log-verbose={int(plan.verbose)}",
            "--exit-on-error=false",
            "--strict-readiness=true",
            *(f"--backend-config=python,{key}={value}" for key, value in python.items()),
        ]


def last_error(log: str) -> str:
    """The last line of a log that tells of an error, without its stamp and cut to a length to read; "" if none does."""
    told = [
        line
        for line in log.splitlines()
        if (_STAMP.match(line) or "error" in line.lower()) and NO_GPU_REMARK not in line
    ]
    said = _STAMP.sub("", told[-1]).strip().strip('"') if told else ""
    return said if len(said) <= ERROR_CHARS else said[: ERROR_CHARS - 3] + "..."


def _prepare() -> None:
    """Called between fork and exec."""
    signal_on_parents_death(signal.SIGTERM)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (stack_limit(soft, hard), hard))


def stack_limit(soft: int, hard: int) -> int:
    """The soft limit to run the server with. With none at all threads get a small stack, so that is lowered too."""
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    return wanted if soft == resource.RLIM_INFINITY else max(soft, wanted)
