"""Logits for the build's comparison, by the process that computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.runtime.engine import reference, tiny

from trtpd.build.manifest import ENGINE_CONFIG, write_json
from trtpd.errors import EngineError
from trtpd.perf.accuracy import engine_logits

ARCH = tiny.architecture()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny.save(tmp_path, tiny.stored(tiny.weights(ARCH), "f32"))
    write_json(tmp_path / ENGINE_CONFIG, tiny.config(ARCH))
    return tmp_path


def test_a_process_of_its_own_computes_the_logits(directory: Path) -> None:
    out = directory / "logits.npy"
    engine_logits(directory, [[7, 8, 9], [1, 2]], out)
    expected = [reference.logits(ARCH, tiny.weights(ARCH), ids)[:-1] for ids in ([7, 8, 9], [1, 2])]
    np.testing.assert_allclose(np.load(out), np.concatenate(expected), atol=5e-4)


def test_an_engine_that_fails_is_told_in_one_line(directory: Path) -> None:
    (directory / "rank0.safetensors").write_bytes(b"cut")
    with pytest.raises(EngineError, match=r"could not be computed: .*rank0\.safetensors"):
        engine_logits(directory, [[7, 8, 9]], directory / "logits.npy")
    assert not (directory / "logits.npy").exists()


def test_an_engine_that_takes_too_long_is_given_up(directory: Path) -> None:
    with pytest.raises(EngineError, match="not computed within"):
        engine_logits(directory, [[7, 8, 9]], directory / "logits.npy", give_up_s=0.01)
