from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtpd.build.manifest import Manifest, RoleEntry
from trtpd.build.repository import TEMPLATES, render
from trtpd.errors import BuildError
from trtpd.kv_transfer.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=4, tokens_per_block=4, dtype="f32")


def manifest(**instances: tuple[str, ...]) -> Manifest:
    roles = {
        role: RoleEntry(
            directory=role, fingerprint="f", engine="emulated", precision="f32", layout=LAYOUT, instances=names
        )
        for role, names in instances.items()
    }
    return Manifest(format=1, trtpd="0", model="m", pair_fingerprint="p", roles=roles, settings={})


def names_in(config: str, section: str) -> list[str]:
    body = re.search(rf"^{section} \[(.*?)^\]", config, re.DOTALL | re.MULTILINE)
    assert body is not None
    return re.findall(r'name: "(\w+)"', body[1])


def test_each_instance_gets_a_model_and_the_router_one(tmp_path: Path) -> None:
    render(tmp_path, manifest(prefill=("prefill_0",), decode=("decode_0", "decode_1")))
    models = {path.name for path in (tmp_path / "model_repo").iterdir()}
    assert models == {"pd", "prefill_0", "decode_0", "decode_1"}
    for name in models:
        config = (tmp_path / "model_repo" / name / "config.pbtxt").read_text()
        assert f'name: "{name}"\nbackend: "python"' in config
        assert "${" not in config
        assert (tmp_path / "model_repo" / name / "1" / "model.py").is_file()


def test_rendering_again_drops_models_that_are_gone(tmp_path: Path) -> None:
    render(tmp_path, manifest(mixed=("mixed_0", "mixed_1")))
    render(tmp_path, manifest(mixed=("mixed_0",)))
    assert {path.name for path in (tmp_path / "model_repo").iterdir()} == {"pd", "mixed_0"}


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="a name of its own"):
        render(tmp_path, manifest(prefill=("x",), decode=("x",)))


def test_a_place_that_cannot_be_written_is_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="can't be written"):
        render(tmp_path / "file", manifest(mixed=("mixed_0",)))


@pytest.mark.parametrize("shim", sorted(TEMPLATES.glob("*/1/model.py")), ids=lambda path: path.parts[-3])
def test_shims_stay_shims(shim: Path) -> None:
    assert len(shim.read_text().splitlines()) < 40


def test_no_input_or_output_is_declared_twice() -> None:
    for template in TEMPLATES.glob("*/config.pbtxt"):
        for section in ("input", "output"):
            names = names_in(template.read_text(), section)
            assert len(names) == len(set(names))
