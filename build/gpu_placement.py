"""Which GPUs of a host each group of ranks gets. Pure.

A group's ranks exchange activations in every layer, so its GPUs are as near to each other as can be; KV goes from
prefill to decode, so groups of different roles are near each other where that costs the first nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from trtpd.build.gpu_topology import LINK_NAMES, Link, Topology, describe_devices
from trtpd.build.manifest import RoleName
from trtpd.errors import InputError

_OPPOSITE: dict[RoleName, RoleName] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroup:
    """One instance: a GPU for each of its `ranks`, of compute capability `sm` (None: any)."""

    name: str
    role: RoleName
    ranks: int
    sm: int | None = None


def place_groups(topology: Topology, groups: Sequence[GpuGroup], *, per_device: int = 1) -> dict[str, tuple[int, ...]]:
    """Devices of each group by its name, one for each rank in the order of ranks. A device goes to at most
    `per_device` groups, and to a second one only when none is left without.

    Raises InputError if there are too few, with what was asked for and what is there.
    """
    placed: dict[str, tuple[int, ...]] = {}
    uses = [0] * len(topology.devices)
    numbered = sorted(enumerate(groups), key=lambda pair: (-pair[1].ranks, _number_in_role(groups, pair[0]), pair[0]))
    for _, group in numbered:
        fitting = [index for index in _fitting(topology, group) if uses[index] < per_device]
        if len(fitting) < group.ranks:
            raise InputError(_too_few(topology, groups, group, len(fitting), per_device))
        peers = [placed[one.name] for one in groups if one.name in placed and _OPPOSITE.get(one.role) == group.role]
        chosen = min(combinations(fitting, group.ranks), key=lambda some: _cost(topology, some, fitting, peers, uses))
        placed[group.name] = chosen
        for index in chosen:
            uses[index] += 1
    return {group.name: placed[group.name] for group in groups}


def remarks_on(topology: Topology, placed: dict[str, tuple[int, ...]]) -> list[str]:
    """What is worth saying of a placement: groups whose ranks are far from each other."""
    return [
        f"{name}: its GPUs ({', '.join(map(str, devices))}) have {LINK_NAMES[worst]} between them and no NVLink, "
        "which every layer waits for"
        for name, devices in placed.items()
        if (worst := topology.worst(devices, devices)) > Link.NVLINK
    ]


def _number_in_role(groups: Sequence[GpuGroup], index: int) -> int:
    return sum(1 for one in groups[:index] if one.role == groups[index].role)


def _fitting(topology: Topology, group: GpuGroup) -> list[int]:
    """Devices that could be among a group's: the right capability, and peer access where it has several."""
    return [
        index
        for index, device in enumerate(topology.devices)
        if not (device.mig and group.ranks > 1) and (group.sm is None or device.sm in (None, group.sm))
    ]


def _cost(
    topology: Topology,
    some: tuple[int, ...],
    fitting: list[int],
    peers: list[tuple[int, ...]],
    uses: list[int],
) -> tuple[int, ...]:
    """Compared in this order: sharing, links within, links to the nearest and to all groups of the opposite role,
    near devices left over for others, the devices' numbers."""
    within = [topology.links[a][b] for a, b in combinations(some, 2)]
    away = sorted(topology.worst(some, peer) for peer in peers)
    left = [index for index in fitting if index not in some]
    return (
        sum(uses[index] for index in some),
        max(within, default=0),
        sum(within),
        away[0] if away else 0,
        sum(away),
        sum(1 for index in left if min(topology.links[index][one] for one in some) <= Link.SWITCH),
        *some,
    )


def _too_few(topology: Topology, groups: Sequence[GpuGroup], group: GpuGroup, fitting: int, per_device: int) -> str:
    asked = ", ".join(f"{one.name} {one.ranks}" for one in groups)
    total = sum(one.ranks for one in groups)
    here = describe_devices(topology)
    if len(_fitting(topology, group)) >= group.ranks:
        shared = f", each for up to {per_device} groups" if per_device > 1 else ""
        why = f"{fitting} left for {group.name}"
        mend = (
            "lower tp or instances of a pool, serve some of them on another host (--only), or let groups share GPUs by "
            f"a tensorrt_llm.free_gpu_memory_fraction of at most {1 / (per_device + 1):.2f}"
        )
    elif group.ranks > 1 and any(device.mig for device in topology.devices):
        shared, why = "", f"MIG instances, which have no peer access, can't make a group of {group.ranks}"
        mend = "use tp 1, or turn MIG off"
    elif group.sm is not None and any(device.sm not in (None, group.sm) for device in topology.devices):
        shared, why = "", f"{fitting} of them SM {group.sm}, which {group.name} was built for"
        mend = "build for the GPUs here (tensorrt_llm.gpu), or serve where it fits"
    else:
        shared, why, mend = "", f"too few for {group.name}", "lower its tp, or serve on a host with more GPUs"
    return f"GPUs asked for: {asked} ({total} together{shared}); here: {here}, {why}; {mend}"
