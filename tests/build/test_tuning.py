from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtpd_testing.tiny import make_machine

from trtpd.build.accuracy import ComputeLogits, Passages
from trtpd.build.builder import build
from trtpd.build.manifest import Manifest, read_engine_config, read_manifest
from trtpd.build.measured import KEPT_TUNING, LOST_TUNING
from trtpd.build.search import Trial
from trtpd.build.spec import PipelineSpec, parse_spec
from trtpd.build.tuning import TuneOptions
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
        "decode": {"widen_weights": True, "max_batch": 3, "chunk_tokens": 32},
    }
    costs = Costs()
    tuned(spec_of(make_model(), pools=pools), tmp_path / "BUILD", costs)
    assert not costs.asked
    assert read_engine_config(tmp_path / "BUILD" / "decode").profile.max_batch == 3


def rich_spec(model: Path, **keys: Any) -> PipelineSpec:
    """Nothing is fixed."""
    return spec_of(model, **({"precision": None} | keys))


class WideCosts(Costs):
    """As Costs, on many cores: prefill scales with its threads, decode only to two; f32 is best at prefill, fewer bits
    at decode."""

    def __call__(self, directory: Path, trial: Trial) -> float:
        config = read_engine_config(directory)
        slow = {"f32": 1.0, "bf16": 1.2, "int8": 1.3, "int4": 1.3}
        fast = {"f32": 4.0, "bf16": 2.0, "int8": 1.2, "int4": 1.0}
        if trial.kind == "prefill":
            return super().__call__(directory, trial) * slow[config.precision] / config.profile.threads
        return super().__call__(directory, trial) * fast[config.precision] / min(config.profile.threads, 2)


def errors_of(**kl_nats: float) -> ComputeLogits:
    """Logits whose KL divergence from f32 is about the precision's given one."""

    def compute(directory: Path, passages: Passages, out: Path) -> None:
        config = read_engine_config(directory)
        rows = sum(len(ids) - 1 for ids in passages)
        logits = np.zeros((rows, config.architecture.vocab_size), np.float32)
        logits[:, 0] = np.sqrt(2 * config.architecture.vocab_size * kl_nats.get(config.precision, 0.0))
        with out.open("wb") as file:
            np.save(file, logits)

    return compute


def tuned_precisions(model: Path, out: Path, costs: Costs, bound: float, **kl_nats: float) -> Manifest:
    options = TuneOptions(measure=costs, kl_bound_nats=bound)
    machine = make_machine(cores=tuple(range(8)))
    made = build(
        rich_spec(model), out, render=render, tuning=options, machine=machine, compute_logits=errors_of(**kl_nats)
    )
    return made.manifest


def test_each_role_gets_the_precision_that_is_best_for_it_within_the_bound(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model(max_position_embeddings=4096)
    manifest = tuned_precisions(model, tmp_path / "A", WideCosts(), 0.1, int8=0.01, int4=0.04)
    assert [manifest.roles[role].precision for role in ("prefill", "decode")] == ["f32", "int4"]
    manifest = tuned_precisions(model, tmp_path / "B", WideCosts(), 0.02, int8=0.005, int4=0.06)
    assert [manifest.roles[role].precision for role in ("prefill", "decode")] == ["f32", "int8"]
    assert manifest.accuracy["int8"].figures is not None


def test_precision_is_not_searched_unless_asked_for(make_model: MakeModel, tmp_path: Path) -> None:
    manifest = tuned(rich_spec(make_model()), tmp_path / "BUILD", WideCosts(), kl_bound_nats=None)
    assert {entry.precision for entry in manifest.roles.values()} == {"f32"}


def test_cores_that_a_role_makes_no_use_of_go_to_the_other(make_model: MakeModel, tmp_path: Path) -> None:
    out = tmp_path / "BUILD"
    options = TuneOptions(measure=WideCosts())
    build(rich_spec(make_model()), out, render=render, tuning=options, machine=make_machine(cores=tuple(range(8))))
    prefill, decode = (read_engine_config(out / role).profile for role in ("prefill", "decode"))
    assert (decode.threads, decode.cores) == (2, (4, 5))
    assert (prefill.threads, len(prefill.cores)) == (6, 6)


def test_a_later_build_keeps_what_was_found_until_something_changes(make_model: MakeModel, tmp_path: Path) -> None:
    model, out = make_model(max_position_embeddings=4096), tmp_path / "BUILD"
    tuned(spec_of(model), out, Costs())
    found = read_engine_config(out / "decode").profile
    again = build(spec_of(model), out, render=render)
    assert {plan.action for plan in again.plans} == {"keep"}
    assert again.manifest.tuning
    assert again.notes == (KEPT_TUNING,)
    other = build(spec_of(model, slo={"tpot_ms": 30}), out, render=render)
    assert other.notes == (LOST_TUNING,)
    assert not other.manifest.tuning
    assert read_engine_config(out / "decode").profile.max_batch != found.max_batch


def test_a_decode_engine_computes_no_more_of_a_prompt_in_a_step_than_its_target_allows(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model(max_position_embeddings=4096)
    tuned(spec_of(model, slo={"tpot_ms": 150}), tmp_path / "BUILD", Costs())
    profile = read_engine_config(tmp_path / "BUILD" / "decode").profile
    assert profile.chunk_tokens == 64
    assert profile.max_step_tokens == profile.max_batch + 64


def test_a_second_search_measures_nothing_again(make_model: MakeModel, tmp_path: Path) -> None:
    model, first, second = make_model(), Costs(), Costs()
    before = tuned(spec_of(model), tmp_path / "BUILD", first)
    assert first.asked
    assert tuned(spec_of(model), tmp_path / "BUILD", second).tuning == before.tuning
    assert not second.asked


def test_a_search_without_time_says_that_it_is_not_complete(make_model: MakeModel, tmp_path: Path) -> None:
    costs = Costs()
    options = TuneOptions(measure=costs, seconds=0.0)
    made = build(spec_of(make_model()), tmp_path / "BUILD", render=render, tuning=options)
    assert not costs.asked
    assert not made.manifest.tuning["prefill"].complete
    assert "prefill: 0 variants were measured when the 0 s of --tune-s were over" in made.summary()


def test_a_search_that_fails_leaves_the_untuned_build(make_model: MakeModel, tmp_path: Path) -> None:
    def broken(directory: Path, trial: Trial) -> float:
        raise EngineError("out of order")

    with pytest.raises(EngineError, match="out of order"):
        tuned(spec_of(make_model()), tmp_path / "BUILD", broken)
    assert read_manifest(tmp_path / "BUILD").tuning == {}


def test_an_engine_that_is_not_computed_here_is_not_tuned(make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="emulated has nothing to measure"):
        tuned(spec_of(make_model(), engine="emulated", precision="f32"), tmp_path / "BUILD", Costs())
