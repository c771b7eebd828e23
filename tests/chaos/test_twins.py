"""32 greedy and sampled streams while one process is killed, stopped or slowed: what survives equals its twin.

A twin is the same request in a run that nothing disturbs. Streams survive whatever happens to an instance; those of a
router that is killed end with an error, and nothing of them is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.faults import rank_pid
from trtpd_testing.harness import Answer, Server, ask, nothing_is_held, serving

from trtpd.errors import EngineError
from trtpd.runtime.worker.mpirun import find_mpi

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS, TOKENS = 32, 24
WHILE_DECODING, WHILE_PREFILLING = 100, 4
"""Tokens that have come in all when a process is disturbed."""
STOPPED_S = 4.0
"""Longer than the silence after which an instance is lost."""
RANK_STOPPED_S = 8.0
"""Longer than the silence after which the other ranks end their group."""
ROUTER_STOPPED_S = 1.0
SLOW_S, SLOW_ON_S, SLOW_OFF_S = 5.0, 0.03, 0.07


def inputs_of(number: int) -> dict[str, Any]:
    """Half of them greedy, half sampled, of different lengths of prompt."""
    words = " ".join(["the ship and its captain"] * (1 + number % 5))
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 100 + number} if number % 2 else {}
    return {"text_input": f"Tale {number}: {words}", "max_tokens": TOKENS, "end_id": -1, **sampled}


def run(server: Server, disturb: Callable[[], None] | None = None, *, at_tokens: int = WHILE_DECODING) -> list[Answer]:
    """All streams at once; `disturb` is called once, when so many tokens have come in all."""
    came = [0] * STREAMS
    with ThreadPoolExecutor(STREAMS + 1) as pool:

        def count(number: int) -> Callable[[int], None]:
            return lambda tokens: came.__setitem__(number, tokens)

        asked = [pool.submit(ask, server, on_tokens=count(n), **inputs_of(n)) for n in range(STREAMS)]
        if disturb is not None:
            end_s = time.monotonic() + 60
            while sum(came) < at_tokens:
                assert time.monotonic() < end_s, "the streams did not begin"
                time.sleep(0.01)
            disturb()
        return [future.result() for future in asked]


FINDERS: dict[str, Callable[[Server, str], int]] = {
    "leader": lambda server, instance: server.worker_pid(instance),
    "stub": lambda server, instance: server.stub_pid(instance),
    "leader of a group": lambda server, instance: rank_pid(server, instance, 0),
    "rank": lambda server, instance: rank_pid(server, instance, 1),
}


def disturb(pid: int, how: str, *, stopped_s: float = STOPPED_S) -> None:
    with contextlib.suppress(ProcessLookupError):
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        elif how == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
        else:
            end_s = time.monotonic() + SLOW_S
            while time.monotonic() < end_s:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(SLOW_OFF_S)
                os.kill(pid, signal.SIGCONT)
                time.sleep(SLOW_ON_S)


def healthy(server: Server) -> dict[str, str]:
    """Every instance's generation, once all are back and nothing is held."""
    found = server.until(lambda s: all(one["state"] == "ready" for one in s["instances"].values()), timeout_s=90)
    nothing_is_held(server)
    return {name: one["generation"] for name, one in found["instances"].items()}


def tell(answers: list[Answer], twins: list[list[int]]) -> None:
    """For who reads the run: how many streams equal their twins, went on elsewhere, ended with an error."""
    equal = sum(answer.ids == twin for answer, twin in zip(answers, twins, strict=True))
    continued = sum(len(answer.timeline.get("attempts", ())) > 1 for answer in answers)
    errors = sum(answer.error is not None for answer in answers)
    print(f"{equal} of {len(answers)} equal, {continued} continued, {errors} errors")


@pytest.fixture(scope="module")
def twins(pair: Server) -> list[list[int]]:
    return undisturbed(pair)


