"""Through real Triton, f32 greedy output is what Hugging Face transformers says, colocated and disaggregated."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.harness import Server, ask, nothing_is_held

pytestmark = pytest.mark.e2e

NAMES = list(json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text())["prompts"])


def prompt_of(entry: dict) -> dict:
    """The request as the golden file holds it: raw text, or a conversation for the chat template."""
    if entry["messages"] is None:
        return {"text_input": entry["text_input"]}
    return {"messages": json.dumps(entry["messages"])}


@pytest.mark.parametrize("name", NAMES)
def test_a_disaggregated_answer_equals_the_reference(pair: Server, golden: dict, name: str) -> None:
    entry = golden["prompts"][name]
    answer = ask(
        pair,
        **prompt_of(entry),
        max_tokens=golden["max_tokens"],
        return_log_probs=True,
        exclude_input_in_output=True,
    )
    assert answer.error is None
    assert answer.ids == entry["output_ids"]
    assert answer.text == entry["text_output"]
    assert answer.log_probs == pytest.approx(entry["log_probs"], abs=2e-3)
    assert answer.timeline["transfer"]["path"] == "shm"
    placed = answer.timeline["attempts"][-1]
    assert (placed["prefill"], placed["decode"][:6]) == ("prefill_0", "decode")


@pytest.mark.parametrize("name", NAMES)
def test_a_colocated_answer_equals_the_reference(mixed: Server, golden: dict, name: str) -> None:
    entry = golden["prompts"][name]
    answer = ask(mixed, **prompt_of(entry), max_tokens=golden["max_tokens"], exclude_input_in_output=True)
    assert answer.error is None
    assert answer.ids == entry["output_ids"]
    assert answer.text == entry["text_output"]


def test_sixteen_streams_at_once_equal_their_solo_runs_though_four_clients_leave(pair: Server, golden: dict) -> None:
    entries = [golden["prompts"][name] for name in NAMES] * 2
    limits = [5, 40, 64, 17, 33, 64, 9, 48, 12, 64, 25, 3, 56, 64, 1, 30]
    leave = {1: 3, 4: 10, 9: 1, 13: 20}

    def one(index: int) -> tuple[int, list[int]]:
        answer = ask(
            pair,
            **prompt_of(entries[index]),
            max_tokens=limits[index],
            exclude_input_in_output=True,
            leave_after=leave.get(index),
        )
        assert answer.error is None
        return index, answer.ids

    with ThreadPoolExecutor(16) as pool:
        answers = dict(pool.map(one, range(16)))
    for index, ids in answers.items():
        whole = entries[index]["output_ids"][: limits[index]]
        assert ids == (whole[: len(ids)] if index in leave else whole), f"stream {index}"
    nothing_is_held(pair)


def test_a_seeded_sample_is_the_same_colocated_and_disaggregated(pair: Server, mixed: Server) -> None:
    inputs: dict[str, Any] = {
        "text_input": "The strangest thing about the island was",
        "max_tokens": 32,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 50,
        "seed": 1234,
    }
    one, two = ask(pair, **inputs), ask(mixed, **inputs)
    assert one.error is None
    assert two.error is None
    assert one.ids == two.ids
    assert len(one.ids) == 32
    assert ask(pair, **{**inputs, "seed": 77}).ids != one.ids
