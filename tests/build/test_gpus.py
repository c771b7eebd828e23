from __future__ import annotations

import pytest

from trtpd.build.gpus import GPUS, Estimate, choose_gpu, known_gpu


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_known_by_the_drivers_name(model: str, name: str | None) -> None:
    assert known_gpu(model) == name


def test_the_gpu_asked_for_comes_before_the_one_here() -> None:
    assert choose_gpu("b200", ["NVIDIA H200"]).name == "b200"
    assert choose_gpu(None, ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]).name == "h200"
    assert choose_gpu(None, []).name == "h100"


def estimate(weights_gib: int, tp: int = 1) -> Estimate:
    return Estimate(gpu=GPUS["h100"], tp=tp, weights_bytes=weights_gib << 30, kv_token_bytes=1 << 17, memory_share=0.9)


def test_weights_that_do_not_fit_leave_no_kv() -> None:
    assert estimate(100).kv_tokens == 0
    assert estimate(100).batch(prompt_tokens=100, answer_tokens=10, tpot_s=None) == 1
    assert estimate(100, tp=2).kv_tokens > 100_000


def test_a_batch_is_whole_eights_within_its_kv() -> None:
    one = estimate(16)
    batch = one.batch(prompt_tokens=1000, answer_tokens=200, tpot_s=None)
    assert batch % 8 == 0
    assert batch * 1200 <= one.kv_tokens < (batch + 8) * 1200


def test_a_step_of_the_batch_keeps_the_target() -> None:
    one = estimate(16)
    batch = one.batch(prompt_tokens=1000, answer_tokens=200, tpot_s=0.012)
    assert 1 < batch < one.batch(prompt_tokens=1000, answer_tokens=200, tpot_s=None)
    assert one.step_s(batch, 1100) <= 0.012
