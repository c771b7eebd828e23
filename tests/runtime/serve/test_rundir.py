from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from trtpd.kv_transfer.pool_file import start_ticks
from trtpd.runtime.serve import rundir
from trtpd.runtime.serve.processes import Identity, own_identity
from trtpd.runtime.serve.stage_model import build_of


def identity_of(pid: int) -> Identity:
    ticks = start_ticks(pid)
    assert ticks is not None
    return Identity(pid, ticks)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Temporary files and shared memory of this test alone."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(rundir, "SHM_DIR", shm)
    with tempfile.TemporaryDirectory(prefix="t.", dir="/tmp") as short:
        monkeypatch.setattr(rundir, "SHORT_TMP", Path(short))
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield tmp_path


@pytest.fixture
def ended():
    """The identity of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticks = start_ticks(process.pid)
        assert ticks is not None
    return Identity(process.pid, ticks)


def test_a_run_directory_is_private_and_short_enough_for_sockets(places):
    path = rundir.make_run_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert len(str(path / "router.ipc")) <= 107
    rundir.remove(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["sp ace", "qu'ote", "dol$HOME", "ümlaut"])
def test_a_run_directory_has_a_name_a_shell_takes_as_it_is(places, monkeypatch, name):
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{name}")
    assert rundir.make_run_dir().parent == rundir.SHORT_TMP


def test_models_find_their_build_through_the_link_in_the_run_directory(places):
    build = places / "a $build"
    (build / "model_repo" / "pd").mkdir(parents=True)
    link = rundir.link_repository(rundir.make_run_dir(), build)
    assert " " not in str(link)
    assert build_of({"model_repository": str(link / "pd")}) == build


def test_a_build_whose_path_is_not_ascii_is_reached_by_one_that_is(places):
    build = places / "bäü"
    (build / "model_repo" / "pd" / "1").mkdir(parents=True)
    (build / "manifest.json").write_text("{}")
    link = rundir.link_repository(rundir.make_run_dir(), build)
    found = build_of({"model_repository": str(link / "pd")})
    assert str(found).isascii()
    assert (found / "manifest.json").samefile(build / "manifest.json")
    assert (link / "pd" / "1").is_dir()


def test_what_was_made_elsewhere_for_want_of_a_short_name_is_swept_too(places, ended, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(places / ("long" * 20)))
    mine = rundir.make_run_dir()
    stale = mine.parent / f"trtpd-run.{ended.pid}.{ended.start_ticks}.abc"
    stale.mkdir()
    assert rundir.sweep_leftovers() == [stale.name]


def test_only_what_a_launcher_left_that_is_gone_is_swept(places, ended):
    mine = rundir.make_run_dir()
    stale = mine.parent / f"trtpd-run.{ended.pid}.{ended.start_ticks}.abc"
    (stale / "logs").mkdir(parents=True)
    stale_region = places / "shm" / f"trtpd-triton.{ended.pid}.{ended.start_ticks}.uuid"
    my_region = places / "shm" / f"{rundir.region_prefix()}uuid"
    strange = places / "shm" / "trtpd-triton.someone-else"
    for region in (stale_region, my_region, strange):
        region.write_bytes(b"x")
    assert sorted(rundir.leftovers()) == sorted([stale, stale_region])
    assert sorted(rundir.sweep_leftovers()) == sorted([stale.name, stale_region.name])
    assert rundir.leftovers() == []
    assert all(path.exists() for path in (mine, my_region, strange))
    assert rundir.sweep_regions(rundir.region_prefix()) == [my_region.name]
    assert strange.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_what_another_user_left_or_put_there_is_left_alone(places, ended):
    theirs = rundir.make_run_dir().parent / f"trtpd-run.{ended.pid}.{ended.start_ticks}.abc"
    (theirs / "stubs").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        (theirs / "stubs" / "pd").write_bytes(msgspec.json.encode(identity_of(victim.pid)))
        os.chown(theirs, 65534, 65534)
        assert rundir.leftovers() == []
        assert rundir.sweep_leftovers() == []
        assert start_ticks(victim.pid) is not None
    assert theirs.is_dir()


def test_a_stub_that_outlived_its_killed_launcher_is_ended_with_what_that_left(places, ended):
    stale = rundir.make_run_dir().parent / f"trtpd-run.{ended.pid}.{ended.start_ticks}.abc"
    (stale / "stubs").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stub:
        (stale / "stubs" / "pd").write_bytes(msgspec.json.encode(identity_of(stub.pid)))
        assert rundir.sweep_leftovers() == [stale.name]
        assert start_ticks(stub.pid) is None


def test_a_pid_given_to_another_process_is_not_the_former_one():
    me = own_identity()
    assert me.alive
    assert not Identity(me.pid, me.start_ticks + 1).alive


def test_a_stub_is_known_until_forgotten(places):
    run_dir = rundir.make_run_dir()
    assert rundir.stub_of(run_dir, "pd") is None
    rundir.note_stub(run_dir, "pd")
    assert rundir.stub_of(run_dir, "pd") == own_identity()
    rundir.forget_stub(run_dir, "pd")
    assert rundir.stub_of(run_dir, "pd") is None


def test_the_drains_end_reaches_the_models(places):
    run_dir = rundir.make_run_dir()
    assert rundir.drain_until_s(run_dir) is None
    rundir.announce_drain(run_dir, 12.5)
    assert rundir.drain_until_s(run_dir) == 12.5


def test_streams_of_a_killed_launcher_are_cut_at_once(places, ended):
    run_dir = places / f"trtpd-run.{ended.pid}.{ended.start_ticks}.abc"
    assert rundir.drain_until_s(run_dir) == 0.0


def test_the_tail_of_a_log_is_its_last_lines(places):
    log = places / "log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert rundir.tail(log, 2) == "line 98\nline 99"
    assert rundir.tail(places / "none") == ""
