"""Gives the instances of a build the GPUs of this host before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtpd.build.gpu_placement import GpuGroup, place_groups, remarks_on
from trtpd.build.gpu_topology import Topology, describe_devices
from trtpd.build.manifest import EngineConfig, Manifest, read_engine_config
from trtpd.runtime.worker.gpus import GpuBinding
from trtpd.runtime.worker.mpirun import hosts_of

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Bindings:
    """By instance name; `remarks` are single lines for the user."""

    by_instance: dict[str, GpuBinding] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def on_gpus(manifest: Manifest) -> bool:
    """Whether any role's engine runs on GPUs."""
    return any(entry.engine == "tensorrt_llm" for entry in manifest.roles.values())


def bind_groups(build: Path, manifest: Manifest, models: Sequence[str], topology: Topology) -> Bindings:
    """Places those of `models` whose engine runs on GPUs. Where no GPU is known nothing is bound, and the engine
    takes what it finds or says what it lacks. Raises InputError if there are too few, EngineError as
    read_engine_config."""
    groups, remarks, shares = [], [], []
    for entry in manifest.roles.values():
        config = read_engine_config(build / entry.directory)
        names = [name for name in entry.instances if name in models]
        if config.tensorrt_llm is None or not names:
            continue
        if hosts_of(manifest.settings, config.role) is not None:
            remarks.append(
                f"{', '.join(names)}: over several hosts, so its ranks' GPUs are left to mpirun's environment"
            )
            continue
        shares.append(_sharing(config))
        groups += [GpuGroup(name=name, role=config.role, ranks=config.tp, sm=_sm(config)) for name in names]
    if not groups:
        return Bindings(remarks=tuple(remarks))
    if not topology.devices:
        return Bindings(remarks=(*remarks, f"no GPU is bound: {topology.remark}"))
    placed = place_groups(topology, groups, per_device=min(shares))
    bound = {name: _binding(topology, devices) for name, devices in placed.items()}
    remarks += [_says(topology, name, devices) for name, devices in placed.items()]
    return Bindings(bound, (*remarks, *remarks_on(topology, placed)))


def _sharing(config: EngineConfig) -> int:
    """Groups that a GPU holds: each takes its share of the memory that is free when it starts."""
    assert config.tensorrt_llm is not None
    return int(1 / config.tensorrt_llm.free_gpu_memory_fraction + _ROUNDING)


def _sm(config: EngineConfig) -> int | None:
    """The capability that compiled engines are bound to."""
    settings = config.tensorrt_llm
    return settings.sm if settings is not None and settings.mode == "engine" else None


def _binding(topology: Topology, devices: tuple[int, ...]) -> GpuBinding:
    names = [device.uuid or str(index) for index, device in enumerate(topology.devices)]
    return GpuBinding(
        devices=tuple(names[index] for index in devices),
        rank_cores=tuple(topology.cores_near(index) for index in devices),
        links=tuple((names[other], topology.worst(devices, (other,)).word) for other in range(len(names))),
    )


def _says(topology: Topology, name: str, devices: tuple[int, ...]) -> str:
    chosen = Topology(devices=tuple(topology.devices[index] for index in devices))
    return f"{name}: GPU {', '.join(map(str, devices))} ({describe_devices(chosen)})"
