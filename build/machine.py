"""What this machine has: cores, memory, room in /dev/shm, and what its CPU can compute with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import psutil

from trtpd.build.gpu_probe import find_gpus
from trtpd.errors import EngineError

SHM = Path("/dev/shm")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

_CPU_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "sve",
)  # fmt: skip
_OPENVINO_CAPABILITIES = {"BF16": "bf16", "FP16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host as seen by this process: `cores` are those its affinity allows, memory is bounded by its
    cgroup.

    `cpu_features` are lower-case names; "bf16" and "fp16" among them say that OpenVINO computes in that type
    here. `gpus` are the models of those it may use, as the NVIDIA driver calls them, `tensorrt_llm` the installed
    version.
    """

    cores: tuple[int, ...]
    memory_bytes: int
    memory_free_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    cpu_features: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    tensorrt_llm: str = "none"

    @property
    def bf16(self) -> bool:
        return "bf16" in self.cpu_features


def this_machine(*, openvino: bool) -> Machine:
    """Looks around. With `openvino` the features OpenVINO sees are asked for (which imports it, 0.3 s).

    Raises EngineError if OpenVINO is asked for and can't be imported.
    """
    memory = psutil.virtual_memory()
    limit = _cgroup_limit_bytes()
    total = memory.total if limit is None else min(memory.total, limit)
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=total,
        memory_free_bytes=min(memory.available, total),
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        cpu_features=cpu_features(openvino=openvino),
        gpus=tuple(device.name for device in find_gpus().devices),
        tensorrt_llm=installed_version("tensorrt_llm"),
    )


@cache
def cpu_features(*, openvino: bool) -> tuple[str, ...]:
    """The features of this CPU that matter to an engine, sorted. Raises as `this_machine`."""
    flags = set(_cpu_flags()) & set(_CPU_FLAGS)
    return tuple(sorted(flags | _openvino_features() if openvino else flags))


@cache
def installed_version(package: str) -> str:
    """A package's installed version, "none" if it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@cache
def cpu_name() -> str:
    """What the CPU calls itself, "unknown" where it doesn't say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def _cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return value.split()
    return []


def import_openvino() -> ModuleType:
    """The openvino package. Importing it sends a usage report over the network unless its telemetry package
    can't be found, so that one is hidden first. Raises EngineError if openvino is missing."""
    if "openvino" not in sys.modules:
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        raise EngineError(
            f"the openvino engine needs the openvino package, which can't be imported ({error}); reinstall trtpd"
        ) from error
    module: ModuleType = openvino
    return module


def _openvino_features() -> set[str]:
    found = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {_OPENVINO_CAPABILITIES[name] for name in found if name in _OPENVINO_CAPABILITIES}


def _cgroup_limit_bytes() -> int | None:
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None
