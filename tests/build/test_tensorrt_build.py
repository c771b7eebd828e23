from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, models
from trtpd_testing.gpu_models import EIGHT_KV_HEADS, read_stored, write_random_model

from trtpd.build.backends.tensorrt_llm.engine_dir import profile_faults
from trtpd.build.backends.tensorrt_llm.runs import share_devices, visible_devices
from trtpd.build.builder import BuildResult, build
from trtpd.build.lint import lint
from trtpd.build.manifest import Manifest, read_engine_config, read_manifest
from trtpd.build.spec import PipelineSpec, parse_spec
from trtpd.errors import BuildError, CheckpointError

Install = Callable[..., Path]
P1D2: dict[str, Any] = {"prefill": {"tp": 1}, "decode": {"tp": 2}}


def render(folder: Path, _manifest: Manifest) -> None:
    (folder / "model_repo").mkdir()


def make(spec: PipelineSpec, out: Path, **options: Any) -> BuildResult:
    return build(spec, out, render=render, **options)


def actions(result: BuildResult) -> dict[str, str]:
    return {plan.role: plan.action for plan in result.plans}


def calls(journal: Path) -> list[str]:
    """The role of each call of trtllm-build."""
    return sorted(Path(line.split()[0]).stem for line in journal.read_text().splitlines())


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., PipelineSpec]:
    model = write_random_model(tmp_path / "model", EIGHT_KV_HEADS)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(model / "tokenizer.json"))

    def spec(**keys: Any) -> PipelineSpec:
        return parse_spec({"model": str(model), "engine": "tensorrt_llm", "pools": P1D2} | keys)

    return spec


SpecOf = Callable[..., PipelineSpec]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "builds" / "BUILD"


def test_a_build_holds_each_roles_engines_with_their_log_and_timing_cache(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install
) -> None:
    journal = install_tensorrt_llm()
    make(spec_of(), out)
    assert calls(journal) == ["decode", "prefill"]
    assert sorted(path.name for path in (out / "decode" / "engine").iterdir()) == [
        "config.json", "rank0.engine", "rank1.engine",
    ]  # fmt: skip
    names = {path.name for path in (out / "prefill").iterdir()}
    assert names == {"config.json", "content.json", "engine", "timing.cache", "build.log"}
    assert "trtllm-build --checkpoint_dir" in (out / "decode" / "build.log").read_text().splitlines()[0]
    assert [path.name for path in out.parent.iterdir()] == ["BUILD"]
    config = read_engine_config(out / "decode")
    assert config.tensorrt_llm is not None
    assert (config.tensorrt_llm.release, config.versions["tensorrt_llm"]) == ("1.2", "1.2.1")
    assert lint(out) == []


def test_roles_run_side_by_side_on_gpus_of_their_own(spec_of: SpecOf, out: Path, install_tensorrt_llm: Install) -> None:
    journal = install_tensorrt_llm(gpus=4)
    make(spec_of(), out)
    assert sorted(line.split()[1] for line in journal.read_text().splitlines()) == ["0,1", "2,3"]


def test_with_one_gpu_they_run_one_after_the_other(spec_of: SpecOf, out: Path, install_tensorrt_llm: Install) -> None:
    journal = install_tensorrt_llm(gpus=1)
    make(spec_of(), out)
    assert [line.split()[1] for line in journal.read_text().splitlines()] == ["0", "0"]


def test_an_unchanged_pipeline_builds_nothing_again(spec_of: SpecOf, out: Path, install_tensorrt_llm: Install) -> None:
    journal = install_tensorrt_llm()
    make(spec_of(), out)
    assert actions(make(spec_of(), out)) == {"prefill": "keep", "decode": "keep"}
    assert len(calls(journal)) == 2


def test_a_changed_flag_builds_its_own_role_only(spec_of: SpecOf, out: Path, install_tensorrt_llm: Install) -> None:
    journal = install_tensorrt_llm()
    make(spec_of(), out)
    pools = {"prefill": {"tp": 1}, "decode": {"tp": 2, "max_batch": 24}}
    assert actions(make(spec_of(pools=pools), out)) == {"prefill": "keep", "decode": "write"}
    assert calls(journal) == ["decode", "decode", "prefill"]


def test_what_only_changes_how_an_engine_is_run_links_it(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install
) -> None:
    journal = install_tensorrt_llm()
    make(spec_of(), out)
    result = make(spec_of(tensorrt_llm={"transceiver": "NIXL"}), out)
    assert actions(result) == {"prefill": "link", "decode": "link"}
    assert len(calls(journal)) == 2
    found = read_engine_config(out / "prefill").tensorrt_llm
    assert found is not None
    assert found.transceiver == "NIXL"
    assert lint(out) == []


