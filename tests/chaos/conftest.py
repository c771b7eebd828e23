"""Builds of emulated engines for the chaos tests: real processes, no model computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtpd.perf.served import build, tiny_model


@pytest.fixture
def make_emulated(smollm2: Path, tmp_path: Path) -> Callable[..., Path]:
    """make_emulated(name, pools, **costs) -> a build; one with other costs has another fingerprint."""

    def make(name: str, pools: dict[str, Any], **costs: float) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        model = tmp_path / "model"
        pipeline = {
            "model": str(model if model.exists() else tiny_model(model, model=smollm2)),
            "name": "emulated",
            "engine": "emulated",
            "pools": pools,
            "kv": {"max_seq_tokens": 2048},
            "emulated": {"prefill_tokens_per_s": 20000, "decode_step_ms": 20} | costs,
        }
        return build(folder, pipeline)

    return make
