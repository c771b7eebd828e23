"""The GPUs and CPUs that the launcher gave an instance, as they reach its ranks through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from trtpd.errors import EngineError

GPUS_VARIABLE = "TRTPD_GPUS"
"""Of the launcher for its stage models: a GpuBinding by instance name, as JSON."""

BINDING_VARIABLE = "TRTPD_GPU_BINDING"
"""Of a stage model for the ranks of its instance: their GpuBinding, as JSON."""

_Kind = TypeVar("_Kind")


class GpuBinding(msgspec.Struct, frozen=True, kw_only=True):
    """`devices` are named as CUDA_VISIBLE_DEVICES takes them, one for each rank in the order of ranks. `rank_cores` are
    the CPUs near each (empty: any). `links` say by device name what lies between this instance and each GPU of its
    host (see Hello)."""

    devices: tuple[str, ...] = ()
    rank_cores: tuple[tuple[int, ...], ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    def environment(self) -> dict[str, str]:
        """What the instance's ranks need: they see its devices and no others, all of them, since a rank reaches its
        peers' memory by their numbers."""
        if not self.devices:
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
            BINDING_VARIABLE: msgspec.json.encode(self).decode(),
        }

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """The CPUs for one rank that it may use; empty: any."""
        cores = self.rank_cores[rank] if rank < len(self.rank_cores) else ()
        return tuple(sorted(set(cores) & os.sched_getaffinity(0)))


def write_bindings(bindings: Mapping[str, GpuBinding]) -> dict[str, str]:
    """The environment of stage models; nothing where nothing is bound."""
    return {GPUS_VARIABLE: msgspec.json.encode(bindings).decode()} if bindings else {}


def binding_for(instance: str, environ: Mapping[str, str] = os.environ) -> GpuBinding:
    """An instance's binding among all the launcher's; one without devices if it has none. Raises EngineError."""
    return _decode(GPUS_VARIABLE, environ, dict[str, GpuBinding], {}).get(instance, GpuBinding())


def own_binding(environ: Mapping[str, str] = os.environ) -> GpuBinding:
    """The binding of the instance this rank belongs to; one without devices if it has none. Raises EngineError."""
    return _decode(BINDING_VARIABLE, environ, GpuBinding, GpuBinding())


def _decode(name: str, environ: Mapping[str, str], kind: type[_Kind], absent: _Kind) -> _Kind:
    text = environ.get(name)
    if not text:
        return absent
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{name} in the environment isn't trtpd's ({error}); unset it and start again") from error
