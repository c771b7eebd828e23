"""Every fault a hand-off is to survive, over every transport, in groups of one rank and of two, through real Triton.

The engine is the emulated one, whose tokens are a function of all KV that a sequence's blocks hold: KV that is lost,
stale or in the wrong place gives other tokens than the undisturbed run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from trtpd_testing.faults import OWN_SHM, Asking, Meddler, flip_kv, full_shm, rank_pid, stopped
from trtpd_testing.harness import Answer, Server, ask, nothing_is_held, serving

from trtpd.perf.served import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"),
]

PATHS = ("shm", "nixl", "tcp")
PROMPT = " ".join(f"{i} ships" for i in range(250))
TOKENS = 40
STOPPED_S = 10.0
DEADLINE_S = 60.0
POOLS = (
    "{{prefill: {{tp: {tp}, chunk_tokens: 64, kv_tokens: 4096}}, "
    "decode: {{tp: {tp}, instances: {decodes}, kv_tokens: 2048}}}}"
)
SETTINGS = (
    "emulated: {{prefill_tokens_per_s: 1000, decode_step_ms: 20}}\n"
    "kv: {{max_seq_tokens: {longest}, prefix_cache: none}}\n"  # the same prompt again is computed and moved again
    "transfer: {{path: {path}, lease_s: 5}}\nscheduler: {{deadline_s: {deadline_s}}}\n"
)


def settings(path: str, *, longest: int = 1536) -> str:
    return SETTINGS.format(path=path, longest=longest, deadline_s=DEADLINE_S)


@dataclass(frozen=True)
class Rig:
    """A running server of one prefill and two decode instances of `tp` ranks, and what it answers undisturbed."""

    server: Server
    build: Path
    path: str
    tp: int
    reference: list[int]

    def asking(self, **options: Any) -> Asking:
        return Asking(self.server, text_input=PROMPT, max_tokens=TOKENS, **options)

    def generation(self, instance: str) -> str:
        return self.server.status()["instances"][instance]["generation"]

    def check(self, answer: Answer) -> None:
        """The undisturbed run's tokens. Where decode computed the prompt itself in the end, nothing was moved."""
        assert answer.error is None, answer.error
        assert answer.ids == self.reference
        moved = answer.timeline["transfer"]
        assert moved is None or moved["path"] == self.path

    def settle(self) -> None:
        """All instances are back, and nobody holds anything."""
        ours = ("prefill_0", "decode_0", "decode_1")
        back = ("ready", "quarantined")
        self.server.until(lambda s: all(s["instances"][name]["state"] in back for name in ours))
        nothing_is_held(self.server)