def test_a_failed_role_leaves_the_former_build_and_its_log_says_why(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tensorrt_llm()
    make(spec_of(), out)
    before = (out / "manifest.json").read_bytes()
    monkeypatch.setenv("TRTPD_DOUBLE_FAIL", "decode")
    pools = {"prefill": {"tp": 1, "max_batch": 3}, "decode": {"tp": 2, "max_batch": 24}}
    with pytest.raises(BuildError, match=r"decode: trtllm-build failed \(exit 1\).*CUDA out of memory"):
        make(spec_of(pools=pools), out)
    assert (out / "manifest.json").read_bytes() == before
    assert "CUDA out of memory" in (out.parent / ".BUILD.work" / "logs" / "decode.log").read_text()


def test_the_next_try_keeps_the_role_that_was_finished_and_what_was_converted(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = install_tensorrt_llm()
    monkeypatch.setenv("TRTPD_DOUBLE_FAIL", "decode")
    with pytest.raises(BuildError):
        make(spec_of(), out)
    assert not out.exists()
    monkeypatch.delenv("TRTPD_DOUBLE_FAIL")
    stages: list[str] = []
    make(spec_of(), out, progress=lambda stage, done, total: stages.append(stage))
    assert calls(journal) == ["decode", "decode", "prefill"]
    assert "decode checkpoint" not in stages
    assert [path.name for path in out.parent.iterdir()] == ["BUILD"]


def test_force_builds_everything_anew(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = install_tensorrt_llm()
    monkeypatch.setenv("TRTPD_DOUBLE_FAIL", "decode")
    with pytest.raises(BuildError):
        make(spec_of(), out)
    monkeypatch.delenv("TRTPD_DOUBLE_FAIL")
    make(spec_of(), out, force=True)
    assert calls(journal) == ["decode", "decode", "prefill", "prefill"]


def test_the_timing_cache_of_the_former_build_is_read(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install
) -> None:
    install_tensorrt_llm()
    make(spec_of(), out)
    pools = {"prefill": {"tp": 1, "max_batch": 3}, "decode": {"tp": 2}}
    make(spec_of(pools=pools), out)
    first = (out / "prefill" / "build.log").read_text().splitlines()[0]
    words = first.split()
    assert words[words.index("--input_timing_cache") + 1] == words[words.index("--output_timing_cache") + 1]
    assert words[-1].endswith("/timing/prefill.cache")


def test_without_trtllm_build_it_says_where_to_build(
    spec_of: SpecOf, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(BuildError, match="trtllm-build is neither on PATH nor beside"):
        make(spec_of(), out)
    assert not out.exists()


def test_without_a_gpu_it_says_so_before_converting(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tensorrt_llm(gpus=0)
    with pytest.raises(BuildError, match="needs an NVIDIA GPU"):
        make(spec_of(), out)
    assert not (out.parent / ".BUILD.work" / "checkpoints").exists()


def test_another_release_than_the_installed_one_is_not_built(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install
) -> None:
    journal = install_tensorrt_llm("1.1.0")
    with pytest.raises(BuildError, match=r"planned for TensorRT-LLM 1\.2, installed here is 1\.1\.0"):
        make(spec_of(tensorrt_llm={"version": "1.2"}), out)
    assert calls(journal) == []


def test_weights_must_be_there_to_build(spec_of: SpecOf, out: Path, install_tensorrt_llm: Install) -> None:
    install_tensorrt_llm()
    (Path(spec_of().model) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        make(spec_of(), out)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({"version": "1.1.0"}, "version is 1.1.0, planned for 1.2"),
        ({"max_batch_size": 1}, "max_batch_size is 1, not"),
        ({"tokens_per_block": 64}, "plugin_config.tokens_per_block is 64, not 32"),
        ({"tp_size": 4}, "mapping.tp_size is 4, not"),
    ],
)
def test_engines_that_are_not_what_was_asked_for_are_refused(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    patch: dict[str, Any], said: str,
) -> None:  # fmt: skip
    install_tensorrt_llm()
    real = shutil.which("trtllm-build")
    wrapper = tmp_path / "bin" / "trtllm-build"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\nset -e\n{real} "$@"\nwhile [ $# -gt 0 ]; do [ "$1" = --output_dir ] && dir=$2; shift; done\n'
        f"python3 - \"$dir/config.json\" <<'PY'\n"
        "import json, sys\n"
        f"patch = {patch!r}\n"
        "def change(node):\n"
        "    if isinstance(node, dict):\n"
        "        for key in node:\n"
        "            node[key] = patch.get(key, node[key])\n"
        "            change(node[key])\n"
        "document = json.load(open(sys.argv[1])); change(document); json.dump(document, open(sys.argv[1], 'w'))\n"
        "PY\n"
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BuildError, match="made something else than was asked for") as caught:
        make(spec_of(), out)
    assert said in str(caught.value)


def test_an_engine_whose_profiles_are_too_small_is_a_fault() -> None:
    engine = {"profiles": {"input_ids": [[[1], [8], [16]]], "context_lengths": [[[1], [2], [4]]]}}
    asked = {"max_num_tokens": 32, "max_batch_size": 4}
    assert list(profile_faults("rank0.engine", engine, asked)) == [
        "rank0.engine: its profiles take input_ids up to 16, below max_num_tokens 32"
    ]
    assert list(profile_faults("rank0.engine", {"fault": "can't"}, asked)) == ["rank0.engine: can't"]


def test_engines_hold_the_weights_that_were_converted(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install
) -> None:
    install_tensorrt_llm()
    make(spec_of(), out)
    raw = (out / "prefill" / "engine" / "rank0.engine").read_bytes()
    inside = out.parent / "inside.safetensors"
    inside.write_bytes(raw[raw.index(b'{"__metadata__"') - 8 :])
    source = read_stored(Path(spec_of().model) / "model.safetensors")
    assert np.array_equal(read_stored(inside)["lm_head.weight"][1][:43], source["lm_head.weight"][1])


def test_a_damaged_engine_is_found_and_built_again(spec_of: SpecOf, out: Path, install_tensorrt_llm: Install) -> None:
    journal = install_tensorrt_llm()
    make(spec_of(), out)
    (out / "decode" / "engine" / "rank1.engine").unlink()
    assert {"incomplete", "trt_engine_files"} <= {one.code for one in lint(out)}
    assert actions(make(spec_of(), out)) == {"prefill": "keep", "decode": "write"}
    assert calls(journal) == ["decode", "decode", "prefill"]


def test_from_13_on_a_build_links_the_model_and_compiles_nothing(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install
) -> None:
    journal = install_tensorrt_llm("1.3.0", gpus=0)
    make(spec_of(), out)
    assert calls(journal) == []
    model = Path(spec_of().model)
    for role in ("prefill", "decode"):
        assert (out / role / "model" / "model.safetensors").samefile(model / "model.safetensors")
        assert yaml.safe_load((out / role / "llm_args.yaml").read_text())["backend"] == "pytorch"
    pools = {"prefill": {"tp": 1}, "decode": {"tp": 2, "max_batch": 24}}
    assert actions(make(spec_of(pools=pools), out)) == {"prefill": "keep", "decode": "link"}
    assert yaml.safe_load((out / "decode" / "llm_args.yaml").read_text())["max_batch_size"] == 24
    assert lint(out) == []


def test_a_model_on_another_disk_is_pointed_to_and_never_copied(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tensorrt_llm("1.3.0", gpus=0)
    model, link = Path(spec_of().model), os.link

    def one_disk(source: Any, target: Any, **options: Any) -> None:
        if Path(source).resolve().is_relative_to(model):
            raise OSError(errno.EXDEV, "other disk")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", one_disk)
    make(spec_of(), out)
    assert actions(make(spec_of(), out)) == {"prefill": "keep", "decode": "keep"}
    assert (out / "prefill" / "model" / "model.safetensors").readlink() == model / "model.safetensors"


def test_one_role_is_built_beside_the_other(spec_of: SpecOf, out: Path, install_tensorrt_llm: Install) -> None:
    install_tensorrt_llm()
    make(spec_of(), out)
    pools = {"prefill": {"tp": 1, "max_batch": 3}, "decode": {"tp": 2, "max_batch": 24}}
    assert actions(make(spec_of(pools=pools), out, role="decode")) == {"decode": "write"}
    assert set(read_manifest(out).roles) == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a,MIG-b"}, ("GPU-8a", "MIG-b")),
        ({}, ("0", "1", "10")),
    ],
)
def test_gpus_are_those_cuda_would_see(tmp_path: Path, environ: dict[str, str], devices: tuple[str, ...]) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices(environ, tmp_path) == devices


def test_gpus_are_dealt_out_or_taken_in_turn() -> None:
    assert share_devices("0123", 2) == [("0", "1"), ("2", "3")]
    assert share_devices("0", 2) == [("0",), ("0",)]


INTERRUPTED = """
import signal, sys
from pathlib import Path
from trtpd.build.backends.tensorrt_llm.runs import Run, run_all
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = Path(sys.argv[1])
run = Run(role="prefill", words=("x",), devices=(), output=folder, log=folder / "log")
try:
    run_all([run], folder / "sleeps", side_by_side=False, done=lambda _: None)
except KeyboardInterrupt:
    sys.exit(42)
"""


def test_an_interrupt_ends_what_was_started(tmp_path: Path) -> None:
    program = tmp_path / "sleeps"
    program.write_text("#!/bin/sh\necho $$ > pid\nexec sleep 60\n")
    program.chmod(0o755)
    builder = subprocess.Popen([sys.executable, "-P", "-c", INTERRUPTED, str(tmp_path)])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert builder.poll() is None
        time.sleep(0.01)
    builder.send_signal(signal.SIGINT)
    assert builder.wait(30) == 42
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_manifest_says_what_an_engine_must_be_run_with(
    spec_of: SpecOf, out: Path, install_tensorrt_llm: Install
) -> None:
    install_tensorrt_llm()
    make(spec_of(kv={"max_seq_tokens": 100}), out)
    found = json.loads((out / "prefill" / "config.json").read_text())["tensorrt_llm"]
    assert (found["transceiver"], found["max_tokens_in_buffer"], found["max_prompt_tokens"]) == ("UCX", 128, 99)
    assert found["chunked_context"] is True
