from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.tiny import make_machine

from trtpd.build import checks, lint, machine_checks
from trtpd.build.builder import build
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.findings import Finding
from trtpd.build.machine import Machine, this_machine
from trtpd.build.manifest import (
    Accuracy,
    EngineConfig,
    Manifest,
    PrecisionError,
    read_engine_config,
    read_manifest,
    write_json,
)
from trtpd.build.spec import PipelineSpec, parse_spec
from trtpd.errors import CheckpointError, InputError

MakeModel = Callable[..., Path]
BOTH: dict[str, Any] = {"prefill": {}, "decode": {}}


def pools(**decode: Any) -> dict[str, Any]:
    return {"pools": {"prefill": {}, "decode": decode}}


def spec_of(model: Path, **keys: Any) -> PipelineSpec:
    return parse_spec({"model": str(model), "pools": BOTH} | keys)


def findings(make_model: MakeModel, keys: dict[str, Any], machine: Machine) -> list[Finding]:
    checkpoint = open_checkpoint(make_model())
    return lint.lint_spec(spec_of(checkpoint.path, **keys), checkpoint, machine)


ASKED = {"kv": {"max_seq_tokens": 64}}
BIG_POOL = pools(kv_tokens=1 << 20)
ELASTIC = {"pools": {"elastic": True, "prefill": {"instances": 2, "kv_tokens": 1 << 10}, "decode": {"instances": 2}}}
LOPSIDED = {
    "pools": {
        "elastic": True,
        "prefill": {"instances": 3, "kv_tokens": 1 << 8},
        "decode": {"kv_tokens": 1 << 18},
    }
}
"""Fits as it begins, and not with three decode instances."""

PIPELINES: list[tuple[str, str, str, dict[str, Any], Machine]] = [
    ("precision_unsupported", "error", "pools.prefill.precision", {"precision": "fp8"}, make_machine()),
    ("kv_dtype_differs", "error", "pools.decode.kv_dtype", pools(kv_dtype="bf16"), make_machine()),
    ("kv_dtype_differs", "error", "pools.decode.kv_dtype",
     pools(kv_dtype="f16") | {"transfer": {"convert_dtype": True}}, make_machine()),
    ("kv_dtype_converted", "warning", "pools.decode.kv_dtype",
     pools(kv_dtype="bf16") | {"transfer": {"convert_dtype": True}}, make_machine()),
    ("convert_dtype_unused", "warning", "transfer.convert_dtype",
     {"transfer": {"convert_dtype": True}}, make_machine()),
    ("kv_dtype_unsupported", "error", "pools.prefill.kv_dtype", {"kv": {"dtype": "fp8"}}, make_machine()),
    ("kv_dtype_cpu", "error", "pools.prefill.kv_dtype", {"kv": {"dtype": "bf16"}}, make_machine()),
    ("kv_dtype_cpu", "error", "pools.decode.kv_dtype", {"kv": {"dtype": "f16"}}, make_machine()),
    ("tokens_per_block", "error", "kv.tokens_per_block", {"kv": {"tokens_per_block": 16}}, make_machine()),
    ("tp_heads", "error", "pools.decode.tp", pools(tp=5), make_machine()),
    ("cores_missing", "error", "pools.decode.cores", pools(cores=[7]), make_machine()),
    ("cores_shared", "warning", "pools.decode.cores", {}, make_machine(cores=(0,))),
    ("threads_over_cores", "warning", "pools.decode.threads", pools(threads=2), make_machine()),
    ("step_below_batch", "error", "pools.decode.max_step_tokens",
     pools(max_batch=8, max_step_tokens=4), make_machine()),
    ("chunk_above_step", "error", "pools.decode.chunk_tokens", pools(chunk_tokens=999), make_machine()),
    ("max_seq_tokens", "error", "kv.max_seq_tokens", {"kv": {"max_seq_tokens": 512}}, make_machine()),
    ("max_seq_tokens_small", "error", "kv.max_seq_tokens", {"kv": {"max_seq_tokens": 32}}, make_machine()),
    ("kv_pool_small", "error", "pools.decode.kv_tokens", pools(kv_tokens=32) | ASKED, make_machine()),
    ("precision_differs", "warning", "pools.decode.precision", pools(precision="int8"), make_machine()),
    ("shm_room", "error", "pools", BIG_POOL, make_machine(shm_bytes=1 << 26, shm_free_bytes=1 << 26)),
    ("shm_room", "warning", "pools", BIG_POOL, make_machine(shm_free_bytes=1 << 26)),
    ("memory_room", "error", "pools", BIG_POOL, make_machine(memory_bytes=1 << 26, memory_free_bytes=1 << 26)),
    ("memory_room", "warning", "pools", BIG_POOL, make_machine(memory_free_bytes=1 << 26)),
    ("elastic_pair", "error", "pools.elastic", {"pools": {"mixed": {}, "elastic": True}}, make_machine()),
    ("elastic_tp", "error", "pools.elastic",
     {"pools": {"prefill": {"instances": 2, "tp": 2}, "decode": {}, "elastic": True}}, make_machine()),
    ("elastic_few", "warning", "pools.elastic", {"pools": BOTH | {"elastic": True}}, make_machine()),
    ("elastic_shm_room", "error", "pools", LOPSIDED, make_machine(shm_bytes=1 << 26, shm_free_bytes=1 << 26)),
    ("elastic_memory_room", "error", "pools", LOPSIDED, make_machine(memory_bytes=1 << 26, memory_free_bytes=1 << 26)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "severity", "where", "keys", "machine"), PIPELINES)
