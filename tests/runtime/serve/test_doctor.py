from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from trtpd.runtime.serve import doctor, rundir


def found(name):
    return next(check for check in doctor.examine() if check.name == name)


def test_what_a_killed_server_left_is_named_with_its_size_and_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "leftovers", list)
    monkeypatch.setattr(rundir, "leftovers", list)
    assert (found("leftovers").status, found("leftovers").found) == ("ok", "none")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").write_bytes(b"x" * 3_000_000)
    monkeypatch.setattr(rundir, "leftovers", lambda: [tmp_path] * 5)
    check = found("leftovers")
    assert check.status == "limited"
    assert check.found.startswith("15.")
    assert check.found.endswith(f"{tmp_path} and 2 more")
    assert "trtpd serve" in check.mend
    assert (tmp_path / "logs" / "x.log").exists()


def without(monkeypatch, distribution):
    real = importlib.metadata.version

    def version(name):
        if name == distribution:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_each_thing_is_reported_once_with_what_it_is_needed_for():
    checks = doctor.examine()
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.needed_for and check.found for check in checks)


def test_what_is_missing_or_limited_comes_with_its_mend():
    assert all(check.mend for check in doctor.examine() if check.status != "ok")


@pytest.mark.parametrize(
    ("distribution", "name"), [("nvidia-pytriton", "triton"), ("nixl-cu12", "nixl"), ("mpi4py", "mpi")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, distribution, name):
    without(monkeypatch, distribution)
    monkeypatch.setattr(doctor, "NGC_SERVER", Path("/nowhere/tritonserver"))
    check = found(name)
    assert check.status == "missing"
    assert "pip install" in check.mend


def test_another_triton_package_than_the_known_one_is_limited(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "9.9" if n == "nvidia-pytriton" else real(n))
    monkeypatch.setattr(doctor, "NGC_SERVER", Path("/nowhere/tritonserver"))
    assert found("triton").status == "limited"
    assert "9.9" in found("triton").found
