from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.runtime.engine import tiny
from trtpd_testing.tiny import write_model

from trtpd.build.backends.openvino import write_weights
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.manifest import Precision
from trtpd.build.sharding import shard_of
from trtpd.runtime.engine.weights import Weights

MLP = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16", "int8", "int4"])
def test_a_builds_stacked_matrices_are_views_of_its_file(precision: Precision, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    arch = checkpoint.architecture
    shard = shard_of(arch, tiny.config(arch).layout, 0)
    write_weights(checkpoint, arch, precision, tmp_path, shards=[shard], key="", progress=lambda *_: None)
    size = arch.intermediate_size
    with Weights(tmp_path, arch, shard) as weights:
        both = weights.stacked(MLP, [size, size], arch.hidden_size)
        parts = [weights.matrix(name, size, arch.hidden_size) for name in MLP]
    assert all(np.shares_memory(both.values, part.values) for part in parts)
    assert np.array_equal(both.widened(), np.concatenate([part.widened() for part in parts]))


def test_matrices_that_lie_apart_are_stacked_as_copies(tmp_path: Path) -> None:
    arch = tiny.architecture()
    values = tiny.weights(arch)
    tiny.save(tmp_path, dict(values))
    with Weights(tmp_path, arch, shard_of(arch, tiny.config(arch).layout, 0)) as weights:
        names = list(reversed(MLP))
        both = weights.stacked(names, [arch.intermediate_size] * 2, arch.hidden_size)
    assert np.array_equal(both.values, np.concatenate([values[name] for name in names]))


def test_what_was_given_back_reads_the_same_again(tmp_path: Path) -> None:
    arch = tiny.architecture()
    values = tiny.weights(arch)
    tiny.save(tmp_path, dict(values))
    with Weights(tmp_path, arch, shard_of(arch, tiny.config(arch).layout, 0)) as weights:
        found = weights.embedding().values
        assert np.array_equal(found, values["model.embed_tokens.weight"])
    assert np.array_equal(found, values["model.embed_tokens.weight"])
