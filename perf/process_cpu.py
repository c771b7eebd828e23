"""CPU and memory of the processes of a server, by what they are. Only for servers on this host."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from trtpd.errors import InputError

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU seconds used so far by each living process, and what it is. Two of them make a difference."""

    by_pid: Mapping[int, tuple[str, float]]

    def since(self, earlier: CpuTimes) -> dict[str, float]:
        """CPU seconds by label. A process that began meanwhile counts whole; one that ended is not seen."""
        used: dict[str, float] = {}
        for pid, (label, seconds) in self.by_pid.items():
            before = earlier.by_pid.get(pid)
            spent = seconds - before[1] if before is not None and before[0] == label else seconds
            used[label] = used.get(label, 0.0) + spent
        return dict(sorted(used.items()))


def machine_busy_s() -> float:
    """CPU seconds that all of this machine's CPUs have spent on anything since it started, other guests' included."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)  # guests are in user, nice


def server_process(address: str) -> psutil.Process | None:
    """The process at the root of the server that listens on HOST:PORT here: `trtpd serve` if it is ours. None where
    the address is not this host's, or nothing of ours to see listens there. `address` may be a URL with a path, and
    then without a port. Raises InputError for one that is neither."""
    host, port = _host_and_port(address)
    if not _is_loopback(host):
        return None
    for connection in psutil.net_connections("tcp"):
        at = connection.laddr[1] if connection.laddr else None
        if connection.status == psutil.CONN_LISTEN and at == port and connection.pid:
            return _root(psutil.Process(connection.pid))
    return None


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError as error:
        raise InputError(f"{address!r} is not HOST:PORT ({error})") from error
    if not parts.hostname or port is None:
        raise InputError(f"{address!r} is not HOST:PORT")
    return parts.hostname, port


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _root(process: psutil.Process) -> psutil.Process:
    """The launcher above, if there is one."""
    found = process
    for parent in process.parents():
        with contextlib.suppress(psutil.Error):
            line = " ".join(parent.cmdline())
            if "trtpd" in line and " serve" in line:
                found = parent
    return found


def usable_cores(root: psutil.Process | None) -> int | None:
    """How many CPUs that process may run on, and what it starts unless told otherwise; None where there is none to
    ask."""
    if root is None:
        return None
    try:
        return len(root.cpu_affinity())
    except psutil.Error:
        return None


def cpu_times(root: psutil.Process | None) -> CpuTimes:
    """Of `root` and all below it, as it is now; nothing for None or a process that is gone."""
    by_pid: dict[int, tuple[str, float]] = {}
    for process in _tree(root):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            by_pid[process.pid] = (label_of(process.cmdline()), times.user + times.system)
    return CpuTimes(by_pid=by_pid)


def rss_bytes(root: psutil.Process | None) -> dict[str, int]:
    """Resident memory by label, of the same processes."""
    held: dict[str, int] = {}
    for process in _tree(root):
        with contextlib.suppress(psutil.Error):
            label = label_of(process.cmdline())
            held[label] = held.get(label, 0) + process.memory_info().rss
    return held


def _tree(root: psutil.Process | None) -> list[psutil.Process]:
    if root is None:
        return []
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def label_of(command: list[str]) -> str:
    """What a process of a deployment is: launcher, Triton, router, `stub of NAME`, an instance's name, or the program's
    name."""
    if not command:
        return "other"
    program = command[0].rsplit("/", 1)[-1]
    if program == "tritonserver":
        return "Triton"
    if program == "triton_python_backend_stub":
        model = next((part.rsplit("/", 3)[-3] for part in command[1:] if part.count("/") >= 3), "?")
        return "router" if model == "pd" else f"stub of {model}"
    if "trtpd.runtime.worker" in command:
        return command[command.index("--instance") + 1] if "--instance" in command else "worker"
    if "serve" in command and any("trtpd" in part for part in command):
        return "launcher"
    return program
