"""What must hold before a server is started, each with its mend in the message."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from trtpd.build.manifest import Manifest, read_engine_config
from trtpd.errors import InputError, ServeError

REGION_BYTES = 16 << 20
"""Room in shared memory for each model's messages with the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """0 is not allowed: the ports are printed and dialled."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


def check_ports(host: str, ports: Ports) -> None:
    """Raises InputError for ports that can't be, ServeError for one in use."""
    chosen = {"--http": ports.http, "--grpc": ports.grpc, "--metrics": ports.metrics}
    for flag, port in chosen.items():
        if not 1 <= port <= 65535:
            raise InputError(f"{flag} {port}: a port lies between 1 and 65535")
    if len(set(chosen.values())) < len(chosen):
        raise InputError(f"ports {', '.join(f'{f} {p}' for f, p in chosen.items())} must differ")
    for flag, port in chosen.items():
        try:
            with socket.create_server((host, port), family=_family(host)):
                pass
        except OSError as error:
            raise ServeError(
                f"port {port} on {host} can't be used ({error.strerror or error}{_holder(port)}); "
                f"stop what listens there, or choose another with {flag} PORT"
            ) from error


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
    """Bytes of the KV pool of each instance among `models`. Engines that move no memory of ours hold none."""
    sizes = {}
    for role in manifest.roles.values():
        config = read_engine_config(build / role.directory)
        block_bytes = config.layout.bytes_per_token * config.layout.tokens_per_block
        for name in role.instances:
            if name in models and config.engine != "tensorrt_llm":
                sizes[name] = config.profile.kv_blocks * block_bytes
    return sizes


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _holder(port: int) -> str:
    """Who listens there, if it may be known."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr.port == port:
                return f", held by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
