from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from trtpd_testing.tiny import CONFIG, family_weights, random_weights, write_family

from trtpd.build.backends.openvino import weights_key, write_weights
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.engines import engine_layout
from trtpd.build.manifest import Precision
from trtpd.build.quantise import quantise
from trtpd.build.shapes import EMBEDDING, HEAD
from trtpd.build.sharding import shard_of
from trtpd.build.tensors import TensorFile, from_bf16_bits

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
MATRICES = hnp.array_shapes(min_dims=2, max_dims=2, max_side=12)
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**80), max_value=2.0**80)


@given(hnp.arrays(np.float32, MATRICES, elements=VALUES))
def test_int8_is_never_further_off_than_half_a_scale(weight: np.ndarray[Any, Any]) -> None:
    values, scale = quantise(weight)
    assert scale.shape == (weight.shape[0], 1)
    off = np.abs(values.astype(np.float64) * scale - weight)
    assert (off <= 0.5001 * scale.astype(np.float64)).all()


@given(hnp.arrays(np.float32, MATRICES, elements=VALUES))
def test_int8_uses_its_whole_range_and_stays_symmetric(weight: np.ndarray[Any, Any]) -> None:
    values, _ = quantise(weight)
    assert values.min() >= -127
    used = np.abs(values.astype(np.int32)).max(axis=1)
    assert (used[np.abs(weight).max(axis=1) > 1e-30] == 127).all()


Tensors = dict[str, np.ndarray[Any, Any]]


def stored(tmp_path: Path, model: Path, precision: Precision) -> Tensors:
    (tensors,) = stored_by_rank(tmp_path, model, precision, 1)
    return tensors


def stored_by_rank(tmp_path: Path, model: Path, precision: Precision, tp: int) -> list[Tensors]:
    checkpoint = open_checkpoint(model)
    layout = engine_layout("openvino", checkpoint.architecture, tokens_per_block=32, dtype="f32", tp=tp)
    progress: list[tuple[int, int]] = []
    write_weights(
        checkpoint,
        checkpoint.architecture,
        precision,
        tmp_path,
        shards=[shard_of(checkpoint.architecture, layout, rank) for rank in range(tp)],
        key="the-key",
        progress=lambda *now: progress.append(now),
    )
    assert progress[-1][0] == progress[-1][1]
    return [read(tmp_path / f"rank{rank}.safetensors") for rank in range(tp)]


def read(path: Path) -> Tensors:
    with safe_open(str(path), framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


def test_f32_weights_are_the_checkpoints(make_model: Callable[..., Path], tmp_path: Path) -> None:
    found = stored(tmp_path, make_model(), "f32")
    assert found.keys() == random_weights(CONFIG).keys()
    assert all(np.array_equal(found[name], array) for name, array in random_weights(CONFIG).items())


def test_bf16_weights_are_bit_patterns_and_norms_stay_f32(make_model: Callable[..., Path], tmp_path: Path) -> None:
    found = stored(tmp_path, make_model(), "bf16")
    weights = random_weights(CONFIG)
    named = json.loads(TensorFile(tmp_path / "rank0.safetensors").metadata["bf16_as_u16"])
    assert set(named) == {name for name, array in weights.items() if array.ndim == 2}
    assert np.array_equal(found[NORM], weights[NORM])
    assert np.allclose(from_bf16_bits(found[Q_PROJ]), weights[Q_PROJ], rtol=2**-8)


def test_int8_weights_come_with_scales_and_a_tied_head_with_a_copy(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    found = stored(tmp_path, make_model(), "int8")
    weights = random_weights(CONFIG)
    for name, source in ((Q_PROJ, Q_PROJ), (HEAD, EMBEDDING)):
        assert found[name].dtype == np.int8
        restored = found[name] * found[f"{name}.scale"]
        assert np.abs(restored - weights[source]).max() <= 0.51 * found[f"{name}.scale"].max()
    assert found[EMBEDDING].dtype == np.uint16
    assert found[NORM].dtype == np.float32
    assert f"{NORM}.scale" not in found


def test_weights_say_what_they_are(make_model: Callable[..., Path], tmp_path: Path) -> None:
    stored(tmp_path, make_model(), "f32")
    assert weights_key(tmp_path, 1) == "the-key"


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4"])
def test_the_parts_of_all_ranks_make_up_the_whole(
    make_model: Callable[..., Path], tmp_path: Path, precision: Precision, tp: int
) -> None:
    model = make_model()
    (tmp_path / "whole").mkdir()
    whole = stored(tmp_path / "whole", model, precision)
    ranks = stored_by_rank(tmp_path, model, precision, tp)
    for name, tensor in whole.items():
        parts = [rank[name] for rank in ranks if name in rank]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert np.array_equal(np.concatenate(parts, axis=1), tensor), name
        elif name.endswith(("o_proj.weight.scale", "down_proj.weight.scale")):
            assert all(np.array_equal(part, tensor) for part in parts), name
        elif ".k_proj." in name or ".v_proj." in name:
            rows = {row.tobytes() for part in parts for row in part}  # heads may be held more than once
            assert rows == {row.tobytes() for row in tensor}, name
        else:
            assert np.array_equal(np.concatenate(parts), tensor), name


def test_biases_are_cut_with_their_rows_and_norms_of_heads_are_whole(tmp_path: Path) -> None:
    for family in ("qwen2", "qwen3"):
        (tmp_path / family).mkdir()
        ranks = stored_by_rank(tmp_path / family, write_family(tmp_path / f"{family}-model", family), "int8", 2)
        for name, tensor in family_weights(family).items():
            parts = [rank[name] for rank in ranks if name in rank]
            if name.endswith("bias"):
                assert [len(part) for part in parts] == [len(tensor) // 2] * 2, name
                assert np.array_equal(np.concatenate(parts), tensor), name
            elif name.endswith("norm.weight"):
                assert len(parts) == 1, name
                assert np.array_equal(parts[0], tensor), name


def test_what_every_rank_has_whole_is_stored_once(make_model: Callable[..., Path], tmp_path: Path) -> None:
    first, second = stored_by_rank(tmp_path, make_model(), "f32", 2)
    assert first.keys() - second.keys() == {name for name in first if "norm" in name or name == EMBEDDING}


def test_weights_of_a_group_are_whole_only_with_every_rank(make_model: Callable[..., Path], tmp_path: Path) -> None:
    stored_by_rank(tmp_path, make_model(), "f32", 2)
    assert weights_key(tmp_path, 2) == "the-key"
    assert weights_key(tmp_path, 3) is None
    (tmp_path / "rank1.safetensors").write_bytes(b"cut")
    assert weights_key(tmp_path, 2) is None


@pytest.mark.parametrize("content", [None, b"cut"])
def test_weights_that_are_not_whole_are_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "rank0.safetensors").write_bytes(content)
    assert weights_key(tmp_path, 1) is None
