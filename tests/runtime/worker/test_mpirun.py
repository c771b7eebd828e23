"""The command line of a group, and the MPI it is made for."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtpd.errors import EngineError
from trtpd.kv_transfer.pool_file import SHM_DIR, start_ticks
from trtpd.runtime.worker import group
from trtpd.runtime.worker.board import Board
from trtpd.runtime.worker.mpirun import Mpi, find_mpi, group_command, group_environment

MPI = Mpi(mpirun=Path("/mpi/bin/mpirun"), version="5.0.11")
FOLDER = Path("/dev/shm/trtpd-mpi.1.2.decode_0")


def command(**changes) -> list[str]:
    given: dict[str, Any] = {"ranks": 2, "folder": FOLDER, "environment": {"PATH": "/bin"}} | changes
    return group_command(MPI, "/venv/bin/python", ["-m", "trtpd.runtime.worker", "--x"], **given)


def pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(itertools.pairwise(words))


def test_every_rank_is_python_with_mpi4py_on_this_host_alone():
    words = command()
    assert words[:3] == ["/mpi/bin/mpirun", "-n", "2"]
    assert words[-6:] == ["/venv/bin/python", "-m", "mpi4py", "-m", "trtpd.runtime.worker", "--x"]
    assert ("--bind-to", "none") in pairs(words)
    assert "--oversubscribe" in words
    assert ("btl", "self,sm") in pairs(words)
    assert ("btl_sm_backing_directory", str(FOLDER)) in pairs(words)


@pytest.mark.parametrize("hosts", [None, "/etc/hosts.txt", ["a", "b:2"]])
def test_sums_have_one_order_whatever_their_size(hosts):
    assert ("coll_tuned_allreduce_algorithm", "3") in pairs(command(hosts=hosts))
    assert ("coll_tuned_use_dynamic_rules", "1") in pairs(command(hosts=hosts))


def test_open_mpi_4_knows_shared_memory_by_its_older_name():
    words = group_command(Mpi(mpirun=MPI.mpirun, version="4.1.7"), "python", [], ranks=2, folder=FOLDER, environment={})
    assert ("btl", "self,vader") in pairs(words)
    assert ("btl_vader_backing_directory", str(FOLDER)) in pairs(words)


def test_ranks_on_other_hosts_get_the_transports_that_were_chosen():
    environment = {"UCX_TLS": "rc", "NCCL_P2P_LEVEL": "PXB", "UCXTLS": "x", "TRTLLM_X": "1", "HOME": "/root"}
    words = command(hosts=["a", "b"], environment=environment)
    assert [name for flag, name in pairs(words) if flag == "-x"] == ["NCCL_P2P_LEVEL", "TRTLLM_X", "UCX_TLS"]


def test_hosts_come_from_a_file_or_a_list_and_get_what_python_needs():
    environment = {"PATH": "/bin", "PYTHONPATH": "/src", "SECRET": "x"}
    words = command(hosts="/cluster/hosts", environment=environment)
    assert ("--hostfile", "/cluster/hosts") in pairs(words)
    assert [name for flag, name in pairs(words) if flag == "-x"] == ["PATH", "PYTHONPATH"]
    assert ("--host", "here:2,10.0.0.7:2") in pairs(command(hosts=["here:2", "10.0.0.7:2"]))


def test_a_group_over_hosts_is_not_bound_to_what_only_this_one_has():
    words = command(hosts=["here:2", "there:2"])
    assert "--oversubscribe" not in words
    assert not {"btl", "pml", "btl_sm_backing_directory"} & set(words)


def test_the_environment_is_that_of_no_other_mpi_job():
    base = {
        "OMPI_COMM_WORLD_RANK": "3",
        "PMIX_RANK": "3",
        "PRTE_X": "1",
        "OMPI_MCA_btl_base_verbose": "9",
        "HOME": "/h",
    }
    made = group_environment(base, FOLDER)
    assert {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PRTE_X"}.isdisjoint(made)
    assert (made["OMPI_MCA_btl_base_verbose"], made["HOME"], made["TMPDIR"]) == ("9", "/h", str(FOLDER))


def test_only_a_group_over_hosts_is_part_of_a_slurm_job():
    base = {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "a,b"}
    assert base.keys().isdisjoint(group_environment(base, FOLDER))
    assert base.keys() <= group_environment(base, FOLDER, hosts=["a", "b"]).keys()


def test_the_mpirun_found_belongs_to_the_library_that_is_loaded():
    found = find_mpi(sys.executable, os.environ)
    said = subprocess.run([found.mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    assert found.version in said


def fake_python(folder: Path, prints: str, code: int = 0) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{prints}'\necho 'ImportError: no libmpi.so' >&2\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("prints", "code", "message"),
    [
        ("", 1, "ImportError: no libmpi.so"),
        ('{"vendor": "MPICH", "version": "4.1", "libraries": []}', 0, "bound to MPICH 4.1"),
        ('{"vendor": "Open MPI", "version": "5.0", "libraries": ["/nowhere/lib/libmpi.so"]}', 0, "no mpirun belongs"),
    ],
)
def test_an_mpi_that_can_not_be_used_is_named_with_the_mend(tmp_path, prints, code, message):
    with pytest.raises(EngineError, match=rf"{message}.*pip install '\.\[mpi\]'"):
        find_mpi(fake_python(tmp_path, prints, code), os.environ)


def test_an_mpirun_is_looked_for_upwards_of_the_library(tmp_path):
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("")
    mpirun.chmod(0o755)
    library = tmp_path / "lib" / "x86_64" / "libmpi.so"
    python = fake_python(tmp_path, f'{{"vendor": "Open MPI", "version": "4.1.4", "libraries": ["{library}"]}}')
    assert find_mpi(python, os.environ) == Mpi(mpirun=mpirun, version="4.1.4")


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(EngineError, match="/nowhere/python"):
        find_mpi("/nowhere/python", {})


def test_folders_of_dead_keepers_are_swept_and_those_of_live_ones_kept():
    own = group.GroupFolder.make("sweep-test", 2)
    pid = os.getpid()
    dead = [SHM_DIR / f"{group.PREFIX}{pid}.1.x", SHM_DIR / f"{group.PREFIX}{2**22 + 1}.5.x"]
    for path in dead:
        path.mkdir()
        (path / "sm_segment").write_bytes(b"x")
    try:
        assert {path.name for path in dead} <= set(group.sweep_groups())
        assert own.path.is_dir()
        assert not any(path.exists() for path in dead)
    finally:
        own.remove()
        own.remove()
    assert not own.path.exists()


def test_ranks_that_are_left_are_killed_and_others_with_their_pid_are_not():
    folder = group.GroupFolder.make("kill-test", 2)
    rank, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    rows = Board(folder.path / "board")._rows
    rows[0, :2] = rank.pid, start_ticks(rank.pid)
    rows[1, :2] = other.pid, 1
    assert folder.alive() == [rank.pid]
    folder.kill()
    assert rank.wait(timeout=20) == -9
    assert other.poll() is None
    other.kill()
    other.wait()
    folder.remove()


def test_the_keepers_pipe_ends_with_the_keeper_and_is_not_waited_for():
    folder = group.GroupFolder.make("pipe-test", 1)
    pipe = group.open_keeper_pipe(folder.path)
    folder.tell_to_end()
    assert os.read(pipe, 1) == b""
    late = group.open_keeper_pipe(folder.path)
    assert os.read(late, 1) == b""
    for descriptor in (pipe, late):
        os.close(descriptor)
    folder.remove()
