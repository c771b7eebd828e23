"""What a hand-off of KV costs in a build: by which path, which of its blocks are verified, on which CPUs. A measured
cost is of such a setting, and tells nothing of another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtpd.build.cost_profile import TransferCosts
from trtpd.build.manifest import Manifest, RoleEntry, read_engine_config, settings_as

AUTO_PATH = "shm"
"""How KV moves within a host unless the pipeline file says otherwise."""


class _Transfer(msgspec.Struct, frozen=True):
    path: str = "auto"
    digests: bool = True
    digest_every: int = 1


class _Settings(msgspec.Struct, frozen=True):
    """Absent in builds made before it was known."""

    transfer: _Transfer = _Transfer()


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """Between the first instances of the pools, within a host. `digest_every`: one block in so many is verified, 0 is
    none. No cores: all that there are."""

    path: str
    digest_every: int
    source_cores: tuple[int, ...]
    sink_cores: tuple[int, ...]

    @classmethod
    def of(cls, build: Path, manifest: Manifest) -> HandOff | None:
        """None for a build without instances of prefill and decode. Raises EngineError for an engine directory that
        can't be read."""
        source, sink = manifest.roles.get("prefill"), manifest.roles.get("decode")
        if source is None or sink is None or not (source.instances and sink.instances):
            return None
        transfer = settings_as(manifest.settings, _Settings).transfer
        return cls(
            path=AUTO_PATH if transfer.path == "auto" else transfer.path,
            digest_every=transfer.digest_every if transfer.digests else 0,
            source_cores=first_cores(build, source),
            sink_cores=first_cores(build, sink),
        )

    def difference(self, costs: TransferCosts) -> str:
        """How this is set otherwise than when `costs` was measured, in words; empty if it isn't."""
        if costs.digest_every != self.digest_every:
            then, now = (_digests(every) for every in (costs.digest_every, self.digest_every))
            return f"was measured with {then}, this build has {now}"
        for then_cores, now_cores in ((costs.source_cores, self.source_cores), (costs.sink_cores, self.sink_cores)):
            if then_cores != list(now_cores):
                return other_cores(then_cores, now_cores)
        return ""


def first_cores(build: Path, entry: RoleEntry) -> tuple[int, ...]:
    """Of the role's first instance. Raises EngineError."""
    return tuple(entry.cores.get(entry.instances[0]) or read_engine_config(build / entry.directory).profile.cores)


def other_cores(then: list[int] | None, now: tuple[int, ...]) -> str:
    words = ["all CPUs" if not cores else f"CPUs {','.join(map(str, cores))}" for cores in (then, now)]
    return f"was measured on {words[0]}, in this build it is on {words[1]}"


def _digests(every: int | None) -> str:
    if every is None:
        return "digests or without, which was not kept"
    return "no digests" if every == 0 else f"digests over one block in {every}"
