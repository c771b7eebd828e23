"""Engines of several ranks, in real MPI groups."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.runtime.engine import tiny
from trtpd_testing.groups import run_in_group

CONFORMANCE = Path(__file__).with_name("group_conformance.py")


def engine_directories(folder: Path, engine: str, kv_heads: int, tp: int) -> Path:
    arch = replace(tiny.architecture(), num_attention_heads=2 * kv_heads, num_key_value_heads=kv_heads)
    for size in (1, tp):
        settings = replace(
            tiny.config(arch, engine=engine, tp=size), emulated={"prefill_tokens_per_s": 1e9, "decode_step_ms": 0.0}
        )
        directory = folder / str(size)
        directory.mkdir()
        (directory / "config.json").write_bytes(msgspec.json.encode(settings))
        if engine == "openvino":
            tiny.save_ranks(directory, tiny.stored(tiny.weights(arch), "f32"), settings)
    return folder


QUICK = "answers_as or handing or (random_traffic and 0) or shutdown or pool_of_the_same"
"""Enough to see that MPI does for the ranks what threads do for those of test_conformance.py."""


@pytest.mark.parametrize(
    ("engine", "kv_heads", "tp", "only"),
    [
        pytest.param("openvino", 3, 2, QUICK, id="openvino, 3 KV heads on 2 ranks, quick"),
        pytest.param("emulated", 2, 3, QUICK, id="emulated, 2 on 3, quick"),
        pytest.param("openvino", 3, 2, "", marks=pytest.mark.slow, id="openvino, 3 KV heads on 2 ranks"),
        pytest.param("openvino", 2, 3, "", marks=pytest.mark.slow, id="openvino, 2 on 3"),
        pytest.param("emulated", 3, 2, "", marks=pytest.mark.slow, id="emulated, 3 on 2"),
        pytest.param("emulated", 2, 3, "", marks=pytest.mark.slow, id="emulated, 2 on 3"),
    ],
)
def test_an_engine_of_several_ranks_keeps_to_the_seam(engine, kv_heads, tp, only, tmp_path):
    before = set(os.listdir("/dev/shm"))
    folder = engine_directories(tmp_path, engine, kv_heads, tp)
    module = f"trtpd.runtime.engine.{engine}"
    code, said = run_in_group(CONFORMANCE, module, folder, tp=tp, only=only, timeout_s=300)
    assert code == 0, said
    assert " passed" in said
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("trtpd-group-")}
