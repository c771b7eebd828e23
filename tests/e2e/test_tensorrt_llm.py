"""`engine: tensorrt_llm` through real Triton, on the stand-in: adapter, opaque hand-off and the router around them.

The stand-in computes on the CPU, moves KV between its processes by itself and counts what it holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from msgspec.structs import replace
from tests.runtime.engine import reference, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from trtpd_testing import tensorrt
from trtpd_testing.harness import Server, ask, nothing_is_held, serving, trtpd

pytestmark = pytest.mark.e2e

CORES = sorted(os.sched_getaffinity(0))
NAMES = ("chat", "code", "story", "turns")
HELD_MS = 5000
"""The stand-in's limit on KV that nobody fetches, and decode's on KV that doesn't come."""


class Stage:
    """Where the stand-in is installed: builds, its faults file, its counts."""

    def __init__(self, home: Path, release: str = "1.2") -> None:
        self.home = home
        self.release = release
        self.faults = home / "faults.json"
        self.counts = home / "counts"
        self.counts.mkdir()

    def build(self, name: str, model: Path, **pools: dict[str, Any]) -> Path:
        first, last = CORES[0], CORES[-1]
        plain = {"kv_tokens": 8192, "max_batch": 16, "max_step_tokens": 2048}
        cores = {"prefill": [first], "decode": [last]}
        spec = {
            "model": str(model),
            "engine": "tensorrt_llm",
            "precision": "f32",
            "pools": {role: plain | {"cores": cores[role]} | given for role, given in pools.items()},
            "kv": {"max_seq_tokens": 2048 if name == "smol" else 256},
            "tensorrt_llm": {
                "version": self.release,
                "gpu": "h100",
                "kv_transfer_timeout_ms": HELD_MS,
                "max_prompt_tokens": 1024 if name == "smol" else 200,
            },
            "slo": {"ttft_ms": 60000, "tpot_ms": 5000},
        }
        path = self.home / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        run = trtpd("build", path, "--output", self.home / name)
        assert run.returncode == 0, run.stderr
        return self.home / name

    @contextlib.contextmanager
    def broken(self, **faults: Any) -> Iterator[None]:
        """Every stand-in does so while this lasts."""
        self.faults.write_text(json.dumps(faults))
        try:
            yield
        finally:
            self.faults.unlink()

    def executors(self) -> list[dict[str, int]]:
        """What the executors that live hold."""
        found = []
        for path in self.counts.glob("*.json"):
            if psutil.pid_exists(int(path.stem)):
                found.append(json.loads(path.read_text()))
        return found

    @contextlib.contextmanager
    def set_up(self) -> Iterator[Stage]:
        told = {"TRTPD_DOUBLE_FAULTS": str(self.faults), "TRTPD_DOUBLE_COUNTS": str(self.counts)}
        with tensorrt.installed(self.home, version=f"{self.release}.1", **told):
            yield self


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage")).set_up() as made:
        yield made


def nothing_leaks(server: Server, stage: Stage) -> None:
    """Neither in our books nor in the executors'."""
    nothing_is_held(server)
    server.until(lambda _: all(not any(counts.values()) for counts in stage.executors()), timeout_s=30)
    assert len(stage.executors()) >= 2


# A random model with 8 KV heads, whose reference is computed here in double precision.

