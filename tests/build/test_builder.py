from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtpd.build.builder import BuildResult, build
from trtpd.build.manifest import Manifest, RoleName, read_engine_config, read_manifest
from trtpd.build.spec import PipelineSpec, parse_spec
from trtpd.errors import BuildError, CheckpointError, InputError, SpecError

MakeModel = Callable[..., Path]
BOTH: dict[str, Any] = {"prefill": {}, "decode": {}}


def spec_of(model: Path, **keys: Any) -> PipelineSpec:
    return parse_spec({"model": str(model), "pools": BOTH, "precision": "f32"} | keys)


def render(folder: Path, manifest: Manifest) -> None:
    (folder / "model_repo").mkdir()
    names = [name for role in manifest.roles.values() for name in role.instances]
    (folder / "model_repo" / "names").write_text(" ".join(names))


def make(spec: PipelineSpec, out: Path, **options: Any) -> BuildResult:
    return build(spec, out, render=render, **options)


def actions(result: BuildResult) -> dict[str, str]:
    return {plan.role: plan.action for plan in result.plans}


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "builds" / "BUILD"


def test_a_build_holds_everything_that_serving_needs(make_model: MakeModel, out: Path) -> None:
    make(spec_of(make_model()), out)
    assert set(contents(out)) == {
        "manifest.json", "model_repo/names", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
        "prefill/config.json", "prefill/rank0.safetensors", "decode/config.json", "decode/rank0.safetensors",
    }  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["BUILD"]


def test_manifest_and_engine_directories_agree(make_model: MakeModel, out: Path) -> None:
    make(spec_of(make_model(), pools=BOTH | {"mixed": {"instances": 0}}), out)
    manifest = read_manifest(out)
    assert list(manifest.roles) == ["prefill", "decode", "mixed"]
    for role, entry in manifest.roles.items():
        config = read_engine_config(out / entry.directory)
        assert (config.role, config.fingerprint, config.layout) == (role, entry.fingerprint, entry.layout)
        assert config.pair_fingerprint == manifest.pair_fingerprint
        assert config.end_ids == (2,)
    assert manifest.roles["mixed"].instances == ()
    assert (out / "model_repo" / "names").read_text() == "prefill_0 decode_0"


def test_roles_with_equal_weights_share_one_file(make_model: MakeModel, out: Path) -> None:
    assert actions(make(spec_of(make_model()), out)) == {"prefill": "write", "decode": "link"}
    assert (out / "prefill" / "rank0.safetensors").samefile(out / "decode" / "rank0.safetensors")


def test_a_role_of_several_ranks_has_a_file_for_each_and_shares_all_with_its_like(
    make_model: MakeModel, out: Path
) -> None:
    pools = {"prefill": {"tp": 2}, "decode": {"tp": 2}, "mixed": {"tp": 1}}
    first = make(spec_of(make_model(), pools=pools), out)
    assert actions(first) == {"prefill": "write", "decode": "link", "mixed": "write"}
    assert "of 2 ranks" in first.summary()
    for name in ("rank0.safetensors", "rank1.safetensors"):
        assert (out / "prefill" / name).samefile(out / "decode" / name)
    assert not (out / "mixed" / "rank1.safetensors").exists()
    again = make(spec_of(out.parent.parent / "tiny", pools=pools | {"decode": {"tp": 3}}), out)
    assert actions(again) == {"prefill": "keep", "decode": "write", "mixed": "keep"}


def test_roles_of_different_precision_have_weights_of_their_own(make_model: MakeModel, out: Path) -> None:
    pools = {"prefill": {}, "decode": {"precision": "int8"}}
    assert actions(make(spec_of(make_model(), pools=pools), out)) == {"prefill": "write", "decode": "write"}


def test_unchanged_roles_are_not_built_again(make_model: MakeModel, out: Path) -> None:
    spec = spec_of(make_model())
    make(spec, out)
    before = contents(out)
    assert actions(make(spec, out)) == {"prefill": "keep", "decode": "keep"}
    after = contents(out)
    for name in ("prefill/config.json", "prefill/rank0.safetensors", "decode/rank0.safetensors"):
        assert after[name] == before[name]


