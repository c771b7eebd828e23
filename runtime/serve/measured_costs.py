"""What a profile tells the router: step times by role, what a hand-off within the host moves, and where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from trtpd.build.cost_profile import CostProfile, StepFit
from trtpd.build.found_profile import FoundProfile, find_profile
from trtpd.build.manifest import Manifest, RoleName
from trtpd.runtime.core.cost import LinearStepTime


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
        return cls.of(find_profile(build, manifest))

    @classmethod
    def of(cls, found: FoundProfile) -> Self:
        profile = found.profile
        if profile is None:
            return cls(status={"path": None, "roles": {}, "remarks": list(found.remarks)})
        near = None if found.hand_off is None else found.hand_off.bytes_per_s
        times = step_times(profile)
        return cls(
            step_times={role: times[role] for role in found.roles},
            fingerprint=profile.pair_fingerprint,
            near_bytes_per_s=near,
            status={
                "path": str(found.path),
                "made_at": profile.environment.made_at,
                "roles": {role: _residuals(profile, role) for role in found.roles},
                "hand_off_bytes_per_s": near,
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


def _residuals(profile: CostProfile, role: RoleName) -> dict[str, float]:
    fit = profile.engines[role].fit
    assert fit is not None, "roles without a fit aren't used"
    return {"p50": round(fit.residuals.p50, 4), "p95": round(fit.residuals.p95, 4)}
