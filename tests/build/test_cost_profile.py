"""profile.json: what is refused of a file, and what is used of one beside a build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.emulated_build import write_build
from trtpd_testing.profiles import profile_data

from trtpd.build.cost_profile import CostProfile, read_profile, write_profile
from trtpd.build.found_profile import find_profile
from trtpd.build.lint import lint_build, notes_on
from trtpd.build.manifest import Manifest, read_manifest, write_json
from trtpd.build.spec import load_spec
from trtpd.errors import InputError


def saved(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(profile_data() | changes))
    return path


def named(build: Path, profile: str) -> Manifest:
    """The build's manifest, its pipeline file having named a profile."""
    manifest = read_manifest(build)
    settings = manifest.settings | {"scheduler": {"profile": profile}}
    write_json(build / "manifest.json", msgspec.structs.replace(manifest, settings=settings))
    return read_manifest(build)


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return write_build(tmp_path / "build", "prefill", "decode")


def test_a_profile_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    profile = CostProfile.model_validate(profile_data())
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_an_unknown_key_is_refused_and_the_nearest_one_named(tmp_path: Path) -> None:
    data = profile_data()
    data["engines"]["decode"]["points"][0]["secondss"] = 1.0
    with pytest.raises(
        InputError, match=r"engines\.decode\.points\[0\]\.secondss: unknown key; did you mean seconds\?"
    ):
        read_profile(saved(tmp_path / "p.json", **data))
    with pytest.raises(InputError, match=r"enginess: unknown key; did you mean engines\?"):
        read_profile(saved(tmp_path / "p.json", enginess={}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', "\x00"])
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"p\.json: ") as refused:
        read_profile(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1"])
def test_a_cost_that_can_not_be_is_refused(tmp_path: Path, value: object) -> None:
    data = profile_data()
    data["engines"]["decode"]["fit"]["fixed_s"] = value
    with pytest.raises(InputError, match=r"engines\.decode\.fit\.fixed_s"):
        read_profile(saved(tmp_path / "p.json", **data))


def test_without_a_profile_the_linter_notes_it_and_nothing_is_used(build: Path) -> None:
    found = find_profile(build, read_manifest(build))
    assert (found.profile, found.roles, found.missing) == (None, (), True)
    assert "trtpd profile" in notes_on(build)[0]


def test_a_profile_in_the_build_is_used_where_it_is_of_its_engines(build: Path) -> None:
    saved(build / "profile.json")
    found = find_profile(build, read_manifest(build), cpu="a CPU")
    assert (found.roles, found.remarks, found.missing) == (("prefill", "decode"), (), False)
    assert notes_on(build) == []


def test_of_a_profile_of_other_settings_only_the_roles_that_kept_theirs_are_used(build: Path) -> None:
    data = profile_data()
    data["engines"]["decode"]["fingerprint"] = "former"
    saved(build / "profile.json", **data)
    found = find_profile(build, read_manifest(build), cpu="a CPU")
    assert found.roles == ("prefill",)
    assert "the settings of decode have changed" in found.remarks[0]
    assert "profile_stale" in [finding.code for finding in lint_build(build)]


def test_a_profile_of_another_build_is_passed_over_in_a_build_and_refused_where_it_is_named(build: Path) -> None:
    path = saved(build / "profile.json", pair_fingerprint="another")
    found = find_profile(build, read_manifest(build))
    assert (found.profile, found.roles) == (None, ())
    assert "another build" in found.remarks[0]
    manifest = named(build, str(path))
    with pytest.raises(InputError, match=r"scheduler\.profile.*another build.*trtpd profile"):
        find_profile(build, manifest)
    assert "profile_unusable" in [finding.code for finding in lint_build(build) if finding.severity == "error"]


def test_a_profile_with_too_few_points_is_passed_over_with_a_word(build: Path) -> None:
    data = profile_data()
    for costs in data["engines"].values():
        costs["fit"] = None
    saved(build / "profile.json", **data)
    found = find_profile(build, read_manifest(build), cpu="a CPU")
    assert (found.profile, found.roles) == (None, ())
    assert "unfinished" in found.remarks[0]


def test_a_profile_of_another_machine_is_used_with_a_warning(build: Path) -> None:
    saved(build / "profile.json")
    found = find_profile(build, read_manifest(build), cpu="another CPU")
    assert found.roles == ("prefill", "decode")
    assert "measured on a CPU, here is another CPU" in found.remarks[0]


def test_a_named_profile_that_is_missing_is_refused_and_none_wants_none(build: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        find_profile(build, named(build, str(tmp_path / "nowhere.json")))
    saved(build / "profile.json")
    assert find_profile(build, named(build, "none")).profile is None


def test_a_pipeline_file_names_a_profile_relative_to_itself(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline.yaml"
    for written, wanted in (("p.json", str(tmp_path / "p.json")), ("auto", None), ("none", "none")):
        pipeline.write_text(f"model: m\npools: {{mixed: {{}}}}\nscheduler: {{profile: {written}}}\n")
        assert load_spec(pipeline).scheduler.profile == wanted
