from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtpd.build.builder import build
from trtpd.build.manifest import Manifest, read_engine_config, read_manifest
from trtpd.build.spec import PipelineSpec, parse_spec
from trtpd.build.tuning import Trial, TuneOptions
from trtpd.errors import BuildError, EngineError

MakeModel = Callable[..., Path]


class Costs:
    """Measures engine directories by a formula: a prefill has a price per chunk and per token, a decode step one per
    sequence; widened weights make a prefill token a third cheaper and a decode step twice as dear."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Trial]] = []

    def __call__(self, directory: Path, trial: Trial) -> float:
        config = read_engine_config(directory)
        assert (directory / "rank0.safetensors").is_file()
        self.asked.append((config.role, trial))
        profile = config.profile
        if trial.kind == "decode":
            return 0.001 * trial.batch * (2 if profile.widen_weights else 1)
        chunks = -(-trial.tokens // profile.chunk_tokens)
        return chunks * 0.01 + trial.tokens * (0.001 if profile.widen_weights else 0.0015)


def spec_of(model: Path, **keys: Any) -> PipelineSpec:
    pools = {role: {"kv_tokens": 131_072} for role in ("prefill", "decode")}
    given = {"model": str(model), "pools": pools, "precision": "int8", "slo": {"tpot_ms": 20}, "kv": {}}
    return parse_spec(given | keys)


def render(folder: Path, manifest: Manifest) -> None:
    (folder / "model_repo").mkdir()


def tuned(spec: PipelineSpec, out: Path, measure: Callable[[Path, Trial], float], **options: Any) -> Manifest:
    return build(spec, out, render=render, tuning=TuneOptions(measure=measure, **options)).manifest


def test_each_role_gets_what_is_best_for_its_own_work(make_model: MakeModel, tmp_path: Path) -> None:
    out = tmp_path / "BUILD"
    manifest = tuned(spec_of(make_model(max_position_embeddings=4096)), out, Costs())
    prefill, decode = (read_engine_config(out / role).profile for role in ("prefill", "decode"))
    assert prefill.widen_weights
    assert not decode.widen_weights
    assert decode.max_batch == 16
    assert manifest.settings["pools"]["decode"]["max_batch"] == 16  # type: ignore[index]


def test_the_manifest_says_what_was_tried_and_why(make_model: MakeModel, tmp_path: Path) -> None:
    tuned(spec_of(make_model()), tmp_path / "BUILD", Costs())
    record = read_manifest(tmp_path / "BUILD").tuning["prefill"]
    assert {trial.widen_weights for trial in record.tried} == {True, False}
    assert record.complete
    assert any("widen_weights true" in why for why in record.why)
    assert record.chosen["widen_weights"] is True


def test_what_the_file_says_is_neither_tried_nor_changed(make_model: MakeModel, tmp_path: Path) -> None:
    pools = {
        "prefill": {"widen_weights": False, "chunk_tokens": 64},
        "decode": {"widen_weights": True, "max_batch": 3},
    }
    costs = Costs()
    tuned(spec_of(make_model(), pools=pools), tmp_path / "BUILD", costs)
    assert not costs.asked
    assert read_engine_config(tmp_path / "BUILD" / "decode").profile.max_batch == 3


def test_a_second_search_measures_nothing_again(make_model: MakeModel, tmp_path: Path) -> None:
    model, first, second = make_model(), Costs(), Costs()
    before = tuned(spec_of(model), tmp_path / "BUILD", first)
    assert first.asked
    assert tuned(spec_of(model), tmp_path / "BUILD", second).tuning == before.tuning
    assert not second.asked


def test_a_search_without_time_says_that_it_is_not_complete(make_model: MakeModel, tmp_path: Path) -> None:
    costs = Costs()
    manifest = tuned(spec_of(make_model()), tmp_path / "BUILD", costs, seconds=0.0)
    assert not costs.asked
    assert not manifest.tuning["prefill"].complete


def test_a_search_that_fails_leaves_the_untuned_build(make_model: MakeModel, tmp_path: Path) -> None:
    def broken(directory: Path, trial: Trial) -> float:
        raise EngineError("out of order")

    with pytest.raises(EngineError, match="out of order"):
        tuned(spec_of(make_model()), tmp_path / "BUILD", broken)
    assert read_manifest(tmp_path / "BUILD").tuning == {}


def test_an_engine_that_is_not_computed_here_is_not_tuned(make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="emulated has nothing to measure"):
        tuned(spec_of(make_model(), engine="emulated", precision="f32"), tmp_path / "BUILD", Costs())