@pytest.fixture(scope="module")
def grouped(make_build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two decode instances of two ranks each."""
    try:
        find_mpi(sys.executable, os.environ)
    except EngineError as error:
        pytest.skip(str(error))
    pools = (
        "{prefill: {threads: 1, kv_tokens: 8192}, decode: {instances: 2, tp: 2, threads: 1, kv_tokens: 8192, "
        "cores: [0, 1]}}"
    )
    with serving(make_build("grouped", pools), tmp_path_factory.mktemp("grouped") / "serve.log") as server:
        yield server


@pytest.fixture(scope="module")
def grouped_twins(grouped: Server) -> list[list[int]]:
    return undisturbed(grouped)


def undisturbed(server: Server) -> list[list[int]]:
    answers = run(server)
    assert [answer.error for answer in answers] == [None] * STREAMS
    return [answer.ids for answer in answers]


def survive(
    server: Server,
    twins: list[list[int]],
    *,
    instance: str,
    process: str,
    how: str,
    stopped_s: float,
) -> None:
    """The streams of a run in which one process of an instance is disturbed equal their twins, and nothing is held
    afterwards. An instance that was killed, or silent for too long, is another generation then, and its streams went
    on in another attempt."""
    before = healthy(server)
    at_tokens = WHILE_DECODING if instance.startswith("decode") else WHILE_PREFILLING
    answers = run(
        server, lambda: disturb(FINDERS[process](server, instance), how, stopped_s=stopped_s), at_tokens=at_tokens
    )
    tell(answers, twins)
    assert [answer.error for answer in answers] == [None] * STREAMS
    assert [answer.ids for answer in answers] == twins
    after = healthy(server)
    lost = how == "kill" or (how == "stop" and process != "stub")
    assert (after[instance] != before[instance]) == lost
    assert not lost or any(len(answer.timeline["attempts"]) > 1 for answer in answers)


@pytest.mark.parametrize("how", ["kill", "stop", "slow"])
@pytest.mark.parametrize(
    ("instance", "process"),
    [("decode_0", "leader"), ("prefill_0", "leader"), ("decode_0", "stub"), ("prefill_0", "stub")],
)
def test_streams_equal_their_twins_whatever_happens_to_an_instance(
    pair: Server,
    twins: list[list[int]],
    instance: str,
    process: str,
    how: str,
) -> None:
    survive(pair, twins, instance=instance, process=process, how=how, stopped_s=STOPPED_S)


@pytest.mark.parametrize("how", ["kill", "stop", "slow"])
@pytest.mark.parametrize("process", ["rank", "leader of a group"])
def test_streams_equal_their_twins_whatever_happens_to_a_rank(
    grouped: Server,
    grouped_twins: list[list[int]],
    process: str,
    how: str,
) -> None:
    survive(
        grouped,
        grouped_twins,
        instance="decode_0",
        process=process,
        how=how,
        stopped_s=RANK_STOPPED_S,
    )


@pytest.mark.parametrize("how", ["stop", "slow"])
def test_streams_equal_their_twins_behind_a_router_that_pauses(pair: Server, twins: list[list[int]], how: str) -> None:
    answers = run(pair, lambda: disturb(pair.stub_pid("pd"), how, stopped_s=ROUTER_STOPPED_S))
    tell(answers, twins)
    assert [answer.error for answer in answers] == [None] * STREAMS
    assert [answer.ids for answer in answers] == twins
    healthy(pair)


def test_streams_of_a_killed_router_end_with_an_error_and_leave_nothing(pair: Server, twins: list[list[int]]) -> None:
    answers = run(pair, lambda: disturb(pair.stub_pid("pd"), "kill"))
    tell(answers, twins)
    for answer, twin in zip(answers, twins, strict=True):
        assert answer.error is not None or answer.ids == twin
        assert answer.ids == twin[: len(answer.ids)]
    assert any(answer.error for answer in answers)
    end_s = time.monotonic() + 90
    while (answer := ask(pair, **inputs_of(1))).error is not None:
        assert time.monotonic() < end_s, answer.error
        time.sleep(0.5)
    assert answer.ids == twins[1]
    healthy(pair)
