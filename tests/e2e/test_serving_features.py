"""Full sampling, several answers and the prefix cache through real Triton, on an f32 build of the real model."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from trtpd_testing.harness import Answer, Server, ask, nothing_is_held

pytestmark = pytest.mark.e2e

STORY = "The lighthouse keeper had kept a diary for forty years, and on the last page of it he had written: "
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 60,
    "top_p": 0.97,
    "min_p": 0.001,
    "seed": 4321,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "prompt_ignore_length": 4,
    "min_tokens": 30,
    "bad_words": [" the", " a sea"],
    "embedding_bias_words": [" light"],
    "embedding_bias_weights": [1.0],
    "logit_bias_ids": [260, 261],
    "logit_bias_values": [-1.0, 0.5],
    "return_log_probs": True,
    "top_log_probs": 2,
}


def asked(server: Server, **inputs: Any) -> Answer:
    answer = ask(server, exclude_input_in_output=True, **inputs)
    assert answer.error is None
    return answer


def test_a_prompt_that_was_here_is_not_computed_again(pair: Server, mixed: Server) -> None:
    prompt = "I know the island. " + STORY * 5
    for server in (pair, mixed):
        first = asked(server, text_input=prompt, max_tokens=8)
        again = asked(server, text_input=prompt, max_tokens=8)
        assert again.ids == first.ids
        assert first.cached_tokens == first.timeline["cached_tokens"] == 0
        tokens = again.timeline["prompt_tokens"]
        assert again.cached_tokens == again.timeline["cached_tokens"] == (tokens - 1) // 32 * 32
        nothing_is_held(server)


def test_what_decode_has_of_a_prompt_does_not_move_again(pair: Server) -> None:
    prompt = "Nobody will read this. " + STORY * 4
    answers = [asked(pair, text_input=prompt, max_tokens=4) for _ in range(4)]
    assert len({tuple(answer.ids) for answer in answers}) == 1
    tokens = answers[0].timeline["prompt_tokens"]
    transfers = [answer.timeline["transfer"] for answer in answers]
    present = [transfer["present_tokens"] for transfer in transfers]
    assert (present[0], max(present)) == (0, tokens // 32 * 32)
    least, whole = transfers[present.index(max(present))], transfers[0]
    assert least["bytes"] / whole["bytes"] == pytest.approx(1 / -(-tokens // 32))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one response"])
def test_several_answers_share_a_prompt_and_each_is_as_if_asked_for_alone(pair: Server, stream: bool) -> None:
    inputs: dict[str, Any] = {"text_input": STORY * 3, "max_tokens": 12, "temperature": 0.9, "seed": 11}
    alone = asked(pair, **inputs)
    answer = asked(pair, **inputs, num_return_sequences=3, stream=stream)
    if stream:
        sequences = [answer.others[number][0] for number in range(3)]
        assert [answer.others[number][1] for number in range(3)] == [["length"]] * 3
    else:
        assert answer.responses == 1
        sequences = [answer.ids[start : start + 12] for start in (0, 12, 24)]
    assert sequences[0] == alone.ids
    assert len({tuple(ids) for ids in sequences}) == 3
    assert all(len(ids) == 12 for ids in sequences)
    nothing_is_held(pair)


def test_a_client_that_leaves_takes_all_its_answers_along(pair: Server) -> None:
    asked(pair, text_input=STORY, max_tokens=200, num_return_sequences=4, temperature=1.0, leave_after=6)
    nothing_is_held(pair)


def test_every_sampling_setting_is_honoured_and_the_same_colocated_and_disaggregated(
    pair: Server, mixed: Server
) -> None:
    one, two = (asked(server, text_input=STORY, max_tokens=40, **EVERYTHING) for server in (pair, mixed))
    assert one.ids == two.ids
    assert one.log_probs == pytest.approx(two.log_probs, abs=2e-3)
    assert [token for token, _ in one.top_log_probs] == [token for token, _ in two.top_log_probs]
    assert len(one.ids) >= 30
    assert not re.search(r" the\b", one.text)
    best = one.top_log_probs[::2]
    assert all(most >= own - 1e-4 for (_, most), own in zip(best, one.log_probs, strict=True))


def test_a_value_that_asks_for_too_much_is_refused_by_name(pair: Server) -> None:
    wrong: dict[str, Any] = {"min_p": 1.5, "top_log_probs": 99, "num_return_sequences": 17, "min_tokens": 500}
    for name, value in wrong.items():
        answer = ask(pair, text_input="x", max_tokens=4, **{name: value})
        assert answer.error is not None
        assert name in answer.error


@pytest.mark.slow
def test_a_seeded_run_is_the_same_alone_in_a_batch_colocated_disaggregated_and_after_failover(
    pair: Server, mixed: Server
) -> None:
    inputs = {"text_input": STORY, "max_tokens": 48, **EVERYTHING}
    alone = asked(mixed, **inputs)
    others: list[dict[str, Any]] = [
        {"text_input": STORY[: 20 + 3 * n], "max_tokens": 48, "temperature": 0.8, "seed": n} for n in range(15)
    ]

    def in_a_batch(server: Server) -> Answer:
        with ThreadPoolExecutor(16) as pool:
            rest = [pool.submit(ask, server, **other) for other in others]
            found = pool.submit(asked, server, **inputs)
            assert all(other.result().error is None for other in rest)
            return found.result()

    killed: list[str] = []

    def kill(tokens: int) -> None:
        if tokens >= 15 and not killed:
            busy = [n for n, i in pair.status()["instances"].items() if i["role"] == "decode" and i["requests"]]
            killed.extend(busy[:1])
            os.kill(pair.worker_pid(killed[0]), signal.SIGKILL)

    runs = {
        "batch, colocated": in_a_batch(mixed),
        "disaggregated": asked(pair, **inputs),
        "batch, disaggregated": in_a_batch(pair),
        "failover": asked(pair, **inputs, on_tokens=kill),
    }
    assert killed
    for name, run in runs.items():
        assert run.ids == alone.ids, name
        assert run.log_probs == pytest.approx(alone.log_probs, abs=2e-3), name
        assert [token for token, _ in run.top_log_probs] == [token for token, _ in alone.top_log_probs], name
    assert len(runs["failover"].timeline["attempts"]) == 2
    pair.until(lambda s: all(i["state"] == "ready" for i in s["instances"].values()))
    nothing_is_held(pair)
