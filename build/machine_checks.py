"""Whether a machine holds a deployment: its CPUs, its shared memory, its memory. Pure: one function per concern."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trtpd.build.engines import ENGINES, weights_bytes
from trtpd.build.findings import Deployment, Finding, error, warning
from trtpd.build.machine import Machine
from trtpd.build.resolve import ResolvedRole

_MIB = 1 << 20


def check_cores(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    """CPUs that are not there, that two pools share, or that are fewer than a pool's threads."""
    owner: dict[int, str] = {}
    here = ", ".join(map(str, machine.cores))
    if not ENGINES[deployment.engine].on_cpu:
        return
    for role in deployment.roles:
        where, cores = f"pools.{role.role}.cores", role.profile.cores
        absent = [core for core in cores if core not in machine.cores]
        if absent:
            yield error(
                "cores_missing",
                where,
                (", ".join(map(str, absent)), here),
                f"names CPU {', '.join(map(str, absent))}; this machine lets us use {here}",
                "name CPUs that are there, or leave it at auto",
            )
        if not role.instances:
            continue
        shared = {owner[core]: core for core in cores if core in owner}
        for other, core in shared.items():
            yield warning(
                "cores_shared",
                where,
                (other, role.role),
                f"CPU {core} belongs to {other} as well, so the two slow each other down",
                "give each pool CPUs of its own",
            )
        owner |= dict.fromkeys(cores, role.role)
        share = max(1, len(cores) // len(role.instances))
        if role.profile.threads > share:
            yield warning(
                "threads_over_cores",
                f"pools.{role.role}.threads",
                (role.profile.threads, share),
                f"is {role.profile.threads}, but an instance has {share} of the pool's {len(cores)} CPUs",
                f"set it to {share} or leave it at auto",
            )


def check_room(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    """KV pools and weights of all instances in their own roles."""
    if not ENGINES[deployment.engine].on_cpu:
        return
    pools = sum(len(role.instances) * role.pool_bytes for role in deployment.roles)
    weights = sum(len(role.instances) * _weights_bytes(deployment, role) for role in deployment.roles)
    mend = "lower kv_tokens or the number of instances"
    yield from _fits("shm_room", "the KV pools", "/dev/shm", pools, machine.shm_bytes, machine.shm_free_bytes, mend)
    yield from _fits(
        "memory_room",
        "weights and KV pools",
        "memory",
        weights + pools,
        machine.memory_bytes,
        machine.memory_free_bytes,
        mend,
    )


def _weights_bytes(deployment: Deployment, role: ResolvedRole) -> int:
    """Of one instance, as it holds them."""
    held = "f32" if role.profile.widen_weights else role.precision
    return weights_bytes(deployment.engine, deployment.architecture, held, role.tp)


def check_elastic_room(deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    """The same at the worst that elastic pools can come to: all but one instance in the role that takes more."""
    pair = [role for role in deployment.roles if role.role != "mixed"]
    if not deployment.elastic or len(pair) < 2 or not ENGINES[deployment.engine].on_cpu:
        return
    count = sum(len(role.instances) for role in pair)
    mixed = [role for role in deployment.roles if role.role == "mixed"]
    mend = "lower kv_tokens or the number of instances, or set pools.elastic to false"

    def worst(bytes_of: Callable[[ResolvedRole], int]) -> int:
        small, large = sorted(map(bytes_of, pair))
        return (count - 1) * large + small + sum(len(role.instances) * bytes_of(role) for role in mixed)

    pools = worst(lambda role: role.pool_bytes)
    weights = worst(lambda role: _weights_bytes(deployment, role))
    shm, memory = (machine.shm_bytes, machine.shm_free_bytes), (machine.memory_bytes, machine.memory_free_bytes)
    yield from _fits("elastic_shm_room", "the KV pools, most instances in one role,", "/dev/shm", pools, *shm, mend)
    what = "weights and KV pools, most instances in one role,"
    yield from _fits("elastic_memory_room", what, "memory", weights + pools, *memory, mend)


def _fits(
    code: str, what: str, place: str, needed_bytes: int, total_bytes: int, free_bytes: int, mend: str
) -> Iterator[Finding]:
    """An error if it can never fit; a warning if it doesn't now, since what fills it may be gone by then."""
    needed = f"{needed_bytes // _MIB} MiB"
    if needed_bytes > total_bytes:
        size = f"{total_bytes // _MIB} MiB"
        yield error(code, "pools", (needed, size), f"{what} need {needed}; {place} has {size} in all", mend)
    elif needed_bytes > free_bytes:
        free = f"{free_bytes // _MIB} MiB"
        yield warning(code, "pools", (needed, free), f"{what} need {needed}; {place} has {free} free now", mend)