def rigs(fast: set[tuple[str, int]]) -> list:
    """All paths and sizes; those not in `fast` with scripts/test --all only."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [
        pytest.param((path, tp), id=f"{path}-tp{tp}", marks=marks[(path, tp) in fast])
        for path in PATHS
        for tp in (1, 2)
    ]


def build_of(make: Callable[..., Path], path: str, tp: int, *, decodes: int = 2, longest: int = 1536) -> Path:
    name = f"faults-{path}{tp}-{decodes}-{longest}"
    pools = POOLS.format(tp=tp, decodes=decodes)
    return make(name, pools, extra=settings(path, longest=longest), engine="emulated")


@pytest.fixture(scope="module")
def rig(
    request: pytest.FixtureRequest, make_build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    path, tp = request.param
    build = build_of(make_build, path, tp)
    log = tmp_path_factory.mktemp("faults") / "serve.log"
    with serving(build, log, inside=OWN_SHM) as server:
        whole = ask(server, text_input=PROMPT, max_tokens=TOKENS)
        assert whole.error is None
        assert whole.timeline["transfer"]["path"] == path
        yield Rig(server=server, build=build, path=path, tp=tp, reference=whole.ids)


MOMENTS = ("before", "during", "after")
EVERY_RIG = rigs(set())


def strike(rig: Rig, role: str, rank: int, moment: str, hit: Callable[[int], None]) -> Answer:
    """Hits a rank of the request's prefill or decode instance: while the prompt is computed, between its seal and the
    end of its transfer (for which decode stands still), or in mid-answer."""
    # While the ladder stands on a rung short prompts may stay on decode, and there would be no pair to hit.
    rig.server.until(lambda status: status["ladder"]["rung"] == 0)
    asking = rig.asking()
    names = dict(zip(("prefill", "decode"), asking.placed(), strict=True))
    victim = rank_pid(rig.server, names[role], rank)
    if moment == "during":
        with stopped(rank_pid(rig.server, names["decode"])):
            asking.wait_tokens(1)
            hit(victim)
            time.sleep(0.2)
    else:
        asking.wait_tokens({"before": 0, "after": 5}[moment])
        hit(victim)
    return asking.answer()


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill(rig: Rig, role: str, rank: int, moment: str) -> None:
    if rank >= rig.tp:
        pytest.skip("there is no such rank")
    rig.check(strike(rig, role, rank, moment, killed))
    rig.settle()


@pytest.mark.parametrize("rig", rigs({("tcp", 1)}), indirect=True)
def test_a_prefill_killed_between_seal_and_transfer_costs_no_token(rig: Rig) -> None:
    kill(rig, "prefill", 0, "during")


@pytest.mark.parametrize("rig", rigs({("tcp", 1)}), indirect=True)
def test_kv_with_wrong_digests_is_never_used(rig: Rig) -> None:
    asking = rig.asking()
    prefill, decode = asking.placed()
    with stopped(rank_pid(rig.server, decode)):
        asking.wait_tokens(1)
        flip_kv(rig.server, rig.build, prefill)
    answer = asking.answer()
    rig.check(answer)
    assert len(answer.timeline["attempts"]) > 1
    rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_killed_at_any_moment_costs_no_token(rig: Rig, role: str, moment: str, rank: int) -> None:
    kill(rig, role, rank, moment)


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("role", "moment"), [("prefill", "before"), ("prefill", "during"), ("decode", "after")])
def test_a_rank_that_stands_still_for_ten_seconds_costs_no_token(rig: Rig, role: str, moment: str, rank: int) -> None:
    if rank >= rig.tp:
        pytest.skip("there is no such rank")
    struck: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        struck.append(pid)
        waker = f"import os, signal, time; time.sleep({STOPPED_S}); os.kill({pid}, signal.SIGCONT)"
        wakers.append(subprocess.Popen([sys.executable, "-c", waker], stderr=subprocess.DEVNULL))

    wakers: list[subprocess.Popen[bytes]] = []
    rig.check(strike(rig, role, rank, moment, stop))
    assert struck
    wakers[0].wait(30)
    rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
def test_both_sides_restarted_under_their_old_addresses_work_together(rig: Rig) -> None:
    for instance in ("prefill_0", "decode_0", "decode_1"):
        before = rig.generation(instance)
        killed(rank_pid(rig.server, instance))
        rig.server.until(lambda s, i=instance, b=before: s["instances"][i]["generation"] != b)  # type: ignore[misc]
        rig.check(rig.asking().answer())
    rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
def test_a_peer_of_another_build_is_never_paired(rig: Rig, make_build: Callable[..., Path]) -> None:
    other = build_of(make_build, rig.path, 1, decodes=3, longest=1024)
    router = f"ipc://{rig.server.run_dir}/router.ipc"
    command = [sys.executable, "-m", "trtpd.runtime.worker", "--no-parent", "--instance", "decode_2"]
    command += ["--build", str(other), "--router", router, "--run-dir", str(rig.server.run_dir)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        rig.server.until(lambda s: s["instances"].get("decode_2", {}).get("state") == "ready")
        for answer in [asking.answer() for asking in [rig.asking() for _ in range(3)]]:
            rig.check(answer)
            assert {attempt["decode"] for attempt in answer.timeline["attempts"]} <= {"decode_0", "decode_1"}
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
    rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
def test_more_kv_than_decode_holds_waits_and_is_answered(rig: Rig) -> None:
    for answer in [asking.answer() for asking in [rig.asking() for _ in range(8)]]:
        rig.check(answer)
    rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
def test_with_a_full_dev_shm_a_dead_worker_stays_away_and_the_others_serve(rig: Rig) -> None:
    before = rig.generation("decode_0")
    with full_shm(rig.server):
        killed(rank_pid(rig.server, "decode_0"))
        rig.server.until(lambda s: s["instances"]["decode_0"]["state"] == "lost")
        rig.check(rig.asking().answer())
        assert rig.server.status()["instances"]["decode_0"]["state"] == "lost"
    rig.server.until(lambda s: s["instances"]["decode_0"]["generation"] != before)
    rig.check(rig.asking().answer())
    rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
@pytest.mark.parametrize("moment", ["placed", "half way", "first token", "decoding"])
def test_a_request_cancelled_at_any_stage_leaves_nothing(rig: Rig, moment: str) -> None:
    leaving: dict[str, dict[str, Any]] = {
        "placed": {"patience_s": 0.05},
        "half way": {"patience_s": 0.5},
        "first token": {"leave_after": 1},
        "decoding": {"leave_after": 8},
    }
    answer = rig.asking(**leaving[moment]).answer()
    assert answer.ids == rig.reference[: len(answer.ids)]
    assert len(answer.ids) < TOKENS
    rig.settle()


JUNK = (b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(4096), b"\xff" * 200_000)


@pytest.mark.slow
@pytest.mark.parametrize("rig", EVERY_RIG, indirect=True)
def test_a_strangers_junk_on_the_data_port_harms_nobody(rig: Rig) -> None:
    pid, before = rank_pid(rig.server, "prefill_0"), rig.generation("prefill_0")
    listening = [c.laddr for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert all(address.ip in ("127.0.0.1", "::1") for address in listening)
    assert bool(listening) is (rig.path != "shm")
    strangers = rig.server.status()["instances"]["prefill_0"]["strangers"]
    asking = rig.asking()
    asking.placed()
    for address in listening:
        for junk in JUNK:
            with socket.create_connection(address, timeout=5) as stranger:
                stranger.settimeout(5)
                try:
                    stranger.sendall(junk)
                    stranger.recv(4096)
                except OSError:
                    continue  # hung up on, or left without an answer: as it should be
    rig.check(asking.answer())
    if rig.path == "tcp":
        rig.server.until(lambda s: s["instances"]["prefill_0"]["strangers"] >= strangers + len(JUNK))
    assert rig.generation("prefill_0") == before
    rig.settle()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_control_messages_lost_and_repeated_cost_no_token(
    make_build: Callable[..., Path], tmp_path: Path, path: str, tp: int
) -> None:
    build = build_of(make_build, path, tp)
    router = f"tcp://127.0.0.1:{free_port()}"
    instances = ("--only", "prefill_0,decode_0,decode_1", "--router")
    with (
        Meddler(router) as meddler,
        serving(build, tmp_path / "stages.log", *instances, meddler.address),
        serving(build, tmp_path / "pd.log", "--only", "pd", "--router", router) as server,
    ):
        answers = [asking.answer() for asking in [asking_through(server) for _ in range(6)]]
        assert [answer.error for answer in answers] == [None] * 6
        assert len({json.dumps(answer.ids) for answer in answers}) == 1
        assert len(answers[0].ids) == TOKENS
        nothing_is_held(server)
        assert min(meddler.lost, meddler.repeated) > 10


def asking_through(server: Server) -> Asking:
    return Asking(server, text_input=PROMPT, max_tokens=TOKENS)
