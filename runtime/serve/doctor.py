"""What this machine has for which engine, and the mend for what is missing. Reads only; starts nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trtpd.build.gpu_probe import NO_DRIVER, find_gpus
from trtpd.build.gpu_topology import Topology, describe_devices, describe_links
from trtpd.build.machine import this_machine
from trtpd.kv_transfer.pool import leftovers
from trtpd.runtime.serve import rundir

PYTRITON_VERSION = "0.7.0"
GIB = 1 << 30
BLOCK_BYTES = 512
"""What stat counts in."""
LEFTOVERS_NAMED = 3
_LEFT_BY = "room for others: what servers that were killed left in /tmp and /dev/shm"
NGC_SERVER = Path("/opt/tritonserver/bin/tritonserver")
Status = Literal["ok", "missing", "limited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. `needed_for` names engines or features; `mend` is empty when all is well."""

    name: str
    status: Status
    found: str
    needed_for: str
    mend: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def version_of(distribution: str) -> str | None:
    """Installed version of a Python distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> list[Check]:
    """All checks, in the order of importance for a first run."""
    return [
        _python(),
        *_machine(),
        _triton(),
        _leftovers(),
        _distribution("tokenizers", needed_for="text in and out"),
        _mpi(),
        _nixl(),
        *_gpu(),
        _distribution("cuda-python", needed_for="binding groups to GPUs", optional=True),
        _distribution("tensorrt_llm", needed_for="engine tensorrt_llm", extra="tensorrt-llm", optional=True),
        _distribution("tensorrt", needed_for="engine tensorrt_llm", extra="tensorrt-llm", optional=True),
    ]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    known = (3, 11) <= sys.version_info[:2] <= (3, 13)
    mend = "" if known else "use CPython 3.11 to 3.13: the packaged Triton has stubs for these"
    return Check(name="python", status="ok" if known else "limited", found=version, needed_for="everything", mend=mend)


def _machine() -> list[Check]:
    openvino = version_of("openvino")
    machine = this_machine(openvino=openvino is not None)
    cores, free, shm = len(machine.cores), machine.memory_free_bytes, machine.shm_free_bytes
    arithmetic = "bf16 arithmetic" if machine.bf16 else "no bf16 arithmetic: KV cache and sums are f32"
    return [
        Check(
            name="cores",
            status="ok" if cores >= 2 else "limited",
            found=f"{cores} usable",
            needed_for="a core each for prefill and decode",
            mend="" if cores >= 2 else "with one core the roles share it: expect no gain from two pools",
        ),
        Check(
            name="memory",
            status="ok" if free > 3 * GIB else "limited",
            found=f"{free / GIB:.1f} GiB free of {machine.memory_bytes / GIB:.1f}",
            needed_for="weights once per instance, KV pools",
            mend="" if free > 3 * GIB else "use precision int8 or fewer instances",
        ),
        Check(
            name="/dev/shm",
            status="ok" if shm > GIB else "limited",
            found=f"{shm / GIB:.1f} GiB free of {machine.shm_bytes / GIB:.1f}",
            needed_for="KV pools and Triton's buffers",
            mend="" if shm > GIB else "give it room (docker run --shm-size=4g) or lower pools.*.kv_tokens",
        ),
        Check(
            name="openvino",
            status="ok" if openvino else "missing",
            found=openvino or "not installed",
            needed_for="engine openvino",
            mend="" if openvino else "pip install . in trtpd's source folder",
        ),
        Check(
            name="cpu",
            status="ok",
            found=f"{arithmetic} ({', '.join(machine.cpu_features)})",
            needed_for="engine openvino",
        ),
    ]


def _triton() -> Check:
    wheel = version_of("nvidia-pytriton")
    if wheel == PYTRITON_VERSION:
        return Check(name="triton", status="ok", found=f"nvidia-pytriton {wheel} (server 2.51)", needed_for="serve")
    if NGC_SERVER.exists():
        return Check(name="triton", status="ok", found=str(NGC_SERVER), needed_for="serve")
    mend = f"pip install nvidia-pytriton=={PYTRITON_VERSION}, or run inside a Triton container"
    if wheel:
        return Check(name="triton", status="limited", found=f"nvidia-pytriton {wheel}", needed_for="serve", mend=mend)
    return Check(name="triton", status="missing", found="no server", needed_for="serve", mend=mend)


def _leftovers() -> Check:
    """Only shown: what looks left behind from here may be in use in another container, whose servers alone can tell."""
    paths = [path for path in (*rundir.leftovers(), *leftovers()) if os.access(path, os.W_OK)]
    if not paths:
        return Check(name="leftovers", status="ok", found="none", needed_for=_LEFT_BY)
    more = f" and {len(paths) - LEFTOVERS_NAMED} more" if len(paths) > LEFTOVERS_NAMED else ""
    named = ", ".join(map(str, paths[:LEFTOVERS_NAMED])) + more
    return Check(
        name="leftovers",
        status="limited",
        found=f"{sum(map(_size_bytes, paths)) / 1e6:,.1f} MB: {named}",
        needed_for=_LEFT_BY,
        mend="the next `trtpd serve` removes them",
    )


def _size_bytes(path: Path) -> int:
    size_bytes = 0
    for file in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):  # it may go meanwhile
            size_bytes += file.lstat().st_blocks * BLOCK_BYTES
    return size_bytes


def _mpi() -> Check:
    binding, launcher = version_of("mpi4py"), shutil.which("mpirun")
    beside = Path(sys.executable).parent / "mpirun"
    launcher = launcher or (str(beside) if beside.exists() else None)
    found = f"mpi4py {binding or 'not installed'}, mpirun {launcher or 'not found'}"
    complete = bool(binding and launcher)
    return Check(
        name="mpi",
        status="ok" if complete else "missing",
        found=found,
        needed_for="tensor parallelism (tp > 1)",
        mend=""
        if complete
        else "pip install '.[mpi]' in trtpd's source folder, or load the site's MPI and pip install mpi4py against it",
    )


def _distribution(name: str, *, needed_for: str, extra: str = "", optional: bool = False) -> Check:
    version = version_of(name)
    mend = "" if version else (f"pip install '.[{extra}]' in trtpd's source folder" if extra else f"pip install {name}")
    status: Status = "ok" if version else "missing"
    if not version and optional:
        mend += " (optional)"
    return Check(name=name, status=status, found=version or "not installed", needed_for=needed_for, mend=mend)


def _nixl() -> Check:
    version = version_of("nixl-cu12")
    return Check(
        name="nixl",
        status="ok" if version else "missing",
        found=version or "not installed",
        needed_for="transfer over nixl (other hosts, RDMA)",
        mend="" if version else "pip install --no-deps nixl-cu12==1.5.1 (optional; it needs no torch here)",
    )


def _gpu() -> list[Check]:
    topology = find_gpus()
    if not topology.devices:
        mend = "use engine openvino here, or a host with an NVIDIA GPU and driver (in a container: --gpus all)"
        if topology.remark != NO_DRIVER:
            mend = "see CUDA_VISIBLE_DEVICES, `nvidia-smi` and `dmesg`; with NVSwitch nvidia-fabricmanager must run"
        return [
            Check(
                name="gpu",
                status="missing",
                found=topology.remark or "no GPU",
                needed_for="engine tensorrt_llm",
                mend=mend,
            )
        ]
    free = [f"{device.free_bytes / GIB:.0f}" for device in topology.devices if device.free_bytes is not None]
    found = describe_devices(topology) + (f", {' '.join(free)} GiB free" if free else "")
    return [
        Check(name="gpu", status="ok", found=found, needed_for="engine tensorrt_llm"),
        Check(
            name="gpu links",
            status="limited" if topology.remark else "ok",
            found=describe_links(topology) + (f" ({topology.remark})" if topology.remark else ""),
            needed_for="placing a group's ranks near each other, and decode near its prefill",
            mend="pip install 'cuda-python>=12.9' (and a driver that has NVML)" if topology.remark else "",
        ),
        Check(name="gpu cores", status="ok", found=_near_cores(topology), needed_for="binding ranks near their GPUs"),
    ]


def _near_cores(topology: Topology) -> str:
    by_node: dict[int | None, list[str]] = {}
    for index, device in enumerate(topology.devices):
        by_node.setdefault(device.node, []).append(str(index))
    return "; ".join(
        f"GPU {' '.join(indexes)}: "
        + ("any core" if node is None else f"NUMA node {node}, {len(topology.node_cores.get(node, ()))} cores")
        for node, indexes in by_node.items()
    )
