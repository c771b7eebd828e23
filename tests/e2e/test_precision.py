"""How far narrow builds of the real model are from f32: logits under teacher forcing, within stated bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from trtpd_testing.harness import trtpd

from trtpd.build.manifest import read_engine_config
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine import openvino as engine
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.executor import DrawAt, Piece

pytestmark = pytest.mark.e2e

NAMES = ("chat", "code", "story", "turns")
DRAW = DrawAt(sampling=Sampling(), index=0)


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


def forced_logits(directory: Path, entries: list[dict], monkeypatch: pytest.MonkeyPatch) -> npt.NDArray[np.float64]:
    """Log-probabilities [position, token] at every output position of the entries, fed the reference's tokens."""
    rows: list[npt.NDArray[np.float32]] = []

    def keep(logits, sampling, indexes, histories):
        del indexes, histories
        rows.append(logits.copy())
        return [None] * len(sampling)

    monkeypatch.setattr(engine, "draw", keep)
    config = read_engine_config(directory)
    loaded = engine.load(config, directory, pool_name="trtpd-test-precision", generation="1")
    pool: SharedPool = loaded.kv.pool
    try:
        run = loaded._executor.run
        blocks, used = [], 0
        for entry in entries:
            tokens = len(entry["prompt_ids"]) + len(entry["output_ids"])
            blocks.append(range(used, used + pool.layout.blocks_for(tokens)))
            used = blocks[-1].stop
            run([Piece(ids=entry["prompt_ids"], start=0, blocks=blocks[-1], draw=DRAW)])
        for index in range(min(len(entry["output_ids"]) for entry in entries) - 1):
            run(
                [
                    Piece(
                        ids=entry["output_ids"][index : index + 1],
                        start=len(entry["prompt_ids"]) + index,
                        blocks=held,
                        draw=DRAW,
                    )
                    for entry, held in zip(entries, blocks, strict=True)
                ]
            )
    finally:
        loaded.shutdown()
    logits = np.concatenate(rows).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


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


def test_narrow_weights_stay_within_their_stated_bounds(
    directories: dict[str, Path], golden: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [golden["prompts"][name] for name in NAMES]
    exact = forced_logits(directories["f32"], entries, monkeypatch)
    reference = [entry["output_ids"][0] for entry in entries]
    length = min(len(entry["output_ids"]) for entry in entries)
    reference += [entry["output_ids"][i] for i in range(1, length) for entry in entries]
    assert (exact.argmax(-1) == reference).all()
    for precision, bound in BOUNDS.items():
        found = forced_logits(directories[precision], entries, monkeypatch)
        kl = float((np.exp(exact) * (exact - found)).sum(-1).mean())
        same = float((exact.argmax(-1) == found.argmax(-1)).mean())
        rows = np.arange(len(reference))
        error = float(np.abs(exact[rows, reference] - found[rows, reference]).mean())
        print(f"{precision}: KL {kl:.5f}, same best {same:.4f}, log-prob error {error:.4f}, {len(rows)} positions")
        assert kl <= bound.kl, precision
        assert same >= bound.same_best, precision
        assert error <= bound.log_prob, precision