EIGHT = replace(
    tiny.architecture(), num_attention_heads=16, num_key_value_heads=8, vocab_size=200, max_position_embeddings=512
)
WEIGHTS = tiny.weights(EIGHT, seed=5)
PROMPT = [(7 * index * index + 3 * index + 11) % 200 for index in range(70)]


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tensorrt.write_hugging_face(tmp_path_factory.mktemp("eight") / "model", EIGHT, WEIGHTS)
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(200)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def reference_answer(tokens: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(tokens):
        ids.append(int(reference.logits(EIGHT, WEIGHTS, ids)[-1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(1, 1, id="1to1"),
        pytest.param(2, 1, id="2to1", marks=pytest.mark.slow),
        pytest.param(1, 2, id="1to2", marks=pytest.mark.slow),
    ],
)
def test_executors_of_any_sizes_hand_over_to_the_references_tokens(
    stage: Stage, eight_heads: Path, tmp_path: Path, prefill: int, decode: int
) -> None:
    build = stage.build(f"p{prefill}d{decode}", eight_heads, prefill={"tp": prefill}, decode={"tp": decode})
    with serving(build, tmp_path / "serve.log") as server:
        answers_as_the_reference(server)
        nothing_leaks(server, stage)


@pytest.mark.slow
def test_the_llm_class_of_a_later_release_serves_a_pair_as_well(eight_heads: Path, tmp_path: Path) -> None:
    with Stage(tmp_path, "1.3").set_up() as stage:
        build = stage.build("pair", eight_heads, prefill={}, decode={})
        with serving(build, tmp_path / "serve.log") as server:
            answers_as_the_reference(server)
            nothing_leaks(server, stage)


def answers_as_the_reference(server: Server) -> None:
    text = " ".join(f"t{token}" for token in PROMPT)
    answer = ask(server, text_input=text, max_tokens=24, return_log_probs=True)
    assert answer.error is None
    expected = reference_answer(24)
    end = expected.index(2) + 1 if 2 in expected else 24
    assert answer.ids == expected[:end]
    assert len(answer.log_probs) == end
    assert answer.timeline["transfer"]["path"] == "opaque"


# SmolLM2 against what transformers says.


@pytest.fixture(scope="module")
def smol(stage: Stage, smollm2: Path) -> Iterator[Server]:
    build = stage.build("smol", smollm2, prefill={}, decode={})
    with serving(build, stage.home / "smol.log") as server:
        yield server


def prompt_of(entry: dict) -> dict:
    if entry["messages"] is None:
        return {"text_input": entry["text_input"]}
    return {"messages": json.dumps(entry["messages"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_disaggregated_answer_equals_the_reference(smol: Server, stage: Stage, golden: dict, name: str) -> None:
    entry = golden["prompts"][name]
    answer = ask(smol, **prompt_of(entry), max_tokens=golden["max_tokens"], exclude_input_in_output=True)
    assert answer.error is None
    assert answer.ids == entry["output_ids"]
    assert answer.text == entry["text_output"]
    assert answer.timeline["transfer"]["path"] == "opaque"
    assert answer.timeline["transfer"]["bytes"] > 0
    nothing_leaks(smol, stage)


@pytest.mark.slow
def test_sixteen_streams_at_once_equal_their_solo_runs(smol: Server, stage: Stage, golden: dict) -> None:
    entries = [golden["prompts"][name] for name in NAMES] * 4
    limits = [5, 40, 64, 17, 33, 64, 9, 48, 12, 64, 25, 3, 56, 64, 1, 30]

    def one(index: int) -> list[int]:
        answer = ask(smol, **prompt_of(entries[index]), max_tokens=limits[index], exclude_input_in_output=True)
        assert answer.error is None
        return answer.ids

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(16)))
    for index, ids in enumerate(answers):
        assert ids == entries[index]["output_ids"][: limits[index]], f"stream {index}"
    nothing_leaks(smol, stage)


def leave_before_the_first_token(server: Server, entry: dict, _: Stage) -> None:
    with contextlib.suppress(queue.Empty):
        ask(server, **prompt_of(entry), max_tokens=64, timeout_s=0.05)


def leave_while_the_kv_moves(server: Server, entry: dict, stage: Stage) -> None:
    with stage.broken(hold_fetches=1.0):
        answer = ask(server, **prompt_of(entry), max_tokens=64, leave_after=1)
    assert answer.ids == entry["output_ids"][:1]


def leave_while_it_decodes(server: Server, entry: dict, _: Stage) -> None:
    answer = ask(server, **prompt_of(entry), max_tokens=64, leave_after=6)
    assert answer.ids == entry["output_ids"][: len(answer.ids)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leave", [leave_before_the_first_token, leave_while_the_kv_moves, leave_while_it_decodes], ids=lambda f: f.__name__
)
def test_a_client_that_leaves_leaves_nothing_behind(
    smol: Server, stage: Stage, golden: dict, leave: Callable[[Server, dict, Stage], None]
) -> None:
    for name in NAMES:
        leave(smol, golden["prompts"][name], stage)
    nothing_leaks(smol, stage)


@pytest.mark.slow
def test_kv_that_never_comes_is_computed_again_where_it_is_needed(smol: Server, stage: Stage, golden: dict) -> None:
    entry = golden["prompts"]["story"]
    with stage.broken(hold_fetches=60):
        answer = ask(smol, **prompt_of(entry), max_tokens=32, exclude_input_in_output=True)
    assert answer.error is None
    assert answer.ids == entry["output_ids"][:32]
    ends = [attempt["outcome"] for attempt in answer.timeline["attempts"]]
    assert len(ends) == 3
    assert ends[:2] == ["transfer_failed"] * 2
    nothing_leaks(smol, stage)


@pytest.mark.slow
def test_a_fetch_that_breaks_costs_a_new_attempt_under_a_new_id(smol: Server, stage: Stage, golden: dict) -> None:
    entry = golden["prompts"]["code"]
    with stage.broken(drop_fetches=True):
        answer = ask(smol, **prompt_of(entry), max_tokens=32, exclude_input_in_output=True)
    assert answer.error is None
    assert answer.ids == entry["output_ids"][:32]
    assert answer.timeline["attempts"][-1]["decode"] is None
    nothing_leaks(smol, stage)


@pytest.mark.slow
def test_a_context_executor_that_is_killed_in_mid_transfer_costs_no_token(
    smol: Server, stage: Stage, golden: dict
) -> None:
    entry = golden["prompts"]["story"]
    victim = smol.worker_pid("prefill_0")
    killed: list[int] = []

    def kill(tokens: int) -> None:
        if tokens >= 1 and not killed:
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    with stage.broken(hold_fetches=2.0):
        answer = ask(smol, **prompt_of(entry), max_tokens=32, exclude_input_in_output=True, on_tokens=kill)
    assert answer.error is None
    assert answer.ids == entry["output_ids"][:32]
    smol.until(lambda status: status["instances"]["prefill_0"]["state"] == "ready", timeout_s=90)
    nothing_leaks(smol, stage)
