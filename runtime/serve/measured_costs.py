"""What a profile tells the router: step times by role, what a hand-off within the host moves, and where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from trtpd.build.cost_profile import CostProfile, StepFit, TransferFit
from trtpd.build.found_profile import FoundProfile, find_profile
from trtpd.build.manifest import Manifest, RoleName, settings_as
from trtpd.runtime.core.cost import LinearStepTime

AUTO_PATH = "shm"
"""How KV moves within a host unless the pipeline file says otherwise."""


class _Transfer(msgspec.Struct, frozen=True):
    path: str = "auto"


class _Settings(msgspec.Struct, frozen=True):
    transfer: _Transfer = _Transfer()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """`step_times`, `fingerprint` and `near_bytes_per_s` as RouterCore takes them; `status` is what `trtpd status`
    shows."""

    step_times: Mapping[RoleName, LinearStepTime] = field(default_factory=dict)
    fingerprint: str | None = None
    near_bytes_per_s: float | None = None
    status: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_build(cls, build: Path, manifest: Manifest) -> Self:
        """What the build's router predicts by. Raises InputError: see find_profile."""
        return cls.of(find_profile(build, manifest), manifest)

    @classmethod
    def of(cls, found: FoundProfile, manifest: Manifest) -> Self:
        profile = found.profile
        if profile is None:
            return cls(status={"path": None, "roles": {}, "remarks": list(found.remarks)})
        path = settings_as(manifest.settings, _Settings).transfer.path
        near = transfer_of(profile, AUTO_PATH if path == "auto" else path)
        times = step_times(profile)
        return cls(
            step_times={role: times[role] for role in found.roles},
            fingerprint=profile.pair_fingerprint,
            near_bytes_per_s=None if near is None else near.bytes_per_s,
            status={
                "path": str(found.path),
                "made_at": profile.environment.made_at,
                "roles": {role: _residuals(profile, role) for role in found.roles},
                "remarks": list(found.remarks),
            },
        )


def step_times(profile: CostProfile) -> dict[RoleName, LinearStepTime]:
    """The step times of every role that has been measured far enough."""
    return {
        role: step_time(costs.fit, chunk_tokens=costs.chunk_tokens)
        for role, costs in profile.engines.items()
        if costs.fit is not None
    }


def step_time(fit: StepFit, *, chunk_tokens: int) -> LinearStepTime:
    return LinearStepTime(**fit.model_dump(exclude={"residuals"}), chunk_tokens=chunk_tokens)


def transfer_of(profile: CostProfile, path: str) -> TransferFit | None:
    """What a hand-off over that path costs, if it was measured."""
    costs = profile.transfers.get(path)
    return None if costs is None else costs.fit


def _residuals(profile: CostProfile, role: RoleName) -> dict[str, float]:
    fit = profile.engines[role].fit
    assert fit is not None, "roles without a fit aren't used"
    return {"p50": round(fit.residuals.p50, 4), "p95": round(fit.residuals.p95, 4)}
