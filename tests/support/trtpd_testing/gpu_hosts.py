"""GPU hosts to place groups on: as topologies, and as what cuda-python and the kernel would say of them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trtpd.build.gpu_topology import GpuDevice, Link, Topology


def device(index: int, **changes: Any) -> GpuDevice:
    values: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3", "uuid": f"GPU-{index}", "pci": f"0000:{index:02x}:00.0", "sm": 90,
        "memory_bytes": 80 << 30, "node": 0,
    }  # fmt: skip
    return GpuDevice(**(values | changes))


def host(devices: list[GpuDevice], link: Any) -> Topology:
    """`link(a, b)` of two indexes."""
    count = range(len(devices))
    nodes = sorted({one.node for one in devices if one.node is not None})
    return Topology(
        devices=tuple(devices),
        links=tuple(tuple(Link.SELF if a == b else link(a, b) for b in count) for a in count),
        node_cores={node: tuple(range(4 * node, 4 * node + 4)) for node in nodes},
    )


def dgx(count: int = 8) -> Topology:
    """NVSwitch between all, on two sockets."""
    return host([device(i, node=i * 2 // count) for i in range(count)], lambda a, b: Link.NVLINK)


def islands(count: int = 2, size: int = 4) -> Topology:
    """NVLink within islands, one on each socket."""
    devices = [device(i, node=i // size) for i in range(count * size)]
    return host(devices, lambda a, b: Link.NVLINK if a // size == b // size else Link.SYSTEM)


def pcie() -> Topology:
    """Four L40S: two below a switch on each socket."""
    devices = [device(i, name="NVIDIA L40S", sm=89, memory_bytes=45 << 30, node=i // 2) for i in range(4)]
    return host(devices, lambda a, b: Link.SWITCH if a // 2 == b // 2 else Link.SYSTEM)


def mig(count: int = 3) -> Topology:
    """MIG instances of one GPU."""
    devices = [device(i, name="NVIDIA H100 80GB HBM3 MIG 2g.20gb", uuid=f"MIG-{i}", mig=True) for i in range(count)]
    return host(devices, lambda a, b: Link.NODE)


@dataclass
class Card:
    """One GPU as its driver knows it."""

    pci: str
    name: str = "NVIDIA H100 80GB HBM3"
    sm: int = 90
    number: uuid.UUID = field(default_factory=uuid.uuid4)
    mig: tuple[str, ...] = ()


class Code(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_NOT_READY = 802


class CudaDriver:
    """Answers as `cuda.bindings.driver` does, for the calls that the probe makes. `links` are pairs with NVLink."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor"
    )
    CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED="access", CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics"
    )

    def __init__(
        self, cards: list[Card], links: set[tuple[int, int]], *, code: Code = Code.CUDA_SUCCESS, peers: bool = True
    ) -> None:
        self.cards, self.links, self.code, self.peers = cards, links, code, peers

    def cuInit(self, Flags: int) -> tuple[Code]:
        return (self.code,)

    def cuDeviceGetCount(self) -> tuple[Code, int]:
        return Code.CUDA_SUCCESS, len(self.cards)

    def cuDeviceGet(self, ordinal: int) -> tuple[Code, int]:
        return Code.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, dev: int) -> tuple[Code, bytes]:
        return Code.CUDA_SUCCESS, self.cards[dev].name.encode().ljust(length, b"\0")

    def cuDeviceGetUuid(self, dev: int) -> tuple[Code, Any]:
        return Code.CUDA_SUCCESS, SimpleNamespace(bytes=self.cards[dev].number.bytes)

    def cuDeviceTotalMem(self, dev: int) -> tuple[Code, int]:
        return Code.CUDA_SUCCESS, 80 << 30

    def cuDeviceGetAttribute(self, attrib: str, dev: int) -> tuple[Code, int]:
        return Code.CUDA_SUCCESS, divmod(self.cards[dev].sm, 10)[attrib == "minor"]

    def cuDeviceGetPCIBusId(self, length: int, dev: int) -> tuple[Code, bytes]:
        return Code.CUDA_SUCCESS, self.cards[dev].pci.upper().encode().ljust(length, b"\0")

    def cuDeviceGetP2PAttribute(self, attrib: str, srcDevice: int, dstDevice: int) -> tuple[Code, int]:
        linked = (min(srcDevice, dstDevice), max(srcDevice, dstDevice)) in self.links
        return Code.CUDA_SUCCESS, int(linked or (self.peers and attrib == "access"))


class Nvml:
    """Answers as `cuda.bindings.nvml` does. Handles are (card, MIG instance or None)."""

    class NvmlError(Exception):
        pass

    class GpuP2PCapsIndex(IntEnum):
        P2P_CAPS_INDEX_NVLINK = 2

    class GpuP2PStatus(IntEnum):
        P2P_STATUS_OK = 0
        P2P_STATUS_NOT_SUPPORTED = 5

    def __init__(self, driver: CudaDriver, *, broken: bool = False) -> None:
        self.driver, self.broken, self.open = driver, broken, 0

    def init_v2(self) -> None:
        if self.broken:
            raise self.NvmlError("Driver/library version mismatch")
        self.open += 1

    def shutdown(self) -> None:
        self.open -= 1

    def device_get_count_v2(self) -> int:
        return len(self.driver.cards)

    def device_get_handle_by_index_v2(self, index: int) -> Any:
        return index, None

    def device_get_handle_by_pci_bus_id_v2(self, pci_bus_id: str) -> Any:
        return [card.pci for card in self.driver.cards].index(pci_bus_id), None

    def device_get_memory_info_v2(self, device: Any) -> Any:
        return SimpleNamespace(total=20 << 30, free=(20 if device[1] is not None else 79) << 30)

    def device_get_p2p_status(self, device1: Any, device2: Any, p2p_index: int) -> int:
        pair = min(device1[0], device2[0]), max(device1[0], device2[0])
        return 0 if pair in self.driver.links else 5

    def device_get_mig_mode(self, device: Any) -> tuple[int, int]:
        card = self.driver.cards[device[0]]
        if card.sm < 80:
            raise self.NvmlError("Not Supported")
        return int(bool(card.mig)), int(bool(card.mig))

    def device_get_max_mig_device_count(self, device: Any) -> int:
        return 7

    def device_get_mig_device_handle_by_index(self, device: Any, index: int) -> Any:
        if index >= len(self.driver.cards[device[0]].mig):
            raise self.NvmlError("Not Found")
        return device[0], index

    def device_get_cuda_compute_capability(self, device: Any) -> tuple[int, int]:
        return divmod(self.driver.cards[device[0]].sm, 10)

    def device_get_pci_info_v3(self, device: Any) -> Any:
        return SimpleNamespace(bus_id=f"0000{self.driver.cards[device[0]].pci.upper()}")

    def device_get_name(self, device: Any) -> str:
        return f"{self.driver.cards[device[0]].name} MIG 1g.10gb"

    def device_get_uuid(self, device: Any) -> str:
        return self.driver.cards[device[0]].mig[device[1]]


def write_sysfs(root: Path, paths: dict[str, tuple[str, int]], cpus: dict[int, str]) -> Path:
    """A /sys in which each bus address has bridges above it ("pci0000:15/0000:15:01.0") and a NUMA node (-1: not
    said), and each node its CPUs."""
    for pci, (bridges, node) in paths.items():
        folder = root / "devices" / bridges / pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        listed = root / "bus/pci/devices"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / pci).symlink_to(folder)
    for node, text in cpus.items():
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
        (root / f"devices/system/node/node{node}/cpulist").write_text(f"{text}\n")
    return root
