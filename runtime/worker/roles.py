"""An instance that is to take the other role of its pair: what its worker, its launcher and its stage model tell each
other, as files of the run directory.

RUN/
  wishes/NAME   the worker: "I am drained; start me as ROLE" (or the time to drain is over)
  roles/NAME    the launcher: what NAME is to be loaded as, absent while it has the role it is named after
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from trtpd.build.manifest import Manifest, RoleEntry, RoleName
from trtpd.errors import InputError, ServeError

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""What still runs on an instance after so long goes on elsewhere, from the router's journal."""

PATIENCE_S = 60.0
"""An instance that nobody starts again for so long ends by itself, and comes back in the role it had."""

_ROLES = ("prefill", "decode")


def home_role(manifest: Manifest, instance: str) -> RoleName:
    """The role an instance is named after. Raises InputError for a name that no role of the build has."""
    for role, entry in manifest.roles.items():
        if instance in entry.instances:
            return cast(RoleName, role)
    known = sorted(name for entry in manifest.roles.values() for name in entry.instances)
    raise InputError(f"--instance {instance!r} is not in this build; it has {', '.join(known) or 'none'}")


def entry_of(manifest: Manifest, instance: str, role: RoleName | None) -> RoleEntry:
    """What the build has for an instance in a role (None: its own). Raises InputError if it has nothing."""
    own = home_role(manifest, instance)
    if role is None or role == own:
        return manifest.roles[own]
    if role not in manifest.roles or "mixed" in (role, own):
        raise InputError(f"{instance} can't be a {role} instance in this build; it has {', '.join(manifest.roles)}")
    return manifest.roles[role]


def wish(run_dir: Path, instance: str, role: str) -> None:
    """Said by the worker. Raises OSError."""
    _write(run_dir / "wishes" / instance, role)


def take_wish(run_dir: Path, instance: str) -> RoleName | None:
    """Taken by the launcher, once."""
    path = run_dir / "wishes" / instance
    role = _read(path)
    if role is not None:
        path.unlink(missing_ok=True)
    return role


def order(run_dir: Path, instance: str, role: RoleName | None) -> None:
    """Said by the launcher: what NAME is loaded as from now on; None: its own role."""
    path = run_dir / "roles" / instance
    if role is None:
        path.unlink(missing_ok=True)
    else:
        _write(path, role)


def ordered(run_dir: Path, instance: str) -> RoleName | None:
    """The role it is to be loaded as; None: its own."""
    return _read(run_dir / "roles" / instance)


class RoleSwitch:
    """The worker's part: it drains, says its wish, and waits to be ended. No clock of its own."""

    def __init__(self, run_dir: Path, instance: str) -> None:
        self._run_dir = run_dir
        self._instance = instance
        self._role: str | None = None
        self._drained_by_s = 0.0
        self._wished = False

    def begin(self, role: str, now_s: float) -> None:
        """Asked again for a role, it goes on with the first."""
        if self._role is None:
            log.info("draining, to come back as a %s instance", role)
            self._role, self._drained_by_s = role, now_s + DRAIN_S

    def look(self, now_s: float, *, idle: bool) -> None:
        """Called at every turn. Raises ServeError when the wish can't be said, or nobody heeds it."""
        if self._role is None:
            return
        if not self._wished and (idle or now_s >= self._drained_by_s):
            try:
                wish(self._run_dir, self._instance, self._role)
            except OSError as error:
                raise ServeError(f"{self._run_dir} can't be written ({error.strerror}); the role stays") from error
            self._wished, self._drained_by_s = True, now_s
        if self._wished and now_s > self._drained_by_s + PATIENCE_S:
            take_wish(self._run_dir, self._instance)
            raise ServeError(f"not started as a {self._role} instance within {PATIENCE_S:g} s; the role stays")


def _write(path: Path, role: str) -> None:
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(role)
    fresh.replace(path)


def _read(path: Path) -> RoleName | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return cast(RoleName, text) if text in _ROLES else None
