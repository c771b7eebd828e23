"""Runs trtllm-build: one process for each role, side by side where each can have GPUs of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from trtpd.build.backends.tensorrt_llm.flags import command_words
from trtpd.build.manifest import RoleName, Settings
from trtpd.build.roles import split_cores
from trtpd.errors import BuildError

PROGRAM = "trtllm-build"
_TAIL_LINES = 8
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of trtllm-build. `devices` are the GPUs it may use, as CUDA_VISIBLE_DEVICES has them."""

    role: RoleName
    words: tuple[str, ...]
    devices: tuple[str, ...]
    output: Path
    log: Path

    def shown(self) -> str:
        """The command as one would type it."""
        prefix = f"CUDA_VISIBLE_DEVICES={','.join(self.devices)} " if self.devices else ""
        return prefix + shlex.join(self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlaces:
    """Where a run reads and writes; all absolute, since trtllm-build's own defaults are the working folder."""

    checkpoint: Path
    output: Path
    timing_cache: Path
    log: Path


def plan_run(role: RoleName, settings: Settings, places: RunPlaces, *, tp: int, devices: Sequence[str]) -> Run:
    """The call that builds a role's engines: TP is in the checkpoint, a worker builds a rank at a time on a GPU
    of its own. Without devices (a plan made elsewhere) as many workers as ranks."""
    workers = min(tp, len(devices)) if devices else tp
    flags: Settings = {
        "checkpoint_dir": str(places.checkpoint),
        "output_dir": str(places.output),
        **settings,
        "workers": workers,
        "input_timing_cache": str(places.timing_cache),
        "output_timing_cache": str(places.timing_cache),
    }
    words = (PROGRAM, *command_words(flags))
    return Run(role=role, words=words, devices=tuple(devices), output=places.output, log=places.log)


def visible_devices(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES would name them."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip() and not part.strip().startswith("-"))
    return tuple(str(number) for number in sorted(int(path.name[6:]) for path in dev.glob("nvidia[0-9]*")))


def share_devices(devices: Sequence[str], runs: int) -> list[tuple[str, ...]]:
    """Each run's GPUs: a part of its own where there are enough, else all of them (and one run at a time)."""
    if len(devices) < runs or not runs:
        return [tuple(devices)] * runs
    return [tuple(devices[index] for index in part) for part in split_cores(range(len(devices)), runs)]


def find_program() -> Path:
    """trtllm-build, on PATH or beside this Python. Raises BuildError."""
    beside = Path(sys.executable).with_name(PROGRAM)
    found = shutil.which(PROGRAM) or (str(beside) if beside.is_file() else None)
    if found is None:
        raise BuildError(
            f"{PROGRAM} is neither on PATH nor beside {sys.executable}; build where TensorRT-LLM 1.0 to 1.2 is "
            "installed (see docs/tensorrt-llm.md), or look at the plan with --dry-run"
        )
    return Path(found)


def run_all(runs: Sequence[Run], program: Path, *, side_by_side: bool, done: Callable[[Run], None]) -> None:
    """Runs all; `done` is called in this thread for each that succeeded, as soon as it has.

    One that fails doesn't stop the others, whose engines are then there for the next try. Raises BuildError
    for the first that failed, with the end of its log. Whatever ends this call ends the processes.
    """
    failed: list[BuildError] = []
    with _Processes() as processes, ThreadPoolExecutor(max_workers=len(runs) if side_by_side else 1) as pool:
        futures = {pool.submit(processes.run, run, program): run for run in runs}
        waiting = set(futures)
        try:
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_EXCEPTION, timeout=0.2)
                for future in finished:
                    try:
                        future.result()
                        done(futures[future])
                    except BuildError as error:
                        failed.append(error)
        except BaseException:
            processes.stop()
            pool.shutdown(cancel_futures=True)
            raise
    if failed:
        raise failed[0]


class _Processes:
    """The running builds, each a process group of its own, so that its workers end with it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, run: Run, program: Path) -> None:
        """Blocks until the run is over. Raises BuildError if it failed."""
        environ = dict(os.environ)
        if run.devices:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(run.devices)
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("wb") as log:
            log.write(f"$ {run.shown()}\n".encode())
            log.flush()
            with _translated_start(program), self._lock:
                if self._stopped:
                    return
                process = subprocess.Popen(
                    [str(program), *run.words[1:]],
                    cwd=run.log.parent,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            status = process.wait()
            self._running.discard(process)
        if status and not self._stopped:
            tail = " | ".join(line for line in _last_lines(run.log) if line)
            raise BuildError(
                f"{run.role}: {PROGRAM} failed ({_status(status)}); its log {run.log} ends with: {tail}; mend that and "
                "run the same command again: what is done is kept"
            )

    def stop(self) -> None:
        """Ends what still runs."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _translated_start(program: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildError(f"{program} can't be started ({error.strerror or error})") from error


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit {status}"


def _last_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