def test_what_cannot_work_is_found_with_its_place(
    make_model: MakeModel, code: str, severity: str, where: str, keys: dict[str, Any], machine: Machine
) -> None:
    found = [finding for finding in findings(make_model, keys, machine) if finding.code == code]
    assert (severity, where) in [(finding.severity, finding.where) for finding in found]
    assert all(finding.mend and "\n" not in str(finding) for finding in found)


def test_every_code_of_the_checks_is_provoked_above() -> None:
    source = "".join(Path(path).read_text() for path in (checks.__file__, machine_checks.__file__))
    codes = set(re.findall(r'\b(?:error|warning)\(\s*"(\w+)"', source)) | set(re.findall(r'_fits\(\s*"(\w+)"', source))
    assert codes == {code for code, *_ in PIPELINES} | {"precision_error"}  # below


def test_the_measured_error_is_told_where_roles_differ_and_where_it_is_large(
    make_model: MakeModel, tmp_path: Path, machine: Machine
) -> None:
    out, spec = tmp_path / "BUILD", spec_of(make_model(), **pools(precision="int8"))
    for kl_nats, codes in ((0.01, ["precision_differs"]), (0.5, ["precision_differs", "precision_error"])):
        build(spec, out, machine=machine)
        figures = PrecisionError(
            tokens=9, kl_nats=kl_nats, log_prob_error=0, logit_error=0, same_best=1, perplexity=2, f32_perplexity=2
        )
        manifest = msgspec.structs.replace(read_manifest(out), accuracy={"int8": Accuracy(key="", figures=figures)})
        write_json(out / "manifest.json", manifest)
        found = lint.lint_build(out, machine=machine)
        assert [one.code for one in found if one.code.startswith("precision")] == codes
        assert f"KL {kl_nats:.4f} nats" in found[0].message


def test_arguments_for_another_engine_are_an_error(make_model: MakeModel, machine: Machine) -> None:
    found = findings(make_model, pools(engine_args={"gemm_plugin": "auto"}), machine)
    assert [(one.code, one.where) for one in found] == [("engine_args_unused", "pools.decode.engine_args")]


def test_elastic_pools_that_fit_have_no_findings_of_their_own(make_model: MakeModel, machine: Machine) -> None:
    assert [one for one in findings(make_model, ELASTIC, machine) if one.code.startswith("elastic")] == []


