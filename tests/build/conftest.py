"""Fixtures of the build room."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from trtpd_testing.tiny import make_machine, write_model

from trtpd.build.machine import Machine, installed_version

DOUBLES = Path(__file__).resolve().parents[1] / "doubles"


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
        info = tmp_path / "site" / f"tensorrt_llm-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
        journal = tmp_path / "trtllm-build.calls"
        journal.touch()
        monkeypatch.syspath_prepend(str(info.parent))
        monkeypatch.setenv("PATH", f"{DOUBLES / 'bin'}{os.pathsep}{os.environ['PATH']}")
        paths = (str(DOUBLES), os.environ.get("PYTHONPATH", ""))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        monkeypatch.setenv("TRTPD_DOUBLE_VERSION", version)
        monkeypatch.setenv("TRTPD_DOUBLE_JOURNAL", str(journal))
        installed_version.cache_clear()
        return journal

    installed_version.cache_clear()
    yield install
    installed_version.cache_clear()
