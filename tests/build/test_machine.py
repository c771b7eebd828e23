from __future__ import annotations

import os
import sys

import pytest

from trtpd.build import machine
from trtpd.build.machine import cpu_features, installed_version, this_machine
from trtpd.errors import EngineError


def test_this_machine_has_sizes_that_add_up() -> None:
    found = this_machine(openvino=False)
    assert set(found.cores) == os.sched_getaffinity(0)
    assert 0 < found.memory_free_bytes <= found.memory_bytes
    assert 0 <= found.shm_free_bytes <= found.shm_bytes


def test_memory_is_what_the_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_limit_bytes", lambda: 1 << 20)
    found = this_machine(openvino=False)
    assert (found.memory_bytes, found.memory_free_bytes <= 1 << 20) == (1 << 20, True)


def test_features_are_sorted_and_openvino_only_adds() -> None:
    with_openvino = cpu_features(openvino=True)
    assert list(with_openvino) == sorted(with_openvino)
    assert set(cpu_features(openvino=False)) <= set(with_openvino)


def test_without_openvino_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    cpu_features.cache_clear()
    with pytest.raises(EngineError, match=r"openvino package, which can.t be imported"):
        this_machine(openvino=True)


def test_a_package_that_is_not_there_has_version_none() -> None:
    assert installed_version("no-such-package-of-ours") == "none"
    assert installed_version("numpy")[0].isdigit()
