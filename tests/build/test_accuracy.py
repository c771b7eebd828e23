from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtpd_testing.tiny import make_machine

from trtpd.build.accuracy import Passages, compare
from trtpd.build.builder import BuildResult, build
from trtpd.build.manifest import read_engine_config, read_manifest
from trtpd.build.spec import parse_spec
from trtpd.errors import EngineError

MakeModel = Callable[..., Path]
PASSAGES = [[1, 2, 3], [0, 4]]


class Logits:
    """Random logits, those of narrower weights `off` by a little; fails for the precision that `broken` names."""

    def __init__(self, *, off: float = 0.1, broken: str = "") -> None:
        self.asked: list[str] = []
        self._off, self._broken = off, broken

    def __call__(self, directory: Path, passages: Passages, out: Path) -> None:
        config = read_engine_config(directory)
        assert (directory / "rank0.safetensors").is_file()
        assert config.tp == 1
        self.asked.append(config.precision)
        if config.precision == self._broken:
            raise EngineError("out of order")
        rows = sum(len(ids) - 1 for ids in passages)
        logits = np.random.default_rng(0).standard_normal((rows, config.architecture.vocab_size))
        if config.precision != "f32":
            logits += self._off * np.random.default_rng(1).standard_normal(logits.shape)
        with out.open("wb") as file:
            np.save(file, logits.astype(np.float32))


def built(model: Path, out: Path, logits: Logits, *, engine: str = "openvino", **decode: Any) -> BuildResult:
    pools = {"prefill": {}, "decode": {"precision": "int8"} | decode}
    spec = parse_spec({"model": str(model), "engine": engine, "pools": pools})
    return build(spec, out, machine=make_machine(), compute_logits=logits)


def test_equal_logits_have_no_error() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    figures = compare(logits, logits + 7, PASSAGES)
    assert figures.kl_nats == pytest.approx(0, abs=1e-6)
    assert figures.logit_error == pytest.approx(0, abs=1e-5)
    assert figures.same_best == 1
    assert figures.perplexity == pytest.approx(figures.f32_perplexity, rel=1e-5)
    assert figures.tokens == 3


def test_figures_are_those_of_the_definition() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]] * 3, np.float32))
    found = np.log(np.array([[0.2, 0.2, 0.2, 0.2, 0.2]] * 3, np.float32))
    figures = compare(exact, found, PASSAGES)
    p = np.exp(exact[0].astype(np.float64))
    assert figures.kl_nats == pytest.approx(float((p * np.log(p / 0.2)).sum()), rel=1e-5)
    assert figures.perplexity == pytest.approx(5, rel=1e-5)
    assert figures.f32_perplexity == pytest.approx((8 * 16 * 16) ** (1 / 3), rel=1e-5)


def test_logits_that_are_not_numbers_are_refused() -> None:
    logits = np.zeros((3, 5), np.float32)
    with pytest.raises(EngineError, match="finite"):
        compare(logits, np.full_like(logits, np.nan), PASSAGES)


def test_a_build_measures_its_narrow_precisions_once(make_model: MakeModel, tmp_path: Path) -> None:
    model, out, logits = make_model(), tmp_path / "BUILD", Logits()
    made = built(model, out, logits)
    assert logits.asked == ["f32", "int8"]
    found = read_manifest(out).accuracy
    assert found == made.manifest.accuracy
    assert found["int8"].figures is not None
    assert "int8 against f32: KL" in made.summary()
    assert [one.code for one in made.warnings] == ["precision_differs"]
    assert "KL" in made.warnings[0].message
    again = built(model, out, logits, max_batch=3)
    assert logits.asked == ["f32", "int8"]
    assert again.manifest.accuracy == found
    assert not [path for path in tmp_path.iterdir() if "accuracy" in path.name]


def test_ranks_are_measured_as_one(make_model: MakeModel, tmp_path: Path) -> None:
    logits = Logits()
    built(make_model(), tmp_path / "BUILD", logits, tp=2)
    assert logits.asked == ["f32", "int8"]


def test_what_cannot_be_measured_is_told_and_does_not_fail_the_build(make_model: MakeModel, tmp_path: Path) -> None:
    made = built(make_model(), tmp_path / "BUILD", Logits(broken="int8"))
    assert made.manifest.accuracy["int8"].skipped == "out of order"
    assert "not measured, out of order" in made.summary()
    assert built(tmp_path / "tiny", tmp_path / "BUILD", Logits()).manifest.accuracy["int8"].figures is not None


def test_a_machine_without_room_for_f32_weights_skips_the_measurement(make_model: MakeModel, tmp_path: Path) -> None:
    spec = parse_spec({"model": str(make_model()), "precision": "int8", "pools": {"prefill": {}, "decode": {}}})
    logits, machine = Logits(), make_machine(memory_free_bytes=1000)
    made = build(spec, tmp_path / "BUILD", machine=machine, compute_logits=logits)
    assert not logits.asked
    assert "f32 weights are" in str(made.manifest.accuracy["int8"].skipped)


def test_an_engine_that_computes_no_model_has_no_errors(make_model: MakeModel, tmp_path: Path) -> None:
    logits = Logits()
    assert not built(make_model(), tmp_path / "BUILD", logits, engine="emulated").manifest.accuracy
    assert not logits.asked
