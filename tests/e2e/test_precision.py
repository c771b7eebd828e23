"""How far narrow builds of the real model are from f32: logits under teacher forcing, within stated bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from trtpd_testing.harness import trtpd

from trtpd.build.accuracy import compare
from trtpd.runtime.engine.forced import forced_logits

pytestmark = pytest.mark.e2e

NAMES = ("chat", "code", "story", "turns")


@dataclass(frozen=True)
class Bound:
    """Against f32, over all positions: mean KL divergence in nats, share of equal best tokens, and the mean
    absolute error of the reference token's log-probability."""

    kl: float
    same_best: float
    log_prob: float


BOUNDS = {
    "bf16": Bound(kl=0.003, same_best=0.97, log_prob=0.03),
    "int8": Bound(kl=0.03, same_best=0.9, log_prob=0.12),
    "int4": Bound(kl=0.15, same_best=0.75, log_prob=0.35),
}


def answer_logits(directory: Path, entries: list[dict]) -> npt.NDArray[np.float32]:
    """A row for each token of the entries' reference answers, of what stands before it."""
    texts = [entry["prompt_ids"] + entry["output_ids"] for entry in entries]
    logits = forced_logits(directory, texts, pool_name=f"trtpd-test-precision-{os.getpid()}")
    ends = np.cumsum([len(ids) - 1 for ids in texts])
    return np.concatenate(
        [logits[end - len(entry["output_ids"]) : end] for end, entry in zip(ends, entries, strict=True)]
    )


@pytest.fixture(scope="module")
def directories(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A mixed engine in each precision."""
    made = {}
    for precision in ("f32", *BOUNDS):
        home = tmp_path_factory.mktemp(precision)
        (home / "pipeline.yaml").write_text(
            f"model: {smollm2}\nprecision: {precision}\npools: {{mixed: {{instances: 1, kv_tokens: 8192}}}}\n"
        )
        run = trtpd("build", home / "pipeline.yaml", "--output", home / "build", "--no-accuracy")
        assert run.returncode == 0, run.stderr
        made[precision] = home / "build" / "mixed"
    return made


def test_narrow_weights_stay_within_their_stated_bounds(directories: dict[str, Path], golden: dict) -> None:
    entries = [golden["prompts"][name] for name in NAMES]
    exact = answer_logits(directories["f32"], entries)
    assert exact.argmax(-1).tolist() == [token for entry in entries for token in entry["output_ids"]]
    answers = [entry["prompt_ids"][-1:] + entry["output_ids"] for entry in entries]
    for precision, bound in BOUNDS.items():
        found = compare(exact, answer_logits(directories[precision], entries), answers)
        print(f"{precision}: {found}")
        assert found.kl_nats <= bound.kl, precision
        assert found.same_best >= bound.same_best, precision
        assert found.log_prob_error <= bound.log_prob, precision
