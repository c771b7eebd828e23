"""Fixtures of the build room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from trtpd_testing.tensorrt import environment
from trtpd_testing.tiny import make_machine, write_model

from trtpd.build.machine import Machine, installed_version


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "tiny", **options: Any) -> Path:
        folder = write_model(tmp_path / name, **options)
        Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture
def machine() -> Machine:
    return make_machine()


@pytest.fixture
def install_tensorrt_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """install_tensorrt_llm(version="1.2.1", gpus=4) makes the stand-in look installed on a machine with GPUs; gives
    the file in which each call of its trtllm-build leaves a line."""

    def install(version: str = "1.2.1", gpus: int = 4) -> Path:
        journal = tmp_path / "trtllm-build.calls"
        journal.touch()
        for name, value in environment(tmp_path, version=version, gpus=gpus).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TRTPD_DOUBLE_JOURNAL", str(journal))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        installed_version.cache_clear()
        return journal

    installed_version.cache_clear()
    yield install
    installed_version.cache_clear()
