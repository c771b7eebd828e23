"""What must hold before a server is started, each with its mend in the message."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from trtpd.build import engines
from trtpd.build.manifest import MANIFEST, Manifest, read_engine_config, rebuild
from trtpd.build.spec import settings_fault
from trtpd.errors import InputError, ServeError

REGION_BYTES = 16 << 20
"""Room in shared memory for each model's messages with the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where the three fronts listen. 0: any free port."""

    http: int
    grpc: int
    metrics: int


def check_ports(host: str, wanted: Ports) -> Ports:
    """The ports with every 0 replaced by a free one. Raises InputError for ports that can't be or are in use, and for a
    host that is not this one's."""
    chosen = {"http": wanted.http, "grpc": wanted.grpc, "metrics": wanted.metrics}
    fixed = [port for port in chosen.values() if port]
    if len(set(fixed)) < len(fixed):
        raise InputError(f"ports {', '.join(f'--{front} {port}' for front, port in chosen.items())} must differ")
    _check_host(host)
    faults: dict[str, OSError] = {}
    with contextlib.ExitStack() as held:  # all at once, so that no free port is found twice
        for front, port in chosen.items():
            try:
                listener = held.enter_context(socket.create_server((host, port), family=_family(host)))
            except OSError as error:
                faults[front] = error
            else:
                chosen[front] = listener.getsockname()[1]
    if faults:
        raise InputError(_unusable(host, chosen, faults)) from next(iter(faults.values()))
    return Ports(**chosen)


def _unusable(host: str, ports: Mapping[str, int], faults: Mapping[str, OSError]) -> str:
    """Every port that can't be had, who has it, and the options that choose others."""
    by_reason: dict[str, list[str]] = {}
    for front, error in faults.items():
        by_reason.setdefault(_reason(error) + _holder(ports[front], error), []).append(str(ports[front]))
    taken = ", ".join(f"{', '.join(found)} ({why})" for why, found in by_reason.items())
    options = " ".join(f"--{front} PORT" for front in faults)
    in_use = any(error.errno == errno.EADDRINUSE for error in faults.values())
    return (
        f"port{'s' if len(faults) > 1 else ''} {taken} can't be used on {host}; "
        f"{'stop what listens there, or ' if in_use else ''}choose {'others' if len(faults) > 1 else 'another'} with "
        f"{options} (0: any free port)"
    )


def _check_host(host: str) -> None:
    """Raises InputError unless this host can listen there, whatever the port."""
    try:
        socket.create_server((host, 0), family=_family(host)).close()
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"--host {host}: this host can't listen there ({_reason(error)}); give one of its own addresses, such "
            "as 127.0.0.1 (0.0.0.0: all of them)"
        ) from error


def check_repository(build: Path, models: Sequence[str]) -> None:
    """Raises InputError if the build lacks what Triton loads these models from."""
    missing = [name for name in models if not (build / "model_repo" / name / "config.pbtxt").is_file()]
    if missing:
        raise InputError(
            f"{build / 'model_repo'} has no model {', '.join(missing)}; build it again with "
            f"`trtpd build PIPELINE -o {build} --force`"
        )


def check_settings(build: Path, manifest: Manifest) -> None:
    """Raises InputError if the build's settings were edited by hand into what can't be."""
    if fault := settings_fault(manifest):
        raise InputError(f"{build / MANIFEST}: {fault}; {rebuild(build)}")


def check_shared_memory(build: Path, manifest: Manifest, models: Sequence[str]) -> None:
    """Raises ServeError if /dev/shm has no room for these models' KV pools and the server's own regions."""
    needed = len(models) * REGION_BYTES + sum(pool_bytes(build, manifest, models).values())
    stat = os.statvfs("/dev/shm")
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise ServeError(
            f"/dev/shm has {free / 1e6:,.0f} MB free, serving needs {needed / 1e6:,.0f} MB; build with fewer "
            "KV blocks, free some, or enlarge it (`mount -o remount,size=8G /dev/shm`; Docker: --shm-size)"
        )


def pool_bytes(build: Path, manifest: Manifest, models: Iterable[str]) -> dict[str, int]:
    """Bytes of the KV pools of each instance among `models`. Engines that move no memory of ours hold none."""
    sizes = {}
    for role in manifest.roles.values():
        config = read_engine_config(build / role.directory)
        for name in role.instances:
            if name in models and config.engine != "tensorrt_llm":
                sizes[name] = engines.pool_bytes(config.layout, config.profile.kv_blocks)
    return sizes


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _reason(error: OSError | UnicodeError) -> str:
    """In the system's words; Python's have the address once more."""
    if isinstance(error, UnicodeError):
        return "it is no host's name"
    return str(error.strerror or error).partition(" (while")[0]


def _holder(port: int, error: OSError) -> str:
    """Who listens there, as far as it may be known."""
    if error.errno != errno.EADDRINUSE:
        return ""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and getattr(connection.laddr, "port", None) == port:
                return f", held by {psutil.Process(connection.pid).name()}, pid {connection.pid}"
    return ", by another user's process or in another container"
