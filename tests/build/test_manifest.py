from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.tiny import CONFIG

from trtpd.build.engines import engine_layout
from trtpd.build.hf_config import architecture_from_config
from trtpd.build.manifest import (
    FORMAT,
    EngineConfig,
    Manifest,
    RoleEntry,
    RoleProfile,
    check_loadable,
    current_features,
    current_versions,
    read_engine_config,
    read_manifest,
    write_json,
)
from trtpd.errors import EngineError, InputError

ARCHITECTURE = architecture_from_config(CONFIG, Path("config.json"))
LAYOUT = engine_layout("openvino", ARCHITECTURE, tokens_per_block=32, dtype="f32", tp=1)


def engine_config(**changes: Any) -> EngineConfig:
    config = EngineConfig(
        format=FORMAT,
        engine="openvino",
        role="decode",
        model="tiny",
        tp=1,
        precision="f32",
        architecture=ARCHITECTURE,
        layout=LAYOUT,
        profile=RoleProfile(max_step_tokens=8, chunk_tokens=4, max_batch=2, kv_blocks=3, threads=1),
        max_seq_tokens=64,
        end_ids=(2,),
        fingerprint="f",
        versions=current_versions("openvino"),
        cpu_features=current_features("openvino"),
    )
    return msgspec.structs.replace(config, **changes)


MANIFEST = Manifest(
    format=FORMAT,
    trtpd="0.1.0",
    model="tiny",
    pair_fingerprint="p",
    roles={
        "decode": RoleEntry(
            directory="decode",
            fingerprint="f",
            engine="openvino",
            precision="f32",
            layout=LAYOUT,
            instances=("decode_0",),
            cores={"decode_0": (1,)},
        )
    },
    settings={"kv": {"dtype": "f32"}},
)


def test_both_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", MANIFEST)
    write_json(tmp_path / "config.json", engine_config())
    assert read_manifest(tmp_path) == MANIFEST
    assert read_engine_config(tmp_path) == engine_config()


def damage_cut(text: str) -> str:
    return text[: len(text) // 2]


def damage_format(text: str) -> str:
    return json.dumps(json.loads(text) | {"format": 99, "layout": "of the future"})


def damage_type(text: str) -> str:
    return json.dumps(json.loads(text) | {"model": 3})


def damage_layout(text: str) -> str:
    return text.replace('"head_dim": 4', '"head_dim": 0').replace('"tokens_per_block": 32', '"tokens_per_block": 0')


DAMAGES = [damage_cut, damage_format, damage_type, damage_layout]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_one_line_with_the_mend(tmp_path: Path, damage: Any) -> None:
    write_json(tmp_path / "manifest.json", MANIFEST)
    (tmp_path / "manifest.json").write_text(damage((tmp_path / "manifest.json").read_text()))
    with pytest.raises(InputError, match=r"^[^\n]*build it again[^\n]*$"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_engine_config_is_one_line_with_the_mend(tmp_path: Path, damage: Any) -> None:
    write_json(tmp_path / "config.json", engine_config())
    (tmp_path / "config.json").write_text(damage((tmp_path / "config.json").read_text()))
    with pytest.raises(EngineError, match=r"^[^\n]*build it again[^\n]*$"):
        read_engine_config(tmp_path)


def test_another_format_is_called_that(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", engine_config(format=99))
    with pytest.raises(EngineError, match=r"build format 99, this trtpd \([\d.]+\) reads format 1"):
        read_engine_config(tmp_path)


def test_an_absent_engine_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        read_engine_config(tmp_path)


def test_an_absent_build_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such build directory"):
        read_manifest(tmp_path / "absent")


def test_a_file_is_told_from_a_build(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("model: tiny")
    with pytest.raises(InputError, match=r"a file, not a build directory; [^\n]*p\.yaml -o BUILD` and give BUILD$"):
        read_manifest(tmp_path / "p.yaml")


def test_a_manifest_without_roles_is_refused_with_its_place_in_the_mend(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", msgspec.structs.replace(MANIFEST, roles={}))
    with pytest.raises(InputError, match=rf"roles is empty; [^\n]*pipeline\.yaml -o {tmp_path} --force`$"):
        read_manifest(tmp_path)


def test_an_engine_built_here_is_loadable() -> None:
    check_loadable(engine_config())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"openvino": "2020.1"}}, "built with openvino 2020.1, here is 20"),
        ({"versions": {"tensorrt": "10.0"}}, "built with tensorrt 10.0, here is none"),
        ({"cpu_features": ("amx_future",)}, "built on a CPU with amx_future, which this one lacks"),
    ],
)
def test_another_version_or_cpu_is_one_line_with_the_mend(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=r"^decode engine of tiny: [^\n]*trtpd build[^\n]*$") as caught:
        check_loadable(engine_config(**changes))
    assert said in str(caught.value)


def test_fewer_features_than_this_cpu_has_are_no_fault() -> None:
    check_loadable(engine_config(cpu_features=()))


def test_an_emulated_engine_asks_nothing_of_the_cpu() -> None:
    assert current_features("emulated") == ()
    check_loadable(engine_config(engine="emulated", versions=current_versions("emulated"), cpu_features=()))