def test_a_plain_pipeline_has_no_findings(make_model: MakeModel, machine: Machine) -> None:
    assert findings(make_model, {}, machine) == []


def test_the_number_of_ranks_is_set_against_the_number_of_heads(make_model: MakeModel, machine: Machine) -> None:
    checkpoint = open_checkpoint(make_model())
    found = [
        lint.lint_spec(spec_of(checkpoint.path, **keys), checkpoint, machine)
        for keys in (pools(tp=4), pools(tp=5), {"engine": "emulated"} | pools(tp=5))
    ]
    assert [len(one) for one in found] == [0, 1, 0]
    (finding,) = found[1]
    assert finding.values == ("5", "4")
    assert "5" in finding.message
    assert "4 attention heads" in finding.message


def test_errors_come_before_warnings(make_model: MakeModel) -> None:
    keys = pools(kv_tokens=32, threads=9) | ASKED
    severities = [finding.severity for finding in findings(make_model, keys, make_machine(cores=(0,)))]
    assert severities == sorted(severities)
    assert {"error", "warning"} == set(severities)


def test_a_pool_that_stands_by_shares_its_cores_without_a_warning(make_model: MakeModel, machine: Machine) -> None:
    assert findings(make_model, {"pools": BOTH | {"mixed": {"instances": 0}}}, machine) == []


def test_bf16_kv_is_fine_where_the_cpu_has_bf16(make_model: MakeModel) -> None:
    assert findings(make_model, {"kv": {"dtype": "bf16"}}, make_machine(cpu_features=("bf16",))) == []


def test_a_model_without_an_end_token_is_noted(make_model: MakeModel, machine: Machine) -> None:
    checkpoint = open_checkpoint(make_model(eos_token_id=None))
    assert [one.code for one in lint.lint_spec(spec_of(checkpoint.path), checkpoint, machine)] == ["no_end_token"]


def test_a_file_is_linted_with_its_model(make_model: MakeModel, tmp_path: Path, machine: Machine) -> None:
    make_model()
    path = tmp_path / "p.yaml"
    path.write_text("model: tiny\npools: {prefill: {}, decode: {tp: 5}}\n")
    assert [finding.code for finding in lint.lint(path, machine=machine)] == ["tp_heads"]


def test_a_pipeline_whose_model_is_broken_is_bad_input(tmp_path: Path, machine: Machine) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("model: absent\npools: {prefill: {}, decode: {}}\n")
    with pytest.raises(CheckpointError, match="no such model"):
        lint.lint(path, machine=machine)


def test_an_emulated_pipeline_needs_no_weights(make_model: MakeModel, tmp_path: Path, machine: Machine) -> None:
    (make_model() / "model.safetensors").unlink()
    path = tmp_path / "p.yaml"
    path.write_text("model: tiny\nengine: emulated\npools: {prefill: {tp: 2}, decode: {}}\n")
    assert lint.lint(path, machine=machine) == []


@pytest.fixture
def built(make_model: MakeModel, tmp_path: Path) -> Path:
    return built_in(tmp_path / "BUILD", make_model())


def built_in(out: Path, model: Path) -> Path:
    def render(folder: Path, _manifest: Manifest) -> None:
        (folder / "model_repo").mkdir()

    return build(spec_of(model), out, render=render).out


def change_config(directory: Path, **changes: Any) -> EngineConfig:
    config = msgspec.structs.replace(read_engine_config(directory), **changes)
    (directory / "config.json").unlink()
    write_json(directory / "config.json", config)
    return config


def codes(folder: Path) -> list[str]:
    return [finding.code for finding in lint.lint(folder) if finding.severity == "error"]


def test_a_fresh_build_has_no_errors(built: Path) -> None:
    assert codes(built) == []


@pytest.mark.parametrize("name", ["fingerprint", "pair_fingerprint"])
def test_a_role_of_another_build_is_found(built: Path, name: str) -> None:
    change_config(built / "decode", **{name: "0123456789abcdef"})
    assert codes(built) == ["fingerprint_differs"]


