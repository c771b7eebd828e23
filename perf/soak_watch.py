"""What a server and its client hold, looked at every few seconds for as long as a soak lasts."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trtpd.errors import TrtpdError
from trtpd.kv_transfer.pool_file import PREFIX as SHM_PREFIX
from trtpd.kv_transfer.pool_file import SHM_DIR
from trtpd.perf.process_cpu import label_of
from trtpd.perf.served import Served
from trtpd.runtime.serve.client import status
from trtpd.runtime.serve.rundir import PREFIX as RUN_PREFIX
from trtpd.runtime.worker.garbage import Collector

Column = tuple[str, str]
"""Who, and what of it: ("router", "rss_bytes")."""

INSTANCE_COUNTS = ("running", "waiting", "requests", "kv_blocks_held", "kv_blocks_cached")
DEPLOYMENT_COUNTS = ("requests_in_flight", "queued", "undelivered")

LAUNCHERS_OF_RANKS = ("mpirun", "mpiexec", "prterun")
RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"

_MAKER = re.compile(r"[.-](?P<pid>\d{1,10})\.\d{1,20}\.")
"""In the names of what we make: the maker's pid, then its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Everything seen at one instant, in seconds after the watch began."""

    at_s: float
    values: Mapping[Column, float]


@dataclass(slots=True)
class Processes:
    """The living processes of one server, and what each holds. `changes` says which began or ended between looks."""

    root: psutil.Process
    changes: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    _names: dict[int, str] = field(default_factory=dict)
    _known: dict[int, psutil.Process] = field(default_factory=dict)
    _cpu_s: dict[int, tuple[float, float]] = field(default_factory=dict)

    def look(self) -> dict[Column, float]:
        """Also of this very process, named `client`."""
        self._find()
        found: dict[Column, float] = {}
        for pid, process in self._known.items():
            with contextlib.suppress(psutil.Error):
                found |= {(self._names[pid], what): value for what, value in self._held(process).items()}
        return found

    def _find(self) -> None:
        now = {process.pid: process for process in [self.root, *self.root.children(recursive=True), psutil.Process()]}
        first = not self._known
        for pid in sorted(self._known.keys() - now.keys()):
            self.changes.append(f"{self._names.pop(pid)} (pid {pid}) ended")
            self._cpu_s.pop(pid, None)
        for pid in sorted(now.keys() - self._known.keys()):
            self._names[pid] = self._free_name("client" if pid == os.getpid() else name_of(now[pid]))
            if not first:
                self.changes.append(f"{self._names[pid]} (pid {pid}) began")
        self._known = now
        self.pids |= now.keys() - {os.getpid()}

    def _free_name(self, label: str) -> str:
        """Processes of one name are numbered in the order of their pids."""
        taken, name, number = set(self._names.values()), label, 1
        while name in taken:
            number += 1
            name = f"{label} [{number}]"
        return name

    def _held(self, process: psutil.Process) -> dict[str, float]:
        with process.oneshot():
            memory, times = process.memory_info(), process.cpu_times()
            found = {
                "rss_bytes": float(memory.rss),
                "private_bytes": float(memory.rss - memory.shared),
                "fds": float(process.num_fds()),
                "threads": float(process.num_threads()),
            }
        used_s, now_s = times.user + times.system, time.monotonic()
        if process.pid in self._cpu_s:
            before_s, at_s = self._cpu_s[process.pid]
            found["cpu_cores"] = (used_s - before_s) / max(now_s - at_s, 1e-9)
        self._cpu_s[process.pid] = (used_s, now_s)
        return found


def name_of(process: psutil.Process) -> str:
    """As label_of, with the processes of a group told apart."""
    command, label = process.cmdline(), label_of(process.cmdline())
    if command and Path(command[0]).name in LAUNCHERS_OF_RANKS:
        return f"mpirun of {label}"
    with contextlib.suppress(psutil.Error):
        rank = process.environ().get(RANK_VARIABLE)
        return label if rank is None else f"{label} rank {rank}"
    return label


def shared_memory(pids: set[int]) -> dict[Column, float]:
    """Files of ours in /dev/shm whose names say that one of these processes made them, dead ones included."""
    return _files("shm", [path for path in SHM_DIR.glob(f"{SHM_PREFIX}*") if _made_by(path.name, pids)])


def run_files(pids: set[int]) -> dict[Column, float]:
    """The run directory: sockets and logs."""
    folders = Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*")
    return _files("run", [path for path in folders if _made_by(path.name, pids)])


def _made_by(name: str, pids: set[int]) -> bool:
    found = _MAKER.search(name)
    return found is not None and int(found["pid"]) in pids


def _files(what: str, paths: list[Path]) -> dict[Column, float]:
    count = size = 0
    for path in paths:
        for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
            with contextlib.suppress(OSError):
                count, size = count + 1, size + file.lstat().st_size
    return {("deployment", f"{what}_files"): float(count), ("deployment", f"{what}_bytes"): float(size)}


def said(found: Mapping[str, Any]) -> dict[Column, float]:
    """What the router says of itself and of its instances."""
    values = {("deployment", name): float(found[name]) for name in DEPLOYMENT_COUNTS}
    for name, one in found["instances"].items():
        values |= {(name, what): float(one[what]) for what in INSTANCE_COUNTS}
        values[name, "kv_blocks_used"] = float(one["kv_blocks"] - one["kv_blocks_free"])
    return values


class Watch:
    """Looks every `every_s`, in a thread of its own between `with` and its end. Each sample goes to `table` at once and
    is not kept: read_samples reads them back. `more` adds columns of the caller's own. `misses` counts the times the
    server gave no status; `fault` is why the watch ended before its time."""

    def __init__(
        self, server: Served, table: Path, *, every_s: float, more: Callable[[], dict[Column, float]] = dict
    ) -> None:
        self._server = server
        self._table = table
        self._every_s = every_s
        self._more = more
        self._processes = Processes(server.root)
        self._collector = Collector()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)
        self.misses = 0
        self.fault: Exception | None = None

    @property
    def changes(self) -> list[str]:
        """Processes that began or ended meanwhile."""
        return self._processes.changes

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def look(self) -> dict[Column, float]:
        self._collector.look(time.monotonic())
        values = self._processes.look()
        values |= shared_memory(self._processes.pids) | run_files(self._processes.pids) | self._more()
        try:
            values |= said(status(self._server.grpc))
        except TrtpdError:
            self.misses += 1
        return values

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            with self._table.open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(("at_s", "who", "what", "value"))
                while not self._done.is_set():
                    at_s = round(time.monotonic() - began_s, 1)
                    rows.writerows((at_s, who, what, round(value, 4)) for (who, what), value in self.look().items())
                    file.flush()
                    late_s = (time.monotonic() - began_s) % self._every_s
                    self._done.wait(self._every_s - late_s)
        except (OSError, psutil.Error) as error:  # the server is gone, or the disk is full: the caller asks
            self.fault = error


def read_samples(table: Path) -> list[Sample]:
    """What a Watch wrote, in its order."""
    found: dict[float, dict[Column, float]] = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(float(row["at_s"]), {})[row["who"], row["what"]] = float(row["value"])
    return [Sample(at_s=at_s, values=values) for at_s, values in found.items()]


def held(found: Mapping[str, Any]) -> dict[str, int]:
    """What is not 0 in a server that has nothing to do, by name; empty if all is as it should be."""
    columns = {column: value for column, value in said(found).items() if column[1] != "kv_blocks_cached"}
    return {f"{who} {what}": int(value) for (who, what), value in columns.items() if value}
