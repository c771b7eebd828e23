"""Runs a file of tests by pytest on rank 0 of a real MPI group, while the other ranks serve the engines it makes.

`run_in_group` starts it. The tests take the fixture `groups`. Every engine is a group of its own over the same
processes, with a communicator of its own.
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from trtpd.build.manifest import RoleProfile, read_engine_config
from trtpd.runtime.engine.base import Engine
from trtpd.runtime.engine.group import Follower
from trtpd.runtime.engine.mpi import MpiRanks
from trtpd.runtime.worker.mpirun import find_mpi, group_command, group_environment

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = ("max_step_tokens", "chunk_tokens", "max_batch", "kv_blocks", "threads")
"""What ranks other than the first know of a profile: the rest is the scheduler's, which is on rank 0."""


class Groups:
    """Rank 0 calls `load` while the others are in `serve`. `folder` holds engine directories, named by their tp."""

    def __init__(self, mpi: Any, module: str, folder: Path) -> None:
        self.control = MpiRanks(mpi, mpi.COMM_WORLD)
        self._mpi = mpi
        self._module = importlib.import_module(module)
        self._folder = folder
        self._count = itertools.count()

    def load(self, profile: RoleProfile) -> Engine:
        """An engine of all ranks."""
        numbers = np.array([getattr(profile, name) for name in NUMBERS], np.int32)
        self.control.tell(numbers, tokens=0)
        engine: Engine = self._make(profile, "load")
        return engine

    def load_alone(self) -> Engine:
        """The same engine, of one rank."""
        directory = self._folder / "1"
        engine: Engine = self._module.load(
            read_engine_config(directory), directory, pool_name=self._name(), generation="g"
        )
        return engine

    def serve(self) -> None:
        """Until rank 0 dismisses the others."""
        numbers = np.zeros(len(NUMBERS), np.int32)
        while self.control.told(numbers) is not None:
            profile = RoleProfile(**dict(zip(NUMBERS, numbers.tolist(), strict=True)))
            threading.Thread(target=self._follow, args=(self._make(profile, "join"),), daemon=True).start()

    def _make(self, profile: RoleProfile, how: str) -> Any:
        self.control.gather(np.zeros((1, 1)), [1] * self.control.size)
        directory = self._folder / str(self.control.size)
        return getattr(self._module, how)(
            replace(read_engine_config(directory), profile=profile),
            directory,
            pool_name=self._name(),
            generation="g",
            ranks=MpiRanks(self._mpi, self._mpi.COMM_WORLD),
        )

    def _name(self) -> str:
        return f"group-{next(self._count)}"

    def _follow(self, follower: Follower) -> None:
        try:
            follower.run()
            follower.close()
        except BaseException as error:
            self.control.abort(repr(error))
            raise


def run_in_group(
    tests: Path, module: str, folder: Path, *, tp: int, only: str = "", timeout_s: float
) -> tuple[int, str]:
    """The exit status of pytest, and what it said. `only` as pytest's -k."""
    with_support = os.pathsep.join(filter(None, (str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH"))))
    environment = group_environment({**os.environ, "PYTHONPATH": with_support}, folder)
    command = group_command(
        find_mpi(sys.executable, environment),
        sys.executable,
        ["-m", "trtpd_testing.groups", module, str(folder), str(tests), only],
        ranks=tp,
        folder=folder,
        environment=environment,
    )
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


def main(module: str, folder: str, tests: str, only: str) -> int:
    import pytest
    from mpi4py import MPI

    groups = Groups(MPI, module, Path(folder))
    if groups.control.rank:
        groups.serve()
        return 0

    class Plugin:
        @pytest.fixture(scope="session")
        @classmethod
        def groups(cls) -> Groups:
            return groups

    options = ["-q", "--color=no", "--tb=short", "--no-header", "-p", "no:cacheprovider", "-k", only]
    code = pytest.main([*options, tests], plugins=[Plugin()])
    groups.control.dismiss()
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
