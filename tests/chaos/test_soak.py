"""Five minutes of requests, cancels and kills: no wrong token, no lost request, nothing held afterwards."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from trtpd_testing.harness import Server, ask, nothing_is_held

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = 500
SECONDS = 300.0
KILL_EVERY_S = 10.0
DEADLINE_S = 120.0
PATIENCE_S = 300.0  # a slow machine with two of three workers dead is past its capacity for a while
SHORT = ("chat", "capital", "code", "chinese", "emoji", "story", "turns")


def killer(server: Server, stop: threading.Event, kills: Counter, seed: int) -> None:
    """SIGKILL to a worker at random, every KILL_EVERY_S, until told to stop."""
    chance = random.Random(seed)
    while not stop.wait(KILL_EVERY_S):
        victim = chance.choice(["prefill_0", "decode_0", "decode_1"])
        try:
            os.kill(server.worker_pid(victim), signal.SIGKILL)
        except (AssertionError, ProcessLookupError):
            continue  # it is only just coming back from the last kill
        kills[victim] += 1


def one(server: Server, golden: dict, index: int, begin_s: float, refused: Counter[int]) -> str:
    """Sends request `index` at its time, again when a saturated server says so, for up to PATIENCE_S.

    What became of it: "served", "left", or what went wrong. Refusals are counted in `refused`.
    """
    chance = random.Random(index)
    entry = golden["prompts"][chance.choice(SHORT) if index % 50 else "long"]
    limit = chance.randint(1, 32)
    leave_after = chance.randint(1, limit) if chance.random() < 0.2 else None
    time.sleep(max(0.0, begin_s + index * SECONDS / REQUESTS - time.monotonic()))
    due_s = time.monotonic()
    prompt = {"messages": json.dumps(entry["messages"])} if entry["messages"] else {"text_input": entry["text_input"]}
    while True:
        sent_s = time.monotonic()
        answer = ask(
            server,
            **prompt,
            max_tokens=limit,
            exclude_input_in_output=True,
            leave_after=leave_after,
            timeout_s=DEADLINE_S + 30,
        )
        asked_to_wait = re.match(r"code=saturated retry_after_s=([0-9.]+)", answer.error or "")
        if asked_to_wait is None or answer.ids or sent_s - due_s > PATIENCE_S:
            break
        refused[index] += 1
        time.sleep(float(asked_to_wait[1]))
    waited_s = time.monotonic() - sent_s
    whole = entry["output_ids"][:limit]
    if answer.error is not None:
        return f"lost: {answer.error}"
    if waited_s > DEADLINE_S + 5:
        return f"waited {waited_s:.0f} s, longer than its deadline"
    if leave_after is not None and len(answer.ids) < len(whole):
        return "left" if answer.ids == whole[: len(answer.ids)] else f"wrong tokens: {answer.ids} of {whole}"
    return "served" if answer.ids == whole else f"wrong tokens: {answer.ids} instead of {whole}"


def test_five_minutes_of_kills_and_cancels_lose_nothing(pair: Server, golden: dict) -> None:
    stop, kills, refused = threading.Event(), Counter[str](), Counter[int]()
    killing = threading.Thread(target=killer, args=(pair, stop, kills, 7))
    begin_s = time.monotonic()
    with ThreadPoolExecutor(128) as pool:
        killing.start()
        outcomes = Counter(pool.map(lambda i: one(pair, golden, i, begin_s, refused), range(REQUESTS)))
    stop.set()
    killing.join()
    counters = pair.status()["counters"]
    print(f"outcomes {dict(outcomes)}, {refused.total()} refusals of {len(refused)} requests")
    print(f"kills {dict(kills)}, router {counters}")
    assert set(outcomes) <= {"served", "left"}, outcomes
    assert sum(outcomes.values()) == REQUESTS
    assert sum(kills.values()) >= SECONDS / KILL_EVERY_S / 2
    nothing_is_held(pair)
