from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.runtime.engine import reference, tiny

from trtpd.build.manifest import ENGINE_CONFIG, write_json
from trtpd.errors import EngineError
from trtpd.runtime.engine.forced import forced_logits

ARCH = tiny.architecture()
PASSAGES = [[5, 9, 100, 3, 7] * 8, [1, 2, 3], [42] * 33]


def engine(directory: Path, **profile: int) -> Path:
    tiny.save(directory, tiny.stored(tiny.weights(ARCH), "f32"))
    config = tiny.config(ARCH)
    config = msgspec.structs.replace(config, profile=msgspec.structs.replace(config.profile, **profile))
    write_json(directory / ENGINE_CONFIG, config)
    return directory


def test_every_token_of_every_passage_gets_the_logits_of_the_reference(tmp_path: Path) -> None:
    found = forced_logits(engine(tmp_path), PASSAGES, pool_name=f"test-forced-{os.getpid()}")
    expected = np.concatenate([reference.logits(ARCH, tiny.weights(ARCH), ids)[:-1] for ids in PASSAGES])
    np.testing.assert_allclose(found, expected, atol=5e-4)


def test_passages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="5 KV blocks; it has 4"):
        forced_logits(engine(tmp_path, kv_blocks=4), PASSAGES, pool_name="test-forced")
