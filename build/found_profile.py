"""Which profile a build is served with, and what of it is of that build: `scheduler.profile` of the pipeline file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from trtpd.build.cost_profile import PROFILE, CostProfile, read_profile
from trtpd.build.machine import cpu_name
from trtpd.build.manifest import Manifest, RoleName, settings_as
from trtpd.build.spec import NO_PROFILE
from trtpd.errors import InputError


class _Scheduler(msgspec.Struct, frozen=True):
    """Absent in builds made before it was known."""

    profile: str | None = None


class _Settings(msgspec.Struct, frozen=True):
    scheduler: _Scheduler = _Scheduler()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProfile:
    """`profile` is None where none is used; `roles` are those whose costs are of the build's engines. `remarks` say
    what a user should know, in single lines; `missing`: there would be one to find, and there is none."""

    path: Path | None = None
    profile: CostProfile | None = None
    roles: tuple[RoleName, ...] = ()
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
    used = profile if roles else None
    return FoundProfile(path=path, profile=used, roles=roles, remarks=tuple(remarks))


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
