"""Processes killed in mid-stream: streams complete, with exactly the tokens of an undisturbed run."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
from trtpd_testing.harness import Server, ask

from trtpd.runtime.serve import rundir

pytestmark = pytest.mark.e2e


def healthy(server: Server) -> dict:
    """Waits until every instance is back and nothing is in flight."""
    return server.until(
        lambda s: s["requests_in_flight"] == 0 and all(i["state"] == "ready" for i in s["instances"].values())
    )


def generation_of(status: dict, instance: str) -> str:
    return status["instances"][instance]["generation"]


def served_again(server: Server, entry: dict) -> None:
    """Asks until there is an answer, which must be the right one."""
    deadline_s = time.monotonic() + 90
    while True:
        answer = ask(server, text_input=entry["text_input"], max_tokens=16, exclude_input_in_output=True)
        if answer.error is None:
            break
        assert time.monotonic() < deadline_s, answer.error
        time.sleep(0.5)
    assert answer.ids == entry["output_ids"][:16]


@pytest.mark.parametrize("victim", ["worker", "stub"])
def test_a_stream_survives_the_death_of_its_decode_instance(pair: Server, golden: dict, victim: str) -> None:
    entry = golden["prompts"]["story"]
    before = healthy(pair)
    killed: list[str] = []

    def kill(tokens: int) -> None:
        if tokens >= 10 and not killed:
            busy = [n for n, i in pair.status()["instances"].items() if i["role"] == "decode" and i["requests"]]
            killed.extend(busy[:1])
            pid_of = pair.worker_pid if victim == "worker" else pair.stub_pid
            os.kill(pid_of(killed[0]), signal.SIGKILL)

    answer = ask(
        pair,
        text_input=entry["text_input"],
        max_tokens=64,
        return_log_probs=True,
        exclude_input_in_output=True,
        on_tokens=kill,
    )
    assert answer.error is None
    assert answer.ids == entry["output_ids"]
    assert answer.text == entry["text_output"]
    assert answer.log_probs == pytest.approx(entry["log_probs"], abs=2e-3)
    assert len(killed) == 1
    assert len(answer.timeline["attempts"]) == 2
    after = healthy(pair)
    assert generation_of(after, killed[0]) != generation_of(before, killed[0])


def test_a_seeded_stream_continues_with_the_same_draws_after_a_death(pair: Server) -> None:
    inputs: dict[str, Any] = {
        "text_input": "The captain opened the letter and",
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 5,
    }
    healthy(pair)
    undisturbed = ask(pair, **inputs)
    done = threading.Event()

    def kill(tokens: int) -> None:
        if tokens >= 12 and not done.is_set():
            done.set()
            busy = [n for n, i in pair.status()["instances"].items() if i["role"] == "decode" and i["requests"]]
            os.kill(pair.worker_pid(busy[0]), signal.SIGKILL)

    disturbed = ask(pair, **inputs, on_tokens=kill)
    assert done.is_set()
    assert disturbed.error is None
    assert disturbed.ids == undisturbed.ids
    healthy(pair)


def test_a_request_survives_the_death_of_the_prefill_worker(pair: Server, golden: dict) -> None:
    entry = golden["prompts"]["long"]
    before = healthy(pair)
    result: list = []
    asking = threading.Thread(
        target=lambda: result.append(
            ask(pair, text_input=entry["text_input"], max_tokens=16, exclude_input_in_output=True)
        )
    )
    asking.start()
    pair.until(lambda s: s["instances"]["prefill_0"]["requests"] > 0, timeout_s=10)
    time.sleep(0.3)
    os.kill(pair.worker_pid("prefill_0"), signal.SIGKILL)
    asking.join(timeout=120)
    assert result[0].error is None
    assert result[0].ids == entry["output_ids"][:16]
    after = healthy(pair)
    assert generation_of(after, "prefill_0") != generation_of(before, "prefill_0")


@pytest.mark.parametrize("model", ["decode_0", "prefill_0"])
def test_a_dead_stub_of_a_stage_model_is_replaced(pair: Server, golden: dict, model: str) -> None:
    entry = golden["prompts"]["chat"]
    before = healthy(pair)
    worker = pair.worker_pid(model)
    os.kill(pair.stub_pid(model), signal.SIGKILL)
    pair.until(lambda s: generation_of(s, model) != generation_of(before, model), timeout_s=60)
    healthy(pair)
    assert pair.worker_pid(model) != worker
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    answer = ask(pair, text_input=entry["text_input"], max_tokens=16, exclude_input_in_output=True)
    assert answer.ids == entry["output_ids"][:16]


def test_a_server_that_aborts_with_a_dead_stub_is_started_again(pair: Server, golden: dict) -> None:
    """A stub may be killed while it holds a lock of the server's, which then aborts."""
    entry = golden["prompts"]["chat"]
    healthy(pair)
    os.kill(pair.stub_pid("decode_0"), signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while rundir.stub_of(pair.run_dir, "decode_0") is not None:  # until the launcher has seen it
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    server = next(c for c in psutil.Process(pair.process.pid).children() if "tritonserver" in c.name())
    server.send_signal(signal.SIGABRT)
    server.wait(30)
    served_again(pair, entry)


def test_after_a_dead_router_the_next_one_serves_and_nothing_of_the_old_is_held(pair: Server, golden: dict) -> None:
    entry = golden["prompts"]["story"]
    healthy(pair)
    killed = threading.Event()

    def kill(tokens: int) -> None:
        if tokens >= 4 and not killed.is_set():
            killed.set()
            os.kill(pair.stub_pid("pd"), signal.SIGKILL)

    broken = ask(pair, text_input=entry["text_input"], max_tokens=64, on_tokens=kill)
    assert broken.error is not None
    served_again(pair, entry)
    status = healthy(pair)
    assert all(i["kv_blocks_free"] == i["kv_blocks"] for i in status["instances"].values())
