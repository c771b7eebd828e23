"""Which profile a build is served with, and what of it is of that build: `scheduler.profile` of the pipeline file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from trtpd.build.cost_profile import PROFILE, CostProfile, TransferFit, read_profile
from trtpd.build.hand_off import HandOff
from trtpd.build.machine import cpu_name
from trtpd.build.manifest import Manifest, RoleName, settings_as
from trtpd.build.spec import NO_PROFILE
from trtpd.errors import EngineError, InputError


class _Scheduler(msgspec.Struct, frozen=True):
    """Absent in builds made before it was known."""

    profile: str | None = None


class _Settings(msgspec.Struct, frozen=True):
    scheduler: _Scheduler = _Scheduler()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProfile:
    """`profile` is None where none is used; `roles` are those whose costs are of the build's engines, `hand_off` what
    the build's hand-offs within a host cost, None where that was not measured as they are made. `remarks` say what a
    user should know, in single lines; `missing`: there would be one to find, and there is none."""

    path: Path | None = None
    profile: CostProfile | None = None
    roles: tuple[RoleName, ...] = ()
    hand_off: TransferFit | None = None
    remarks: tuple[str, ...] = ()
    missing: bool = False


def find_profile(build: Path, manifest: Manifest, *, cpu: str | None = None) -> FoundProfile:
    """The profile that a router of this build reads. `cpu`: the name of the one here.

    One that lies in the build and can't be used is passed over with a remark. Raises InputError for one that the
    pipeline file names and that can't be read, or is of another build.
    """
    named = settings_as(manifest.settings, _Settings).scheduler.profile
    if named == NO_PROFILE:
        return FoundProfile(remarks=("scheduler.profile is none: the router learns step times while it serves",))
    path = build / PROFILE if named is None else Path(named)
    command = f"`trtpd profile {shlex.quote(str(build))}`"
    again = f"measure again with {command}"
    if named is None and not path.is_file():
        remark = f"no {PROFILE} in {build}: the router learns step times while it serves; measure them with {command}"
        return FoundProfile(remarks=(remark,), missing=True)
    try:
        profile = read_profile(path)
        roles, faults = match(profile, manifest)
        if named is not None and faults:
            raise InputError(f"{path} (scheduler.profile): {'; '.join(faults)}; {again} -o {shlex.quote(str(path))}")
    except InputError as error:
        if named is not None:
            raise
        return FoundProfile(path=path, remarks=(f"{error}; not used",))
    remarks = [f"{path}: {fault}, so that part is not used; {again}" for fault in faults]
    if not roles and not faults:
        remarks.append(f"{path}: unfinished, too few points for a fit, so it is not used; go on with {command}")
    here = cpu_name() if cpu is None else cpu
    if roles and profile.environment.cpu != here:
        remarks.append(
            f"{path}: measured on {profile.environment.cpu}, here is {here}: predictions begin off and are corrected "
            f"while it serves; {again}"
        )
    if not roles:
        return FoundProfile(path=path, remarks=tuple(remarks))
    hand_off, fault = _hand_off(profile, build, manifest)
    if fault:
        remarks.append(f"{path}: {fault}, so what a hand-off costs is learned while it serves; {again}")
    return FoundProfile(path=path, profile=profile, roles=roles, hand_off=hand_off, remarks=tuple(remarks))


def _hand_off(profile: CostProfile, build: Path, manifest: Manifest) -> tuple[TransferFit | None, str]:
    """What was measured of the path that the build uses; or None, and how it was measured otherwise."""
    try:
        made = HandOff.of(build, manifest)
    except EngineError:  # which stops the server, and lint says it
        return None, ""
    costs = None if made is None else profile.transfers.get(made.path)
    if made is None or costs is None or costs.fit is None:
        return None, ""
    difference = made.difference(costs)
    return (None, f"the transfer over {made.path} {difference}") if difference else (costs.fit, "")


def match(profile: CostProfile, manifest: Manifest) -> tuple[tuple[RoleName, ...], list[str]]:
    """The roles whose costs are of the manifest's engines, and what is wrong with others."""
    if profile.pair_fingerprint != manifest.pair_fingerprint:
        fault = f"it is of another build ({profile.pair_fingerprint}, this one is {manifest.pair_fingerprint})"
        return (), [fault]
    roles: list[RoleName] = []
    changed: list[str] = []
    for name, entry in manifest.roles.items():
        costs = profile.engines.get(cast(RoleName, name))
        if costs is None or costs.fit is None:
            continue
        if costs.fingerprint == entry.fingerprint:
            roles.append(cast(RoleName, name))
        else:
            changed.append(name)
    return tuple(roles), [_changed(changed)] if changed else []


def _changed(names: Sequence[str]) -> str:
    return f"the settings of {' and '.join(names)} have changed since it was measured"
