"""Builds of emulated engines for the chaos tests: real processes, no model computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtpd.perf.served import build, tiny_model


@pytest.fixture
def make_emulated(smollm2: Path, tmp_path: Path) -> Callable[..., Path]:
    """make_emulated(name, pools) -> a build; one with another `max_seq_tokens` has another fingerprint."""

    def make(name: str, pools: dict[str, Any], *, max_seq_tokens: int = 2048) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        model = tmp_path / "model"
        pipeline = {
            "model": str(model if model.exists() else tiny_model(model, model=smollm2)),
            "name": "emulated",
            "engine": "emulated",
            "pools": pools,
            "kv": {"max_seq_tokens": max_seq_tokens},
            "emulated": {"prefill_tokens_per_s": 20000, "decode_step_ms": 20},
        }
        return build(folder, pipeline)

    return make
