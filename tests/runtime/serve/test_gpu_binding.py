"""From a build and a host's GPUs to what each rank is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.emulated_build import write_build
from trtpd_testing.gpu_hosts import dgx, islands, mig

from trtpd.build.gpu_topology import Topology
from trtpd.build.manifest import TensorRTConfig, read_engine_config, read_manifest, write_json
from trtpd.errors import EngineError, InputError
from trtpd.runtime.serve import stage_model
from trtpd.runtime.serve.gpu_binding import Bindings, bind_groups, on_gpus
from trtpd.runtime.serve.worker_process import WorkerProcess
from trtpd.runtime.worker.gpus import GpuBinding, binding_for, own_binding, write_bindings

SETTINGS = TensorRTConfig(
    release="1.2", mode="engine", gpu="h100", sm=90, dtype="bfloat16", quant_algo=None, kv_cache_quant_algo=None,
    transceiver="UCX", max_tokens_in_buffer=64, kv_transfer_timeout_ms=None, max_prompt_tokens=64,
    chunked_context=True, free_gpu_memory_fraction=0.9, settings={},
)  # fmt: skip


def gpu_build(folder: Path, prefill: int = 2, decode: int = 4, **changes: Any) -> Path:
    """A build whose engines say they are TensorRT-LLM's, with `changes` in their settings."""
    build = write_build(folder / "build", "prefill", "decode", tp={"prefill": prefill, "decode": decode})
    manifest = read_manifest(build)
    for name in manifest.roles:
        config = read_engine_config(build / name)
        config = msgspec.structs.replace(config, tensorrt_llm=msgspec.structs.replace(SETTINGS, **changes))
        write_json(build / name / "config.json", config)
    entries = {name: msgspec.structs.replace(entry, engine="tensorrt_llm") for name, entry in manifest.roles.items()}
    write_json(build / "manifest.json", msgspec.structs.replace(manifest, roles=entries))
    return build


def bound(build: Path, topology: Topology, *models: str) -> Bindings:
    return bind_groups(build, read_manifest(build), models or ("prefill_0", "decode_0", "pd"), topology)


def test_each_group_gets_gpus_of_its_own_and_the_cores_near_them(tmp_path: Path) -> None:
    found = bound(gpu_build(tmp_path), islands())
    prefill, decode = found.by_instance["prefill_0"], found.by_instance["decode_0"]
    assert (prefill.devices, decode.devices) == (("GPU-4", "GPU-5"), ("GPU-0", "GPU-1", "GPU-2", "GPU-3"))
    assert prefill.rank_cores == ((4, 5, 6, 7), (4, 5, 6, 7))
    assert dict(prefill.links)["GPU-0"] == "system"
    assert dict(prefill.links)["GPU-7"] == "nvlink"
    assert found.remarks[0] == "prefill_0: GPU 4, 5 (2 x NVIDIA H100 80GB HBM3 (SM 90, 80 GiB))"


def test_only_what_this_host_serves_takes_gpus(tmp_path: Path) -> None:
    build = gpu_build(tmp_path)
    assert bound(build, dgx(4), "decode_0").by_instance.keys() == {"decode_0"}
    with pytest.raises(InputError, match=r"prefill_0 2, decode_0 4 \(6 together"):
        bound(build, dgx(4))


def test_engines_that_leave_room_share_a_gpu(tmp_path: Path) -> None:
    build = gpu_build(tmp_path, 1, 1, free_gpu_memory_fraction=0.4)
    found = bound(build, dgx(1))
    assert {binding.devices for binding in found.by_instance.values()} == {("GPU-0",)}
    assert dict(found.by_instance["prefill_0"].links) == {"GPU-0": "self"}


def test_without_gpus_nothing_is_bound_and_the_reason_is_said(tmp_path: Path) -> None:
    found = bound(gpu_build(tmp_path), Topology(remark="no NVIDIA driver here"))
    assert found == Bindings({}, ("no GPU is bound: no NVIDIA driver here",))


def test_engines_on_cpus_need_no_gpus(tmp_path: Path) -> None:
    build = write_build(tmp_path / "build", "prefill", "decode")
    assert not on_gpus(read_manifest(build))
    assert bound(build, dgx()) == Bindings()


def test_ranks_over_several_hosts_are_left_to_mpirun(tmp_path: Path) -> None:
    build = gpu_build(tmp_path)
    pools = {"decode": {"hosts": ["here:2", "there:2"]}}
    write_json(build / "manifest.json", msgspec.structs.replace(read_manifest(build), settings={"pools": pools}))
    found = bound(build, dgx(2))
    assert found.by_instance.keys() == {"prefill_0"}
    assert found.remarks[0].startswith("decode_0: over several hosts")


def test_a_mig_instance_is_bound_by_its_name(tmp_path: Path) -> None:
    found = bound(gpu_build(tmp_path, 1, 1), mig())
    assert found.by_instance["decode_0"].devices == ("MIG-1",)


def test_a_binding_reaches_the_ranks_through_launcher_and_stage_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = gpu_build(tmp_path)
    for name, value in write_bindings(bound(build, islands()).by_instance).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRTPD_ROUTER", "ipc://r")
    monkeypatch.setenv("TRTPD_RUN_DIR", str(tmp_path))
    command = stage_model.worker_command(build, "prefill_0")
    environment = WorkerProcess(command, {"CUDA_VISIBLE_DEVICES": "7"})._environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-4,GPU-5"
    assert own_binding(environment) == command.gpus


def test_without_a_binding_the_environment_stays_as_it_is() -> None:
    assert write_bindings({}) == {}
    assert binding_for("prefill_0", {}).environment() == {}
    assert own_binding({}) == GpuBinding()
    assert GpuBinding().cores_of(0) == ()


def test_a_rank_takes_only_cores_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 9})
    binding = GpuBinding(devices=("a", "b"), rank_cores=((0, 1, 2, 3), (4, 5)))
    assert [binding.cores_of(rank) for rank in (0, 1, 2)] == [(2, 3), (), ()]


def test_a_variable_that_is_not_ours_is_named() -> None:
    with pytest.raises(EngineError, match="TRTPD_GPU_BINDING in the environment isn't trtpd's"):
        own_binding({"TRTPD_GPU_BINDING": "0,1"})
