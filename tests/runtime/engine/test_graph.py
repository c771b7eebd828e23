"""The OpenVINO graph against a Llama in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.runtime.engine import reference, tiny

from trtpd.build.machine import import_openvino
from trtpd.build.manifest import Architecture, Precision
from trtpd.build.sharding import shard_of
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.graph import build_decoder
from trtpd.runtime.engine.openvino import OpenVINOPart
from trtpd.runtime.engine.ov import compile_for_cpu
from trtpd.runtime.engine.rope import F32, frequencies
from trtpd.runtime.engine.steps import Step
from trtpd.runtime.engine.weights import Weights

IDS = [int(token) for token in np.random.default_rng(1).integers(0, 199, 75)]
DRAW = DrawAt(sampling=Sampling(), index=0)


def logits_of(
    arch: Architecture, directory: Path, name: str, steps: list[list[Piece]], *, widen: bool = False
) -> list[F32]:
    """The logits of each step's sample rows."""
    openvino = import_openvino()
    settings = tiny.config(arch)
    shard = shard_of(arch, settings.layout, 0)
    with Weights(directory, arch, shard) as weights:
        model = build_decoder(
            openvino, arch, weights, shard, kv_dtype="f32", positions=settings.max_seq_tokens, widen=widen
        )
        compiled = compile_for_cpu(openvino, model, threads=1, kv_dtype="f32")
    pool = SharedPool.create(f"graph-{name}", settings.layout, 8, generation="g")
    part = OpenVINOPart(openvino, compiled, pool, settings, width=arch.vocab_size, weights=weights)
    try:
        found = []
        for pieces in steps:
            logits = part.compute(Step(pieces, [0] * len(pieces)))
            found.append(logits[: sum(piece.draw is not None for piece in pieces)].copy())
        return found
    finally:
        part.close()
        pool.close()


def whole(ids: list[int], blocks: tuple[int, ...]) -> list[list[Piece]]:
    """A prompt in pieces of 50 and the rest."""
    return [
        [Piece(ids=ids[:50], start=0, blocks=blocks, draw=DRAW)],
        [Piece(ids=ids[50:], start=50, blocks=blocks, draw=DRAW)],
    ]


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rope_scaling", [None, tiny.LLAMA3])
def test_f32_logits_are_those_of_the_reference(tied, rope_scaling, head_dim, tmp_path):
    arch = tiny.architecture(tied=tied, rope_scaling=rope_scaling, head_dim=head_dim)
    weights = tiny.weights(arch)
    tiny.save(tmp_path, tiny.stored(weights, "f32"))
    found = logits_of(arch, tmp_path, "f32", whole(IDS, (5, 0, 3)))
    expected = reference.logits(arch, weights, IDS)
    np.testing.assert_allclose(np.concatenate(found), expected[[49, 74]], atol=2e-4)


@pytest.mark.parametrize("precision", ["bf16", "f16", "int8", "int4"])
@pytest.mark.parametrize(("tied", "widen"), [(True, False), (False, False), (True, True)])
def test_narrow_weights_are_computed_with_at_their_stored_values(precision: Precision, tied, widen, tmp_path):
    arch = tiny.architecture(tied=tied)
    tensors = tiny.stored(tiny.weights(arch), precision)
    tiny.save(tmp_path, tensors)
    found = logits_of(arch, tmp_path, precision, whole(IDS, (1, 2, 4)), widen=widen)
    expected = reference.logits(arch, tiny.read_back(tensors), IDS)[[49, 74]]
    # Some CPUs round activations to int8 as well, this one does not.
    np.testing.assert_allclose(np.concatenate(found), expected, atol=0.05 * expected.std())


def test_sequences_of_one_step_do_not_see_each_other(tmp_path):
    arch = tiny.architecture()
    weights = tiny.weights(arch)
    tiny.save(tmp_path, tiny.stored(weights, "f32"))
    steps = [
        [
            Piece(ids=IDS[:40], start=0, blocks=(7, 2), draw=DRAW),
            Piece(ids=IDS[10:21], start=0, blocks=(4,), draw=None),
        ],
        [
            Piece(ids=IDS[40:41], start=40, blocks=(7, 2), draw=DRAW),
            Piece(ids=IDS[21:30], start=11, blocks=(4,), draw=DRAW),
            Piece(ids=IDS[:3], start=0, blocks=(1,), draw=DRAW),
        ],
    ]
    first, second = logits_of(arch, tmp_path, "batch", steps)
    expected = reference.logits(arch, weights, IDS[:41])
    np.testing.assert_allclose(first[0], expected[39], atol=2e-4)
    np.testing.assert_allclose(second[0], expected[40], atol=2e-4)
    np.testing.assert_allclose(second[1], reference.logits(arch, weights, IDS[10:30])[-1], atol=2e-4)
    np.testing.assert_allclose(second[2], expected[2], atol=2e-4)


@pytest.mark.parametrize("rope_scaling", [None, tiny.LLAMA3])
def test_rotary_frequencies_follow_the_published_rule(rope_scaling):
    arch = tiny.architecture(rope_scaling=rope_scaling, head_dim=64)
    np.testing.assert_allclose(frequencies(arch), reference.inverse_frequencies(arch), rtol=1e-5)
