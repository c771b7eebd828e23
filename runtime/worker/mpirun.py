"""How a group of ranks is started: the mpirun that belongs to the MPI library mpi4py loads, and its command line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtpd.build.manifest import settings_as
from trtpd.errors import EngineError
from trtpd.runtime.engine.mpi import MEND

FIND_S = 60.0
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "GLIBC_TUNABLES")
FORWARDED_PREFIXES = ("UCX_", "NCCL_", "NIXL_", "TRTLLM_")
"""Variables that ranks on other hosts get too."""

_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libmpi" in line}
vendor, version = MPI.get_vendor()
print(json.dumps({"vendor": vendor, "version": ".".join(map(str, version)), "libraries": sorted(files)}))
"""

_SETTINGS = {
    # One fixed order of summation for messages of any size: what a sequence computes must not depend on its batch.
    "coll": "^han,adapt,sm",
    "coll_tuned_use_dynamic_rules": "1",
    "coll_tuned_allreduce_algorithm": "3",
    "mpi_yield_when_idle": "1",
}
_SM_SINCE = 5
"""The version from which Open MPI calls its shared memory "sm"; version 4, which containers have, calls it "vader" and
ends with an error for the other name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mpi:
    """An MPI that groups can be started with."""

    mpirun: Path
    version: str


Hosts = str | Sequence[str] | None
"""A hostfile, or names with slots as mpirun's --host takes them; None: this host."""


class _Pool(msgspec.Struct, frozen=True):
    """What a manifest's settings say of where a pool's ranks run."""

    hosts: str | list[str] | None = None


class _Pools(msgspec.Struct, frozen=True):
    prefill: _Pool = _Pool()
    decode: _Pool = _Pool()
    mixed: _Pool = _Pool()

    def hosts_of(self, role: str) -> Hosts:
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}[role].hosts


class _Settings(msgspec.Struct, frozen=True):
    pools: _Pools = _Pools()


def hosts_of(settings: Mapping[str, object], role: str) -> Hosts:
    """Where the ranks of a role's instances run, by a manifest's settings."""
    return settings_as(settings, _Settings).pools.hosts_of(role)


def find_mpi(python: str, environment: Mapping[str, str]) -> Mpi:
    """The MPI of an interpreter, without joining or starting anything of it. Raises EngineError with the mend."""
    command = [python, "-c", _PROBE]
    try:
        probe = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FIND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"whether {python} has MPI can't be found out: {error}; {MEND}") from error
    if probe.returncode != 0:
        why = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"an engine of several ranks needs MPI, which {python} can't load ({why}); {MEND}")
    found = json.loads(probe.stdout.splitlines()[-1])
    if found["vendor"] != "Open MPI":
        raise EngineError(
            f"mpi4py is bound to {found['vendor']} {found['version']}, and groups are started with Open MPI; {MEND}"
        )
    for path in _candidates(found["libraries"]):
        if os.access(path, os.X_OK):
            return Mpi(mpirun=path, version=found["version"])
    libraries = ", ".join(found["libraries"]) or "no file"
    raise EngineError(f"Open MPI {found['version']} is loaded from {libraries}, and no mpirun belongs to it; {MEND}")


def _candidates(libraries: Sequence[str]) -> Iterator[Path]:
    for library in libraries:
        for path in (Path(library), Path(library).resolve()):
            for folder in path.parents:
                yield folder / "bin" / "mpirun"


def group_command(
    mpi: Mpi,
    python: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str],
    hosts: Hosts = None,
) -> list[str]:
    """What starts `python -m mpi4py ARGUMENTS` once per rank, in `environment`. `folder` is the group's own: its
    shared memory lies there, unless it spans hosts. Ranks find their cores by themselves."""
    command = [str(mpi.mpirun), "-n", str(ranks), "--bind-to", "none"]
    settings = dict(_SETTINGS)
    if hosts is None:
        memory = "sm" if int(mpi.version.split(".")[0]) >= _SM_SINCE else "vader"
        settings |= {"pml": "ob1", "btl": f"self,{memory}", f"btl_{memory}_backing_directory": str(folder)}
        command.append("--oversubscribe")
    else:
        command += ["--hostfile", hosts] if isinstance(hosts, str) else ["--host", ",".join(hosts)]
        named = [*FORWARDED, *sorted(name for name in environment if name.startswith(FORWARDED_PREFIXES))]
        command += [part for name in named if name in environment for part in ("-x", name)]
    command += [part for pair in settings.items() for part in ("--mca", *pair)]
    return [*command, python, "-m", "mpi4py", *arguments]


def group_environment(base: Mapping[str, str], folder: Path, *, hosts: Hosts = None) -> dict[str, str]:
    """`base` for mpirun: not itself part of an MPI job, its files in `folder`, root allowed if that is who we are. A
    group on this host isn't part of a Slurm job either: its ranks would be spread over all hosts of that."""
    tuned = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
    jobs = ("OMPI_", "PMIX_", "PRTE_") + (("SLURM_",) if hosts is None else ())
    env = {name: value for name, value in base.items() if name.startswith(tuned) or not name.startswith(jobs)}
    env["TMPDIR"] = str(folder)
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env