def test_a_changed_setting_touches_its_own_role_only(make_model: MakeModel, out: Path) -> None:
    model = make_model()
    make(spec_of(model), out)
    pools = {"prefill": {}, "decode": {"max_batch": 3}}
    assert actions(make(spec_of(model, pools=pools), out)) == {"prefill": "keep", "decode": "link"}
    assert read_engine_config(out / "decode").profile.max_batch == 3


def test_other_weights_are_written_anew(make_model: MakeModel, out: Path) -> None:
    spec = spec_of(make_model("one"), name="m")
    first = make(spec, out).manifest
    second = make(spec_of(make_model("two", seed=1), name="m"), out)
    assert actions(second) == {"prefill": "write", "decode": "link"}
    assert second.manifest.pair_fingerprint != first.pair_fingerprint


def test_force_writes_what_is_unchanged(make_model: MakeModel, out: Path) -> None:
    spec = spec_of(make_model())
    make(spec, out)
    before = contents(out)
    assert actions(make(spec, out, force=True)) == {"prefill": "write", "decode": "link"}
    assert contents(out)["prefill/rank0.safetensors"][0] != before["prefill/rank0.safetensors"][0]


def test_a_new_role_takes_the_weights_that_are_there(make_model: MakeModel, out: Path) -> None:
    model = make_model()
    make(spec_of(model), out)
    added = make(spec_of(model, pools=BOTH | {"mixed": {}}), out)
    assert added.plans[2].action == "link"


def test_a_role_that_is_gone_leaves_the_build(make_model: MakeModel, out: Path) -> None:
    model = make_model()
    make(spec_of(model, pools=BOTH | {"mixed": {}}), out)
    make(spec_of(model), out)
    assert not (out / "mixed").exists()


def test_damaged_weights_are_written_again(make_model: MakeModel, out: Path) -> None:
    spec = spec_of(make_model())
    make(spec, out)
    for role in ("prefill", "decode"):
        (out / role / "rank0.safetensors").unlink()
        (out / role / "rank0.safetensors").write_bytes(b"damaged")
    assert actions(make(spec, out)) == {"prefill": "write", "decode": "link"}


def test_what_the_user_keeps_in_the_folder_stays(make_model: MakeModel, out: Path) -> None:
    spec = spec_of(make_model())
    make(spec, out)
    (out / "profile.json").write_text("{}")
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("mine")
    make(spec, out)
    assert (out / "profile.json").read_text() == "{}"
    assert (out / "notes" / "a.txt").read_text() == "mine"


def test_one_role_is_built_beside_the_others(make_model: MakeModel, out: Path) -> None:
    model = make_model()
    make(spec_of(model), out)
    pools = {"prefill": {"max_batch": 2}, "decode": {"max_batch": 3}}
    result = make(spec_of(model, pools=pools), out, role="decode")
    assert actions(result) == {"decode": "link"}
    assert read_engine_config(out / "decode").profile.max_batch == 3
    assert read_engine_config(out / "prefill").profile.max_batch == 16
    settings: dict[str, Any] = read_manifest(out).settings
    assert (settings["pools"]["prefill"]["max_batch"], settings["pools"]["decode"]["max_batch"]) == (16, 3)