def test_another_version_of_the_engine_is_found(built: Path) -> None:
    change_config(built / "decode", versions={"trtpd": "0.0.1", "openvino": "2020.1"})
    found = [str(finding) for finding in lint.lint(built) if finding.code == "not_loadable"]
    assert len(found) == 2
    assert "built with openvino 2020.1, here is 20" in found[1]


def test_a_cpu_that_lacks_a_feature_is_found(built: Path) -> None:
    features = (*this_machine(openvino=True).cpu_features, "amx_future")
    change_config(built / "decode", cpu_features=features)
    assert codes(built) == ["not_loadable"]


def test_a_cpu_with_more_features_is_only_noted(built: Path) -> None:
    for role in ("prefill", "decode"):
        change_config(built / role, cpu_features=())
    noted = [finding for finding in lint.lint(built) if finding.code == "cpu_has_more"]
    assert [(finding.where, finding.severity) for finding in noted] == [("prefill", "warning"), ("decode", "warning")]


@pytest.mark.parametrize("name", ["decode/config.json", "decode/rank0.safetensors"])
def test_a_missing_part_is_found(built: Path, name: str) -> None:
    (built / name).unlink()
    assert codes(built) == ["incomplete"]


def test_truncated_weights_are_found(built: Path) -> None:
    weights = built / "decode" / "rank0.safetensors"
    raw = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(raw[:-1])
    assert codes(built) == ["incomplete"]


def test_a_build_without_its_model_repository_is_found(built: Path) -> None:
    (built / "model_repo").rmdir()
    assert codes(built) == ["incomplete"]


def test_kv_dtypes_that_differ_inside_a_build_are_found(built: Path) -> None:
    layout = read_engine_config(built / "decode").layout
    change_config(built / "decode", layout=replace(layout, dtype="f16"))
    assert "kv_dtype_differs" in codes(built)


def test_a_folder_that_is_no_build_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        lint.lint(tmp_path)


def test_a_build_for_an_engine_of_the_future_is_bad_input(built: Path) -> None:
    for role in ("prefill", "decode"):
        change_config(built / role, engine="warp")
    with pytest.raises(InputError, match="'warp'"):
        lint.lint(built)


def test_the_manifest_of_a_build_is_read_back(built: Path) -> None:
    assert read_manifest(built).roles["decode"].instances == ("decode_0",)


def test_a_model_whose_tokenizer_is_cut_short_is_an_error(make_model: MakeModel, machine: Machine) -> None:
    model = make_model()
    (model / "tokenizer.json").write_text('{"version":')
    found = lint.lint_spec(spec_of(model), open_checkpoint(model), machine)
    assert [(one.code, one.severity, one.where) for one in found] == [("tokenizer", "error", "model")]


@pytest.mark.parametrize("text", [None, '{"version":'])
def test_a_build_whose_tokenizer_cannot_be_read_is_found(built: Path, text: str | None) -> None:
    path = built / "tokenizer" / "tokenizer.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert [(one.code, one.where) for one in lint.lint(built)] == [("incomplete", "tokenizer")]


@pytest.mark.parametrize("gone", ["prefill", "decode"])
def test_a_manifest_without_one_of_a_pair_is_found(built: Path, gone: str) -> None:
    manifest = read_manifest(built)
    kept = {name: entry for name, entry in manifest.roles.items() if name != gone}
    write_json(built / "manifest.json", msgspec.structs.replace(manifest, roles=kept))
    (found,) = (one for one in lint.lint(built) if one.severity == "error")
    assert (found.code, found.where) == ("incomplete", "manifest.json")
    assert f"no {gone}" in found.message


def test_mends_of_a_build_name_its_place(built: Path) -> None:
    (built / "model_repo").rmdir()
    (found,) = (one for one in lint.lint(built) if one.severity == "error")
    assert found.mend == f"build it again with `trtpd build pipeline.yaml -o {built} --force`"
