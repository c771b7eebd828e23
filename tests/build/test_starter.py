from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.engines import EngineName
from trtpd.build.lint import lint_spec
from trtpd.build.machine import Machine
from trtpd.build.resolve import resolve
from trtpd.build.spec import KVSpec, PoolSpec, TensorRTSpec, TransferSpec, load_spec, parse_spec
from trtpd.build.starter import init_text


@pytest.mark.parametrize("engine", ["openvino", "emulated"])
def test_the_file_loads_lints_clean_and_means_the_defaults(
    make_model: Callable[..., Path], machine: Machine, tmp_path: Path, engine: EngineName
) -> None:
    checkpoint = open_checkpoint(make_model())
    path = tmp_path / "pipeline.yaml"
    path.write_text(init_text(checkpoint, engine, machine, folder=tmp_path))
    spec = load_spec(path)
    assert Path(spec.model) == checkpoint.path
    assert lint_spec(spec, checkpoint, machine) == []
    plain = parse_spec({"model": spec.model, "engine": engine, "pools": {"prefill": {}, "decode": {}}})
    roles = resolve(plain, checkpoint.architecture, machine).roles
    assert resolve(spec, checkpoint.architecture, machine).roles == roles


def test_every_key_stands_in_the_file_with_its_meaning(
    make_model: Callable[..., Path], machine: Machine, tmp_path: Path
) -> None:
    text = init_text(open_checkpoint(make_model()), "tensorrt_llm", machine, folder=tmp_path)
    for section in (PoolSpec, KVSpec, TransferSpec, TensorRTSpec):
        for name, field in section.model_fields.items():
            assert any(
                line.strip().startswith(f"{name}:") and line.endswith(f"# {field.description}")
                for line in text.splitlines()
            ), name


def test_a_file_for_gpus_loads_and_only_says_that_there_are_none(
    make_model: Callable[..., Path], machine: Machine, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(make_model())
    path = tmp_path / "pipeline.yaml"
    path.write_text(init_text(checkpoint, "tensorrt_llm", machine, folder=tmp_path))
    assert [one.code for one in lint_spec(load_spec(path), checkpoint, machine)] == ["trt_absent"]


def test_a_model_beside_the_file_is_named_relative_to_it(
    make_model: Callable[..., Path], machine: Machine, tmp_path: Path
) -> None:
    text = init_text(open_checkpoint(make_model("true")), "openvino", machine, folder=tmp_path)
    assert 'model: "true"' in text
