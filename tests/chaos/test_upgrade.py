"""A rolling upgrade: instances of another build join a router by their tag, the old ones go, and requests go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from trtpd_testing.harness import Answer, Server, ask, serving

from trtpd.perf.served import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

POOLS = {"prefill": {"instances": 1, "kv_tokens": 16384}, "decode": {"instances": 1, "kv_tokens": 16384}}
STAGES = "prefill_0,decode_0"
STREAMS, TOKENS = 6, 60


class Clients:
    """Streams that begin anew as soon as they have ended, until told to stop."""

    def __init__(self, server: Server) -> None:
        self.answers: list[Answer] = []
        self._server = server
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        while not self._done.is_set():
            prompt = f"Stream {number} says"
            self.answers.append(ask(self._server, text_input=prompt, max_tokens=TOKENS, end_id=-1))

    def wait_for_more(self, count: int) -> None:
        wanted, end_s = len(self.answers) + count, time.monotonic() + 60
        while len(self.answers) < wanted:
            assert time.monotonic() < end_s, f"{len(self.answers)} of {wanted} answers"
            time.sleep(0.1)


def test_a_new_build_takes_over_under_load_without_a_lost_request_or_a_pair_across(
    make_emulated: Callable[..., Path], tmp_path: Path
) -> None:
    old, new = make_emulated("old", POOLS), make_emulated("new", POOLS, max_seq_tokens=1024)
    router = ("--router", f"tcp://127.0.0.1:{free_port()}")
    with ExitStack() as stack:
        old_stages = stack.enter_context(serving(old, tmp_path / "old.log", "--only", STAGES, *router))
        server = stack.enter_context(serving(old, tmp_path / "pd.log", "--only", "pd", *router))
        with Clients(server) as clients:
            clients.wait_for_more(STREAMS)
            stack.enter_context(serving(new, tmp_path / "new.log", "--only", STAGES, "--tag", "v2", *router))
            both = server.until(lambda s: {"prefill_0.v2", "decode_0.v2"} <= s["instances"].keys())
            assert all(one["state"] == "ready" for one in both["instances"].values())
            clients.wait_for_more(STREAMS)
            assert old_stages.stop() == 0
            gone = server.until(lambda s: s["instances"]["decode_0"]["state"] == "lost")
            assert gone["instances"]["decode_0.v2"]["state"] == "ready"
            clients.wait_for_more(2 * STREAMS)
        failed = [answer.error for answer in clients.answers if answer.error or len(answer.ids) != TOKENS]
        assert failed == []
        attempts = [one for answer in clients.answers for one in answer.timeline["attempts"] if one["decode"]]
        pairs = {(one["prefill"], one["decode"]) for one in attempts}
        assert pairs <= {("prefill_0", "decode_0"), ("prefill_0.v2", "decode_0.v2")}
        assert len(pairs) == 2
        server.until(lambda s: s["requests_in_flight"] == 0)
