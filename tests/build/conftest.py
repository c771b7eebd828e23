"""Fixtures of the build room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.tiny import make_machine, write_model

from trtpd.build.machine import Machine


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "tiny", **options: Any) -> Path:
        return write_model(tmp_path / name, **options)

    return make


@pytest.fixture
def machine() -> Machine:
    return make_machine()
