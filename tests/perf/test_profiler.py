"""`trtpd profile` on emulated engines in processes of their own: it can be cut off anywhere, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from trtpd_testing import tiny
from trtpd_testing.emulated_build import write_build
from trtpd_testing.harness import TRTPD, trtpd

from trtpd.build.cost_profile import CostProfile, read_profile
from trtpd.build.found_profile import find_profile
from trtpd.build.manifest import read_manifest
from trtpd.errors import InputError
from trtpd.perf.profiler import ProfileOptions, Profiler
from trtpd.perf.step_fit import fit_transfer

COSTS: dict[str, Any] = {"prefill_tokens_per_s": 20_000.0, "decode_step_ms": 4.0}


def silent(stage: str, done: int, total: int) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_build(tmp_path_factory.mktemp("profiler") / "build", "prefill", "decode", **COSTS)


@pytest.fixture(scope="module")
def profiled(build: Path) -> CostProfile:
    """All of the build, over shm."""
    options = ProfileOptions(build=build, out=build / "profile.json", roles=("prefill", "decode"), paths=("shm",))
    return Profiler(options, silent).run()


def test_a_profile_tells_what_the_engines_cost_and_is_found_beside_them(build: Path, profiled: CostProfile) -> None:
    decode = profiled.engines["decode"].fit
    assert decode is not None
    assert decode.fixed_s + decode.decode_step_s > 0.003
    shm = profiled.transfers["shm"]
    assert len(shm.points) >= 2
    assert shm.fit == fit_transfer(shm.points), "so small a cache may show no rate: then there is no fit"
    assert not profiled.complete, "two paths were not asked for"
    found = find_profile(build, read_manifest(build))
    assert found.profile == profiled
    assert (found.roles, found.remarks) == (("prefill", "decode"), ())


def test_what_is_measured_is_not_measured_again(build: Path, profiled: CostProfile) -> None:
    options = ProfileOptions(build=build, out=build / "profile.json", roles=("prefill", "decode"), paths=("shm",))
    profiler = Profiler(options, silent)
    assert profiler.cells[1] == 0
    assert profiler.run() == profiled


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("pair_fingerprint", "other", "another build"), ("trtpd", "0.0.1", "by trtpd 0.0.1"), ("cpu", "Z80", "on Z80")],
)
def test_a_file_of_something_else_is_not_gone_on_with(
    build: Path, profiled: CostProfile, tmp_path: Path, key: str, value: str, said: str
) -> None:
    data = profiled.model_dump()
    (data["environment"] if key in data["environment"] else data)[key] = value
    out = tmp_path / "p.json"
    out.write_text(json.dumps(data))
    with pytest.raises(InputError, match=f"{said}.*--force"):
        Profiler(ProfileOptions(build=build, out=out), silent)
    assert Profiler(ProfileOptions(build=build, out=out, force=True), silent).cells[0] == 0


def test_a_role_with_other_settings_is_measured_anew_and_the_others_are_kept(
    build: Path, profiled: CostProfile, tmp_path: Path
) -> None:
    data = profiled.model_dump()
    data["engines"]["decode"]["fingerprint"] = "former"
    out = tmp_path / "p.json"
    out.write_text(json.dumps(data))
    profiler = Profiler(ProfileOptions(build=build, out=out, roles=("prefill", "decode")), silent)
    assert any("decode has other settings" in note for note in profiler.notes)
    assert profiler.cells[0] == len(profiled.engines["prefill"].points)


def test_without_time_nothing_is_measured_and_the_file_says_so(build: Path, tmp_path: Path) -> None:
    profile = Profiler(ProfileOptions(build=build, out=tmp_path / "p.json", budget_s=1e-9), silent).run()
    assert (profile.complete, profile.engines) == (False, {})
    assert read_profile(tmp_path / "p.json") == profile


def test_it_says_at_the_start_how_many_points_and_how_long(build: Path, profiled: CostProfile, tmp_path: Path) -> None:
    both = ("prefill", "decode")
    first = Profiler(ProfileOptions(build=build, out=tmp_path / "p.json", roles=both, budget_s=7.0), silent)
    _, left = first.cells
    assert f"{left} points to measure (prefill" in first.plan
    assert "at most about 7 s" in first.plan
    data = profiled.model_dump()
    data["engines"]["decode"]["points"] = data["engines"]["decode"]["points"][:10]
    (tmp_path / "p.json").write_text(json.dumps(data))
    further = Profiler(ProfileOptions(build=build, out=tmp_path / "p.json", roles=both), silent)
    assert f"(decode {further.cells[1]}); {further.cells[0]} are measured already; about" in further.plan
    done = Profiler(ProfileOptions(build=build, out=build / "profile.json", roles=both), silent)
    assert done.plan.startswith(f"all {left} points are measured already")


@pytest.mark.parametrize("content", ["", "no", "[]", "{}", '{"format": 9}', '{"format": 1}'])
def test_a_file_that_is_no_profile_is_not_said_to_be_made_by_the_command_just_run(
    build: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(InputError) as found:
        Profiler(ProfileOptions(build=build, out=tmp_path / "p.json"), silent)
    assert "trtpd profile" not in str(found.value)
    assert "-o, or write over it with --force" in str(found.value)
    assert (tmp_path / "p.json").read_text() == content


def test_a_run_too_short_for_a_point_shows_no_empty_table(build: Path, tmp_path: Path) -> None:
    run = trtpd("profile", build, "-o", tmp_path / "p.json", "--budget-s", "0.000001")
    assert run.returncode == 0
    assert run.stdout.splitlines() == [str(tmp_path / "p.json")]
    assert "too short for a single point" in run.stderr
    assert "points are left" in run.stderr


def _gone_on_with(build: Path, profiled: CostProfile, tmp_path: Path, **changed: Any) -> Profiler:
    """A former profile of the shm path in which this was different."""
    data = profiled.model_dump()
    data["transfers"]["shm"] |= changed
    out = tmp_path / "p.json"
    out.write_text(json.dumps(data))
    return Profiler(ProfileOptions(build=build, out=out, roles=("prefill", "decode"), paths=("shm",)), silent)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"digest_every": 0}, "no digests, this build has digests over one block in 1"),
        ({"digest_every": 7}, "digests over one block in 7"),
        ({"digest_every": None}, "not kept"),
        ({"source_cores": [5, 6]}, "CPUs 5,6"),
        ({"sink_cores": [9]}, "CPUs 9"),
    ],
)
def test_a_path_with_other_digests_or_cores_is_measured_anew_and_the_rest_kept(
    build: Path, profiled: CostProfile, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    profiler = _gone_on_with(build, profiled, tmp_path, **changed)
    assert [note for note in profiler.notes if "transfer shm" in note and said in note and "measured anew" in note]
    assert profiler.cells[1] == len(profiled.transfers["shm"].points)


def test_a_path_with_the_same_digests_and_cores_is_kept(build: Path, profiled: CostProfile, tmp_path: Path) -> None:
    assert profiled.transfers["shm"].digest_every == 1
    assert _gone_on_with(build, profiled, tmp_path).cells[1] == 0


def test_a_role_on_other_cores_is_measured_anew(build: Path, profiled: CostProfile, tmp_path: Path) -> None:
    data = profiled.model_dump()
    data["engines"]["decode"]["cores"] = [7]
    out = tmp_path / "p.json"
    out.write_text(json.dumps(data))
    profiler = Profiler(ProfileOptions(build=build, out=out, roles=("prefill", "decode")), silent)
    assert any("decode was measured on CPUs 7" in note for note in profiler.notes)
    assert profiler.cells[1] == len(profiled.engines["decode"].points)


def test_a_role_or_path_that_is_not_there_is_bad_input(build: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    run = trtpd("profile", build, "-o", out, "--roles", "mixed", "--json")
    assert run.returncode == 2
    assert "prefill, decode" in json.loads(run.stdout)["error"]
    assert not out.exists()


def test_a_pipeline_file_is_built_for_the_run_and_profiled_where_it_names_its_profile(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny.CONFIG))
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "model" / "tokenizer.json"))
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(
        "model: model\nengine: emulated\npools: {prefill: {}, decode: {}}\nscheduler: {profile: mine.json}\n"
    )
    run = trtpd("profile", pipeline, "--budget-s", "0.000001", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["path"] == str(tmp_path / "mine.json")
    assert read_profile(tmp_path / "mine.json").model == "model"


def test_ctrl_c_leaves_what_was_measured_and_no_process(build: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    process = subprocess.Popen(
        [*TRTPD, "profile", str(build), "-o", str(out), "--roles", "decode"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until_s = time.monotonic() + 60.0
    while not (out.exists() and read_profile(out).engines):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "goes on" in said
    assert read_profile(out).engines["decode"].points
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("trtpd-measure-")]


@pytest.mark.slow
def test_an_engine_of_two_ranks_and_every_path_are_measured(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build", "prefill", "decode", tp={"prefill": 2}, **COSTS)
    run = trtpd("profile", build, "--json", timeout_s=600)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["complete"]
    assert told["engines"]["prefill"]["tp"] == 2
    assert told["engines"]["prefill"]["fit"]["residuals"]["points"] == len(told["engines"]["prefill"]["points"])
    assert {"shm", "tcp"} <= told["transfers"].keys()
