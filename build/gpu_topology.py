"""The GPUs of one host and how near they are to each other. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

GIB = 1 << 30


class Link(IntEnum):
    """What lies between two GPUs, nearest first. In brackets what `nvidia-smi topo -m` calls it."""

    SELF = 0
    NVLINK = 1
    """NVLink, direct or through an NVSwitch (NV#)."""
    SWITCH = 2
    """PCIe bridges below one root port (PIX, PXB)."""
    BRIDGE = 3
    """One PCIe host bridge (PHB)."""
    NODE = 4
    """The memory of one NUMA node (NODE), or no peer access at all."""
    SYSTEM = 5
    """The link between sockets (SYS)."""

    @property
    def word(self) -> str:
        """Its name as plain data, for peers."""
        return self.name.lower()


LINK_NAMES = {
    Link.NVLINK: "NVLink",
    Link.SWITCH: "a PCIe switch",
    Link.BRIDGE: "a PCIe host bridge",
    Link.NODE: "host memory",
    Link.SYSTEM: "host memory across sockets",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One GPU, or one MIG instance of one. `uuid` is what CUDA_VISIBLE_DEVICES takes, `sm` the compute capability
    (90 for 9.0), `node` its NUMA node. What isn't known is None."""

    name: str
    uuid: str
    pci: str = ""
    sm: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    node: int | None = None
    mig: bool = False

    def __str__(self) -> str:
        sizes = [] if self.sm is None else [f"SM {self.sm}"]
        if self.memory_bytes is not None:
            sizes.append(f"{self.memory_bytes / GIB:.0f} GiB")
        return f"{self.name}{' (' + ', '.join(sizes) + ')' if sizes else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What was found. `links[a][b]` lies between devices a and b; `node_cores` are the CPUs of each NUMA node that
    this process may use. `remark` says why something isn't known, empty if all is."""

    devices: tuple[GpuDevice, ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()
    node_cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    remark: str = ""

    def worst(self, some: tuple[int, ...], others: tuple[int, ...]) -> Link:
        """The farthest between any of `some` and any of `others`, a device and itself left out."""
        return max((self.links[a][b] for a in some for b in others if a != b), default=Link.SELF)

    def cores_near(self, device: int) -> tuple[int, ...]:
        """CPUs of the device's NUMA node; empty: any."""
        node = self.devices[device].node
        return () if node is None else self.node_cores.get(node, ())

    def islands(self) -> list[tuple[int, ...]]:
        """Devices that reach each other over NVLink, islands of one left out."""
        left, found = set(range(len(self.devices))), []
        while left:
            island, edge = set(), {left.pop()}
            while edge:
                island |= edge
                edge = {b for b in left for a in edge if self.links[a][b] is Link.NVLINK}
                left -= edge
            if len(island) > 1:
                found.append(tuple(sorted(island)))
        return sorted(found)


def describe_devices(topology: Topology) -> str:
    """All devices in a few words, alike ones counted."""
    counted: dict[str, int] = {}
    for device in topology.devices:
        counted[str(device)] = counted.get(str(device), 0) + 1
    return ", ".join(f"{count} x {text}" for text, count in counted.items()) or "no GPU"


def describe_links(topology: Topology) -> str:
    """How the devices are linked, in a few words."""
    count = len(topology.devices)
    if count < 2:
        return "nothing to link"
    if any(device.mig for device in topology.devices):
        return "MIG instances have no peer access: KV and groups go through host memory"
    everyone = tuple(range(count))
    islands = topology.islands()
    if islands == [everyone]:
        direct = topology.worst(everyone, everyone) is Link.NVLINK
        return "NVLink between all" if direct else "NVLink between all, some over others"
    within = [f"NVLink within {_run(island)}" for island in islands]
    parts = islands + [(one,) for one in everyone if not any(one in island for island in islands)]
    between = [LINK_NAMES[topology.worst(a, b)] for i, a in enumerate(parts) for b in parts[i + 1 :]]
    rest = " or ".join(dict.fromkeys(between))
    return "; ".join([*within, f"{rest} between {'them' if within else 'all'}"])


def _run(numbers: tuple[int, ...]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first}-{last}" if numbers == tuple(range(first, last + 1)) else ",".join(map(str, numbers))
