"""What `trtpd serve` is asked for, and whether it can be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpd.build.manifest import Manifest, RoleName
from trtpd.build.repository import ROUTER_MODEL
from trtpd.errors import InputError, ServeError
from trtpd.runtime.worker.sockets import check_address, check_keys

TAG = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Port 0 takes any free one. `only`: these models of the build and no others. `router`: the address leaders dial
    when it is not this launcher's own; with `pd` among the models, the one it binds. `keys`: CURVE keys for it. `tag`:
    tells the router its instances from those of another build that have the same names.
    """

    build: Path
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    host: str = "127.0.0.1"
    only: tuple[str, ...] = ()
    router: str | None = None
    keys: Path | None = None
    tag: str = ""
    drain_s: float = 30.0
    verbose: bool = False


def models_of(manifest: Manifest, only: Sequence[str]) -> list[str]:
    """The models to load, `pd` last. Raises InputError for names the build does not have."""
    known = [name for role in manifest.roles.values() for name in role.instances] + [ROUTER_MODEL]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise InputError(f"--only {','.join(unknown)}: this build has {', '.join(known)}")
    return [name for name in known if not only or name in only]


def check_tag(options: ServeOptions, models: Sequence[str]) -> None:
    """Raises InputError for a tag that can't be part of a name."""
    if options.tag and not TAG.fullmatch(options.tag):
        raise InputError(f"--tag {options.tag!r}: must be 1 to 32 letters, digits, - or _")
    if options.tag and options.router is None and ROUTER_MODEL not in models:
        raise InputError(f"--tag {options.tag} without a router: give the address of the one to join with --router")


def check_router(options: ServeOptions, models: Sequence[str]) -> None:
    """Raises InputError for an address or keys that no router or leader of ours can use."""
    if options.keys is not None:
        check_keys(options.keys, router=ROUTER_MODEL in models, workers=list(models) != [ROUTER_MODEL])
    if options.router is None:
        return
    try:
        check_address(options.router, options.keys)
    except ServeError as error:
        raise InputError(f"--router: {error}") from error


def check_reachable(options: ServeOptions, models: Sequence[str], home_roles: Mapping[str, RoleName]) -> None:
    """Raises InputError for a router without an address whose own instances don't suffice: no others could join it."""
    here = set(home_roles.values())
    if ROUTER_MODEL in models and options.router is None and "mixed" not in here and not {"prefill", "decode"} <= here:
        raise InputError(
            f"--only {','.join(options.only)}: {ROUTER_MODEL} needs a prefill and a decode (or a mixed) instance; name "
            "them too, or say with --router ADDR where those of other hosts find it"
        )