@pytest.mark.parametrize(
    ("role", "error", "said"),
    [("decode", BuildError, "no prefill yet"), ("mixed", SpecError, "no pool mixed")],
)
def test_one_role_needs_the_others(
    make_model: MakeModel, out: Path, role: RoleName, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make(spec_of(make_model()), out, role=role)
    assert not out.exists()


def test_one_role_is_not_built_to_others_it_could_not_pair_with(make_model: MakeModel, out: Path) -> None:
    make(spec_of(make_model("one")), out)
    before = contents(out)
    with pytest.raises(BuildError, match="could not pair"):
        make(spec_of(make_model("two", seed=1)), out, role="decode")
    assert contents(out) == before


def test_a_dry_run_says_what_would_be_done_and_does_nothing(make_model: MakeModel, out: Path) -> None:
    result = make(spec_of(make_model()), out, dry_run=True)
    assert not out.exists()
    assert result.summary().splitlines()[0].startswith("prefill: to be written (openvino, f32 weights, f32 KV")


@pytest.mark.parametrize("keys", [{"kv": {"tokens_per_block": 16}}, {"engine": "tensorrt_llm", "precision": "fp8"}])
def test_what_lint_calls_an_error_is_not_built(make_model: MakeModel, out: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        make(spec_of(make_model(), **keys), out)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_a_folder_that_is_no_build_is_left_alone(make_model: MakeModel, out: Path) -> None:
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not a build directory"):
        make(spec_of(make_model()), out)
    assert list(contents(out)) == ["thesis.tex"]


def test_a_build_of_another_format_is_built_anew(make_model: MakeModel, out: Path) -> None:
    spec = spec_of(make_model())
    make(spec, out)
    manifest = out / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    assert actions(make(spec, out)) == {"prefill": "write", "decode": "link"}
    assert read_manifest(out).format == 1


def test_an_emulated_build_has_settings_and_no_weights(make_model: MakeModel, out: Path) -> None:
    spec = spec_of(make_model(), engine="emulated", emulated={"decode_step_ms": 3.0})
    make(spec, out)
    assert read_engine_config(out / "decode").emulated["decode_step_ms"] == 3.0
    assert not list(out.rglob("*.safetensors"))
    assert actions(make(spec, out)) == {"prefill": "keep", "decode": "keep"}


def test_a_failed_build_leaves_the_former_one(make_model: MakeModel, out: Path) -> None:
    make(spec_of(make_model("one"), name="m"), out)
    before = contents(out)
    broken = make_model("two", seed=1)
    weights = bytearray((broken / "model.safetensors").read_bytes())
    weights[-4:] = b"\x00\x00\xc0\x7f"
    (broken / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="aren't finite"):
        make(spec_of(broken, name="m"), out)
    assert contents(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["BUILD"]


def test_a_folder_that_cannot_be_written_is_one_line(make_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"^build .*file/BUILD: "):
        make(spec_of(make_model()), tmp_path / "file" / "BUILD")


KILLED = """
import sys, time
from pathlib import Path
from trtpd.build.builder import build
from trtpd.build.spec import parse_spec

def stop(stage, done, total):
    if stage == "prefill weights" and done * 2 > total:
        print("writing", flush=True)
        time.sleep(60)

pools = {"prefill": {}, "decode": {}}
spec = parse_spec({"model": sys.argv[1], "pools": pools, "precision": "f32", "name": "m"})
build(spec, Path(sys.argv[2]), progress=stop, render=lambda *_: None)
"""


def test_a_killed_build_leaves_the_former_one_and_the_next_one_sweeps(make_model: MakeModel, out: Path) -> None:
    make(spec_of(make_model("one"), name="m"), out)
    before = contents(out)
    model = make_model("two", seed=1)
    command = [sys.executable, "-P", "-c", KILLED, str(model), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        os.kill(process.pid, signal.SIGKILL)
    assert contents(out) == before
    assert read_manifest(out).model == "m"
    make(spec_of(model, name="m"), out)
    assert contents(out) != before
    assert [path.name for path in out.parent.iterdir()] == ["BUILD"]


@pytest.mark.parametrize("damage", ["gone", "cut", "no tokenizer"])
def test_a_tokenizer_that_cannot_be_read_stops_a_build_before_it_writes(
    make_model: MakeModel, out: Path, damage: str
) -> None:
    model = make_model()
    path = model / "tokenizer.json"
    text = path.read_text()
    path.unlink()
    if damage != "gone":
        path.write_text(text[: len(text) // 2] if damage == "cut" else "{}")
    with pytest.raises(CheckpointError, match=r"^[^\n]*tokenizer[^\n]*download it with the model$"):
        make(spec_of(model), out)
    assert not out.parent.exists()


def test_the_root_of_the_file_system_is_no_place_for_a_build(make_model: MakeModel) -> None:
    with pytest.raises(InputError, match=r"^/: can't be a build directory; name another one with -o$"):
        make(spec_of(make_model()), Path("/"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_build_is_not_built_over(make_model: MakeModel, tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    if kind == "folder":
        other.mkdir()
    (other / "notes" if kind == "folder" else other).write_text("mine")
    with pytest.raises(InputError, match=r"other: exists and is not a build directory; name another one with -o$"):
        make(spec_of(make_model()), other)
