"""Finds this host's GPUs: through CUDA and NVML where cuda-python and a driver are, else by the driver's own files.
Makes no CUDA context."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from trtpd.build.gpu_topology import GpuDevice, Link, Topology

DRIVER_FILES = Path("/proc/driver/nvidia")
SYSFS = Path("/sys")
NO_DRIVER = "no NVIDIA driver here"
_NAME_BYTES = 256
_PCI_BYTES = 64
_PCI_CHARS = len("0000:17:00.0")

Relation = Callable[[GpuDevice, GpuDevice], bool]


class ProbeError(Exception):
    """CUDA can't be asked."""


class CudaError(ProbeError):
    """CUDA was asked and answers with an error."""


@cache
def find_gpus() -> Topology:
    """The GPUs this process may use (CUDA_VISIBLE_DEVICES counts), in CUDA's order. Looked for once; without a driver
    there are none, and `remark` says why."""
    return read_gpus()


def read_gpus(*, driver_files: Path = DRIVER_FILES, sysfs: Path = SYSFS) -> Topology:
    """As find_gpus, anew."""
    try:
        return read_cuda(_module("driver"), _nvml(), sysfs=sysfs)
    except CudaError as error:
        return Topology(node_cores=node_cores(sysfs), remark=str(error))
    except ProbeError as error:
        listed = listed_gpus(driver_files, sysfs)
        if not listed:
            return Topology(node_cores=node_cores(sysfs), remark=str(error) if driver_files.exists() else NO_DRIVER)
        links = _links(listed, sysfs, nvlinked=lambda a, b: False, reaches=lambda a, b: True)
        remark = f"NVLink isn't known: {error}"
        return Topology(devices=listed, links=links, node_cores=node_cores(sysfs), remark=remark)


def listed_gpus(driver_files: Path = DRIVER_FILES, sysfs: Path = SYSFS) -> tuple[GpuDevice, ...]:
    """What the NVIDIA driver's own files say, in the order of bus addresses; CUDA_VISIBLE_DEVICES doesn't count."""
    found = []
    for path in sorted(driver_files.glob("gpus/*/information")):
        pairs = (line.partition(":") for line in path.read_text().splitlines())
        words = {key.strip(): value.strip() for key, _, value in pairs}
        if "Model" in words:
            pci, name = path.parent.name, words.get("GPU UUID", "")
            # Until a GPU has been used the driver writes question marks for its number.
            known = name if "?" not in name else ""
            found.append(GpuDevice(name=words["Model"], uuid=known, pci=pci, node=_node_of(pci, sysfs)))
    return tuple(found)


def read_cuda(driver: Any, nvml: Any | None, *, sysfs: Path, environ: Mapping[str, str] = os.environ) -> Topology:
    """What the two bindings of cuda-python say (nvml None: only the first). Raises ProbeError."""
    with _initialised(driver, nvml) as (driver, nvml):
        handles = [_ask(driver.cuDeviceGet(index)) for index in range(_ask(driver.cuDeviceGetCount()))]
        plain = [_device(driver, handle, sysfs) for handle in handles]
        by_uuid = {device.uuid: handle for device, handle in zip(plain, handles, strict=True)}

        def peer(attribute: Any, one: GpuDevice, other: GpuDevice) -> bool:
            return bool(_ask(driver.cuDeviceGetP2PAttribute(attribute, by_uuid[one.uuid], by_uuid[other.uuid])))

        kinds = driver.CUdevice_P2PAttribute
        devices, remark = tuple(plain), ""
        if nvml is None:
            # Of all links between GPUs only NVLink carries atomic operations.
            nvlinked = partial(peer, kinds.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)
            remark = "NVML isn't there: NVLink is told by CUDA's peer attributes, free memory isn't known"
        else:
            known = [_with_free(nvml, device) for device in plain]
            devices = _with_mig(nvml, known, environ.get("CUDA_VISIBLE_DEVICES"), sysfs)
            nvlinked = partial(_nvml_linked, nvml)
        reaches = partial(peer, kinds.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)
        links = _links(devices, sysfs, nvlinked, reaches)
    return Topology(devices=devices, links=links, node_cores=node_cores(sysfs), remark=remark)


def node_cores(sysfs: Path = SYSFS) -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node that this process may use."""
    allowed = os.sched_getaffinity(0)
    found = {}
    for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist"):
        cores = tuple(core for core in _cpu_list(path.read_text()) if core in allowed)
        found[int(path.parent.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def pci_link(one: str, other: str, sysfs: Path = SYSFS) -> Link:
    """What lies between two bus addresses, by the tree of bridges above them."""
    above = [_bridges(pci, sysfs) for pci in (one, other)]
    if above[0] and above[1] and above[0][0] == above[1][0]:
        return Link.SWITCH if above[0][1:2] == above[1][1:2] != () else Link.BRIDGE
    nodes = [_node_of(pci, sysfs) for pci in (one, other)]
    return Link.NODE if nodes[0] == nodes[1] and nodes[0] is not None else Link.SYSTEM


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except (ImportError, RuntimeError, OSError) as error:
        raise ProbeError(f"cuda-python can't be used ({error})") from error


def _nvml() -> Any | None:
    """NVML's binding; cuda-python has it from 12.9 on."""
    try:
        return _module("nvml")
    except ProbeError:
        return None


@contextmanager
def _initialised(driver: Any, nvml: Any | None) -> Iterator[tuple[Any, Any | None]]:
    try:
        _ask(driver.cuInit(0))
    except (RuntimeError, OSError) as error:  # its library can't be loaded
        raise ProbeError(f"CUDA's library can't be loaded ({error})") from error
    if nvml is not None:
        try:
            nvml.init_v2()
        except (RuntimeError, OSError, nvml.NvmlError):
            nvml = None
    try:
        yield driver, nvml
    finally:
        if nvml is not None:
            nvml.shutdown()


