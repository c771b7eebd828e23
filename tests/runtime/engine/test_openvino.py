"""What is OpenVINO's own: loading, refusals, and its two ways of failing in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file
from tests.runtime.engine import tiny
from tests.runtime.engine.driver import Driver, prompt, request

from trtpd.build.backends.openvino import weights_file
from trtpd.build.machine import import_openvino
from trtpd.errors import EngineError
from trtpd.runtime.core.events import Rejected
from trtpd.runtime.engine import openvino as engine_module
from trtpd.runtime.engine import ov, selftest
from trtpd.runtime.engine.graph import Paging
from trtpd.runtime.engine.step_inputs import StepInputs

ARCH = tiny.architecture()


@pytest.fixture
def directory(tmp_path) -> Path:
    return tiny.save(tmp_path, tiny.stored(tiny.weights(ARCH), "f32"))


def settings(**overrides):
    return replace(tiny.config(ARCH), **overrides)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_node_that_fails_rejects_the_step_and_only_that(directory, threads, monkeypatch):
    engine = tiny.load_openvino(settings(profile=replace(tiny.PROFILE, threads=threads)), directory)
    driver = Driver(engine)
    expected = driver.run(request(1, prompt(20)))
    held = driver.submit(request(2, prompt(20), max_tokens=9))
    driver.until(lambda: len(driver.output(held)) == 3)
    fill = StepInputs.fill

    def without_past_lens(self, pieces):
        inputs = fill(self, pieces)
        return {**inputs, "past_lens": inputs["past_lens"][:0]}

    monkeypatch.setattr(StepInputs, "fill", without_past_lens)
    driver.step()
    monkeypatch.undo()
    rejected = driver.of(held, Rejected)[0]
    assert rejected.code == "engine_failed"
    assert ("not a number" if threads == 1 else "could not compute") in rejected.reason
    assert driver.run(request(3, prompt(20))) == expected
    engine.shutdown()


def test_an_engine_whose_steps_keep_failing_gives_up(directory, monkeypatch):
    engine = tiny.load_openvino(settings(), directory)
    driver = Driver(engine)
    fill = StepInputs.fill
    monkeypatch.setattr(StepInputs, "fill", lambda self, p: {**fill(self, p), "past_lens": np.zeros(0, np.int32)})
    for number in range(3):
        assert driver.run(request(number, prompt(20))) == []
    with pytest.raises(EngineError, match="3 steps failed in a row"):
        engine.poll(0.0)
    engine.shutdown()


def test_telemetry_is_not_imported():
    code = (
        "import sys; from trtpd.build.machine import import_openvino; import_openvino();"
        "sys.exit('openvino_telemetry.main' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("version", ["2026.3.0-1-releases", "2027.0.0"])
def test_another_version_of_openvino_is_refused_by_name(version):
    module = ModuleType("openvino")
    module.__version__ = version  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=rf"openvino {version.partition('-')[0]}.*2026\.4\.1"):
        ov.paged_attention_op(module)


def test_a_kv_type_the_cpu_lacks_is_refused(directory):
    with pytest.raises(EngineError, match="kv_dtype f32"):
        tiny.load_openvino(tiny.config(ARCH, kv_dtype="f16"), directory)


def test_the_self_test_notices_kv_the_cpu_gets_wrong():
    openvino = import_openvino()
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "threads": 1}
    selftest.check_paged_attention(openvino, kv_dtype="f32", windowed=True, **shape)
    if "BF16" in ov.cpu_capabilities(openvino):
        selftest.check_paged_attention(openvino, kv_dtype="bf16", **shape)
    else:
        with pytest.raises(EngineError, match="kv_dtype f32"):
            selftest.check_paged_attention(openvino, kv_dtype="bf16", **shape)


def test_the_self_test_notices_a_window_that_is_off_by_one(monkeypatch):
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "threads": 1}
    attend = Paging.attend

    def one_more(self, *inputs, window=None):
        return attend(self, *inputs, window=None if window is None else window + 1)

    monkeypatch.setattr(Paging, "attend", one_more)
    with pytest.raises(EngineError, match="in a window of 40 tokens"):
        selftest.check_paged_attention(import_openvino(), kv_dtype="f32", windowed=True, **shape)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny.config(ARCH, tokens_per_block=16), "tokens_per_block is 16.*32 only"),
        (replace(tiny.config(ARCH), layout=tiny.config(tiny.architecture(head_dim=32)).layout), "contradicts itself"),
        (replace(tiny.config(ARCH), profile=replace(tiny.PROFILE, cores=(100_000,))), "cores \\[100000\\]"),
        (replace(tiny.config(ARCH), profile=replace(tiny.PROFILE, max_batch=0)), "max_batch"),
    ],
)
def test_a_configuration_it_cannot_run_is_refused(config, message, directory):
    with pytest.raises(EngineError, match=message):
        tiny.load_openvino(config, directory)


def test_a_missing_a_truncated_and_a_wrong_weights_file_are_named(directory):
    path = directory / weights_file(0)
    good = load_file(path)

    def refusal() -> str:
        with pytest.raises(EngineError, match="build this role again") as caught:
            tiny.load_openvino(settings(), directory)
        return str(caught.value)

    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in good.items() if key != name}, path)
    assert name in refusal()
    save_file(good | {name: np.zeros((3, 64), np.float32)}, path)
    assert "[3, 64]" in refusal()
    save_file(good | {name: good[name].astype(np.float64)}, path)
    assert "F64" in refusal()
    path.write_bytes(path.read_bytes()[:1000])
    assert weights_file(0) in refusal()
    path.unlink()
    assert weights_file(0) in refusal()


def test_bf16_must_be_declared_as_such(directory):
    tensors = tiny.stored(tiny.weights(ARCH), "bf16")
    save_file(tensors, directory / weights_file(0), metadata={"bf16_as_u16": json.dumps([])})
    with pytest.raises(EngineError, match="U16, expected F32"):
        tiny.load_openvino(settings(), directory)


def test_an_untied_model_needs_its_head(directory):
    path = directory / weights_file(0)
    good = load_file(path)
    save_file({key: value for key, value in good.items() if key != "lm_head.weight"}, path)
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        tiny.load_openvino(settings(), directory)


@pytest.mark.parametrize("precision", ["bf16", "f16", "int8", "int4"])
def test_narrow_builds_serve(precision, tmp_path):
    tiny.save(tmp_path, tiny.stored(tiny.weights(ARCH), precision))
    engine = tiny.load_openvino(tiny.config(ARCH, precision=precision), tmp_path)
    assert len(Driver(engine).run(request(1, prompt(50)))) == 12
    engine.shutdown()


@pytest.mark.parametrize(("allowed", "kept"), [({0}, []), ({0, 1}, []), ({0, 1, 2}, [(0, 1)])])
def test_an_engine_keeps_to_the_cores_of_its_pool_and_to_fewer_if_its_process_has_fewer(monkeypatch, allowed, kept):
    calls = []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: calls.append(tuple(cores)))
    engine_module._keep_to_cores((0, 1))
    assert calls == kept
