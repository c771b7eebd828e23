"""Where a measurement was made: what a reader needs to judge it or to make it again."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

import msgspec
import psutil

from trtpd.build.machine import cpu_name

BUSY_SHARE = 0.5
"""Of the CPUs, in the load average."""
PACKAGES = ("trtpd", "openvino", "nvidia-pytriton", "tritonclient", "grpcio", "aiohttp", "numpy")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """`load_average`: of the last minute when the run began; what else ran here is in it."""

    made_at: str
    cpu: str
    cpus: int
    cpus_usable: int
    memory_gib: float
    system: str
    python: str
    packages: dict[str, str]
    load_average: float

    @property
    def load_remarks(self) -> list[str]:
        """What a reader must know of other work."""
        if self.load_average <= BUSY_SHARE * self.cpus_usable:
            return []
        return [f"The load average was {self.load_average:g} when the run began: other work ran here."]


def this_environment() -> Environment:
    """As it is now."""
    return Environment(
        made_at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        cpu=cpu_name(),
        cpus=os.cpu_count() or 1,
        cpus_usable=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / (1 << 30), 1),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := _version(name))},
        load_average=round(os.getloadavg()[0], 2),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