def _ask(answer: tuple[Any, ...]) -> Any:
    """The value in a CUDA answer. Raises CudaError with the code's name."""
    code, *values = answer
    if int(code) != 0:
        raise CudaError(f"CUDA answers {getattr(code, 'name', code)}")
    return values[0] if values else None


def _device(driver: Any, handle: Any, sysfs: Path) -> GpuDevice:
    kind = driver.CUdevice_attribute
    major, minor = (
        _ask(driver.cuDeviceGetAttribute(attribute, handle))
        for attribute in (
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    name = _text(_ask(driver.cuDeviceGetName(_NAME_BYTES, handle)))
    mig = " MIG " in f"{name} "
    # Before CUDA 13 the plain call gives the whole GPU's name for a MIG instance.
    number = _ask(getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)(handle)).bytes
    pci = _text(_ask(driver.cuDeviceGetPCIBusId(_PCI_BYTES, handle))).lower()
    return GpuDevice(
        name=name,
        uuid=f"{'MIG' if mig else 'GPU'}-{uuid.UUID(bytes=bytes(number))}",
        pci=pci,
        sm=10 * major + minor,
        memory_bytes=_ask(driver.cuDeviceTotalMem(handle)),
        node=_node_of(pci, sysfs),
        mig=mig,
    )


def _text(raw: bytes | str) -> str:
    return (raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw).rstrip("\0")


def _with_free(nvml: Any, device: GpuDevice) -> GpuDevice:
    if device.mig:
        return device
    try:
        memory = nvml.device_get_memory_info_v2(nvml.device_get_handle_by_pci_bus_id_v2(device.pci))
    except nvml.NvmlError:
        return device
    return replace(device, free_bytes=int(memory.free))


def _with_mig(nvml: Any, devices: list[GpuDevice], visible: str | None, sysfs: Path) -> tuple[GpuDevice, ...]:
    """CUDA shows a process one MIG instance at most; NVML knows them all. `visible` are the names in
    CUDA_VISIBLE_DEVICES."""
    named = None if visible is None else [part.strip() for part in visible.split(",") if part.strip()]
    instances = [
        instance
        for index in range(nvml.device_get_count_v2())
        for instance in _mig_instances(nvml, index, sysfs)
        if named is None or any(instance.uuid.startswith(part) for part in named)
    ]
    return tuple([device for device in devices if not (device.mig and instances)] + instances)


def _mig_instances(nvml: Any, gpu: int, sysfs: Path) -> Iterator[GpuDevice]:
    try:
        handle = nvml.device_get_handle_by_index_v2(gpu)
        current, _ = nvml.device_get_mig_mode(handle)
        count = nvml.device_get_max_mig_device_count(handle) if current else 0
    except nvml.NvmlError:  # a GPU without MIG, or not for this container
        return
    for index in range(count):
        try:
            instance = nvml.device_get_mig_device_handle_by_index(handle, index)
            memory = nvml.device_get_memory_info_v2(instance)
        except nvml.NvmlError:  # none of that number
            continue
        major, minor = nvml.device_get_cuda_compute_capability(handle)
        pci = _text(nvml.device_get_pci_info_v3(handle).bus_id).lower()[-_PCI_CHARS:]
        yield GpuDevice(
            name=_text(nvml.device_get_name(instance)),
            uuid=_text(nvml.device_get_uuid(instance)),
            pci=pci,
            sm=10 * major + minor,
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            node=_node_of(pci, sysfs),
            mig=True,
        )


def _nvml_linked(nvml: Any, one: GpuDevice, other: GpuDevice) -> bool:
    try:
        handles = [nvml.device_get_handle_by_pci_bus_id_v2(device.pci) for device in (one, other)]
        status = nvml.device_get_p2p_status(*handles, nvml.GpuP2PCapsIndex.P2P_CAPS_INDEX_NVLINK)
    except nvml.NvmlError:
        return False
    return int(status) == int(nvml.GpuP2PStatus.P2P_STATUS_OK)


def _links(
    devices: tuple[GpuDevice, ...], sysfs: Path, nvlinked: Relation, reaches: Relation
) -> tuple[tuple[Link, ...], ...]:
    def link(one: GpuDevice, other: GpuDevice) -> Link:
        if one is other:
            return Link.SELF
        if one.mig or other.mig:
            return Link.NODE if one.node == other.node else Link.SYSTEM
        if nvlinked(one, other):
            return Link.NVLINK
        found = pci_link(one.pci, other.pci, sysfs)
        return found if reaches(one, other) else max(found, Link.NODE)

    return tuple(tuple(link(one, other) for other in devices) for one in devices)


def _bridges(pci: str, sysfs: Path) -> tuple[str, ...]:
    """The host bridge and the bridges below it that lead to a device."""
    path = sysfs / "bus/pci/devices" / pci.lower()
    if not path.exists():
        return ()
    parts = path.resolve().parts
    roots = [index for index, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[-1] : -1] if roots else ()


def _node_of(pci: str, sysfs: Path) -> int | None:
    """A device's NUMA node; on a host that has only one, that one."""
    nodes = [int(path.name.removeprefix("node")) for path in sysfs.glob("devices/system/node/node[0-9]*")]
    try:
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    if node >= 0:
        return node
    return nodes[0] if len(nodes) == 1 else None


def _cpu_list(text: str) -> Iterator[int]:
    """Numbers in "0-3,8"."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip():
            yield from range(int(first), int(last or first) + 1)
