from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.gpu_hosts import Card, Code, CudaDriver, Nvml, write_sysfs

from trtpd.build.gpu_probe import NO_DRIVER, CudaError, listed_gpus, node_cores, pci_link, read_cuda, read_gpus
from trtpd.build.gpu_topology import Link, describe_devices, describe_links

A, B, C, D = "0000:17:00.0", "0000:18:00.0", "0000:2a:00.0", "0000:ca:00.0"
SWITCHED = "pci0000:15/0000:15:01.0/0000:16:00.0"
CORE = min(os.sched_getaffinity(0))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two GPUs below a switch, one below another root port of that socket, one on the other socket."""
    paths = {
        A: (f"{SWITCHED}/0000:16:00.1", 0),
        B: (f"{SWITCHED}/0000:16:00.2", 0),
        C: ("pci0000:15/0000:15:02.0", 0),
        D: ("pci0000:c8/0000:c8:01.0", 1),
    }
    return write_sysfs(tmp_path / "sys", paths, {0: f"{CORE},100000-100001", 1: "100002"})


def test_without_a_driver_there_are_no_gpus_and_the_reason_is_said(tmp_path: Path) -> None:
    found = read_gpus(driver_files=tmp_path / "absent")
    if found.devices:
        pytest.skip("this host has GPUs")
    assert found.remark == NO_DRIVER or found.remark.startswith("CUDA answers")
    assert describe_devices(found) == "no GPU"
    assert sum(map(len, found.node_cores.values())) in (0, len(os.sched_getaffinity(0)))


def test_without_cuda_the_drivers_files_name_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    for pci, number in (("0000:17:00.0", "GPU-8a"), ("0000:2a:00.0", "GPU-????????")):
        folder = tmp_path / "driver/gpus" / pci
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 5\nGPU UUID: \t {number}\n")
    found = read_gpus(driver_files=tmp_path / "driver")
    assert [(one.name, one.uuid, one.pci) for one in found.devices] == [
        ("NVIDIA H200", "GPU-8a", A), ("NVIDIA H200", "", C)
    ]  # fmt: skip
    assert "NVLink isn't known: cuda-python can't be used" in found.remark
    assert listed_gpus(tmp_path / "absent") == ()


def test_what_lies_between_two_gpus_is_read_from_the_tree_of_bridges(sysfs: Path) -> None:
    found = [pci_link(A, other, sysfs) for other in (B, C, D)]
    assert found == [Link.SWITCH, Link.BRIDGE, Link.SYSTEM]
    assert pci_link(A, "0000:ff:00.0", sysfs) == Link.SYSTEM


def test_two_host_bridges_of_one_socket_meet_in_its_memory(tmp_path: Path) -> None:
    tree = write_sysfs(
        tmp_path, {A: ("pci0000:15/0000:15:01.0", 0), C: ("pci0000:27/0000:27:01.0", 0)}, {0: "0", 1: "1"}
    )
    assert pci_link(A, C, tree) == Link.NODE


def test_a_host_of_one_node_need_not_say_which(tmp_path: Path) -> None:
    tree = write_sysfs(tmp_path, {A: ("pci0000:15", -1), D: ("pci0000:c8", -1)}, {0: "0"})
    assert pci_link(A, D, tree) == Link.NODE


def test_cores_of_a_node_are_those_this_process_may_use(sysfs: Path) -> None:
    assert node_cores(sysfs) == {0: (CORE,), 1: ()}


def cards() -> list[Card]:
    return [Card(pci) for pci in (A, B, C, D)]


def test_cuda_and_nvml_give_devices_memory_capability_and_links(sysfs: Path) -> None:
    driver = CudaDriver(cards(), {(0, 2)})
    nvml = Nvml(driver)
    found = read_cuda(driver, nvml, sysfs=sysfs)
    assert [(one.pci, one.node, one.sm, one.free_bytes) for one in found.devices] == [
        (A, 0, 90, 79 << 30), (B, 0, 90, 79 << 30), (C, 0, 90, 79 << 30), (D, 1, 90, 79 << 30)
    ]  # fmt: skip
    assert found.devices[0].uuid == f"GPU-{driver.cards[0].number}"
    assert found.links[0] == (Link.SELF, Link.SWITCH, Link.NVLINK, Link.SYSTEM)
    assert (found.remark, nvml.open) == ("", 0)
    assert describe_devices(found) == "4 x NVIDIA H100 80GB HBM3 (SM 90, 80 GiB)"


@pytest.mark.parametrize("broken", [None, "broken"])
def test_without_nvml_peer_atomics_tell_nvlink(sysfs: Path, broken: str | None) -> None:
    driver = CudaDriver(cards(), {(0, 2)})
    found = read_cuda(driver, Nvml(driver, broken=True) if broken else None, sysfs=sysfs)
    assert found.links[2] == (Link.NVLINK, Link.BRIDGE, Link.SELF, Link.SYSTEM)
    assert found.devices[0].free_bytes is None
    assert found.remark.startswith("NVML isn't there")


def test_gpus_without_peer_access_meet_in_host_memory(sysfs: Path) -> None:
    driver = CudaDriver(cards(), set(), peers=False)
    found = read_cuda(driver, Nvml(driver), sysfs=sysfs)
    assert found.links[0] == (Link.SELF, Link.NODE, Link.NODE, Link.SYSTEM)


@pytest.mark.parametrize(
    ("visible", "names"),
    [({}, ["MIG-1a", "MIG-1b", "MIG-4c"]), ({"CUDA_VISIBLE_DEVICES": "MIG-1b, MIG-4"}, ["MIG-1b", "MIG-4c"])],
)
def test_all_visible_mig_instances_are_found_though_cuda_shows_one(
    sysfs: Path, visible: dict[str, str], names: list[str]
) -> None:
    shown = [Card(A, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", mig=("MIG-1a", "MIG-1b")), Card(D, mig=("MIG-4c",))]
    driver = CudaDriver(shown, set())
    driver.cuDeviceGetCount = lambda: (Code.CUDA_SUCCESS, 1)  # type: ignore[method-assign]
    found = read_cuda(driver, Nvml(driver), sysfs=sysfs, environ=visible)
    assert [one.uuid for one in found.devices] == names
    assert {one.memory_bytes for one in found.devices} == {20 << 30}
    assert found.links[0][-1] == Link.SYSTEM
    assert (found.devices[-1].pci, found.devices[-1].node) == (D, 1)
    assert "MIG instances have no peer access" in describe_links(found)


def test_a_driver_that_fails_is_quoted(sysfs: Path) -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_SYSTEM_NOT_READY"):
        read_cuda(CudaDriver([], set(), code=Code.CUDA_ERROR_SYSTEM_NOT_READY), None, sysfs=sysfs)


def names_of(stand_in: type) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(stand_in).items() if not name.startswith("_")]


@pytest.mark.parametrize(("module", "stand_in"), [("driver", CudaDriver), ("nvml", Nvml)])
def test_the_stand_ins_have_names_and_arguments_of_the_real_ones(module: str, stand_in: type) -> None:
    real = pytest.importorskip(f"cuda.bindings.{module}")
    for name, value in names_of(stand_in):
        there = getattr(real, name)
        if inspect.isfunction(value):
            wanted = list(inspect.signature(value).parameters)[1:]
            assert list(inspect.signature(there).parameters) == wanted, name
        elif name != "NvmlError":
            members = value.__members__ if hasattr(value, "__members__") else vars(value)
            assert all(hasattr(there, key) for key in members), name
            assert all(int(getattr(there, key)) == member for key, member in members.items() if isinstance(member, int))
