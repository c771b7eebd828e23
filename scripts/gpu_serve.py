"""The serving part of gpu_check: answers, split against whole, many at once, a killed worker, a clean end.

    python scripts/gpu_serve.py --pair BUILD --whole BUILD --report DIR [--tokens N] -- TRTPD...

PAIR has prefill and decode, WHOLE only mixed; TRTPD is how trtpd is started. What came of it is in DIR/serve.json, the
servers' words beside it. Exit 1 if a step failed; the others are tried all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

READY_S = 900.0
ANSWER_S = 300.0
HEAL_S = 300.0
STOP_S = 120.0
PROMPTS = (
    "Why is the sea blue?",
    "Name three rivers of Europe, one a line.",
    "Count from one to twenty in words.",
    "Explain in two sentences what a compiler does.",
    f"These words are read aloud: {'apple, river, stone, cloud, ' * 60} and that is all. Which word came first?",
)
"""The last one is longer than a block of KV many times over."""


class StepError(Exception):
    """A step did not do what it should; the text says what."""


@dataclass
class Report:
    """What each step said, in order, written after each of them."""

    path: Path
    steps: list[dict[str, Any]] = field(default_factory=list)

    def step(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs a step and notes what it returned or how it failed; None if it failed."""
        began_s = time.monotonic()
        note: dict[str, Any] = {"step": name, "ok": True}
        try:
            note["found"] = run()
        except (StepError, OSError, subprocess.SubprocessError, ValueError, LookupError, psutil.Error) as error:
            note |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
        note["seconds"] = round(time.monotonic() - began_s, 2)
        self.steps.append(note)
        self.path.write_text(json.dumps(self.steps, indent=2))
        print(f"gpu_serve: {name}: {'ok' if note['ok'] else note['error']}", file=sys.stderr)
        return note.get("found")


@dataclass(frozen=True)
class Server:
    """A server that serves."""

    trtpd: tuple[str, ...]
    process: subprocess.Popen[str]
    grpc: str

    def start(self, prompt: str, tokens: int) -> subprocess.Popen[str]:
        words = [*self.trtpd, "generate", "--url", self.grpc, "--json", "--max-tokens", str(tokens), prompt]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ask(self, prompt: str, tokens: int) -> dict[str, Any]:
        """One greedy answer: text, ids, timeline."""
        return answer_of(self.start(prompt, tokens))

    def status(self) -> dict[str, Any]:
        words = [*self.trtpd, "status", "--url", self.grpc, "--json"]
        run = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=False)
        if run.returncode != 0:
            raise StepError(f"status: {run.stderr.strip()[-500:]}")
        found: dict[str, Any] = json.loads(run.stdout)
        return found

    def worker_of(self, instance: str) -> psutil.Process:
        """The process that runs an instance: of several ranks, the first's."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "trtpd.runtime.worker" in words and instance in words and "mpirun" not in words[0]:
                    return process
        raise StepError(f"no process of {instance} among the server's")


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, said = process.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise StepError(f"no answer within {ANSWER_S:g} s") from None
    if process.returncode != 0:
        raise StepError(f"generate: {said.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(out)
    if not answer["ids"]:
        raise StepError("generate: an answer without tokens")
    return answer


@contextlib.contextmanager
def serving(trtpd: Sequence[str], build: Path, log: Path) -> Iterator[Server]:
    """A server of one build until the block ends. Raises StepError if it doesn't come up, or doesn't end cleanly."""
    words = [*trtpd, "serve", str(build), "--http", "0", "--grpc", "0", "--metrics", "0", "--json"]
    with log.open("w") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
    line: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda stream: line.append(stream.readline()), args=(process.stdout,), daemon=True)
    reader.start()
    reader.join(READY_S)
    try:
        if not line or not line[0]:
            raise StepError(f"serve {build.name} is not ready: {log.read_text().strip()[-1500:]}")
        ready = json.loads(line[0])
        if "grpc" not in ready:
            raise StepError(f"serve {build.name} is not ready: {ready}")
        yield Server(trtpd=tuple(trtpd), process=process, grpc=ready["grpc"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()
    if code != 0:
        raise StepError(f"serve {build.name} ended with {code}: {log.read_text().strip()[-500:]}")


def answers(server: Server, tokens: int, *, at_once: int = 1) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: server.ask(prompt, tokens), PROMPTS * at_once))


def compared(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far two runs of the same prompts agree. With bf16 weights a tie may fall either way: this is to be read."""
    agree = []
    for first, second in zip(one, other, strict=True):
        pairs = list(zip(first["ids"], second["ids"], strict=False))
        same = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        agree.append({"tokens": [len(first["ids"]), len(second["ids"])], "equal": same})
    whole = sum(a["ids"] == b["ids"] for a, b in zip(one, other, strict=True))
    return {"answers": len(agree), "equal_answers": whole, "equal_tokens": agree}


def hand_offs(found: Sequence[dict[str, Any]]) -> list[Any]:
    """Each answer's hand-off. Raises StepError if one had none: then nothing was disaggregated."""
    moved = [(one["timeline"] or {}).get("transfer") for one in found]
    if not all(moved):
        raise StepError(f"{moved.count(None)} of {len(moved)} answers came without a transfer")
    return moved


def survive(server: Server, instance: str, tokens: int) -> dict[str, Any]:
    """Kills an instance's worker under a running answer; the answer has to end as if nothing had been."""
    calm = server.ask(PROMPTS[2], tokens)
    running = server.start(PROMPTS[2], tokens)
    victim = server.worker_of(instance)
    until_s = time.monotonic() + ANSWER_S
    while server.status()["requests_in_flight"] == 0 and running.poll() is None and time.monotonic() < until_s:
        time.sleep(0.02)
    caught = running.poll() is None
    victim.kill()
    answer = answer_of(running)
    until_s = time.monotonic() + HEAL_S
    while (states := {name: one["state"] for name, one in server.status()["instances"].items()}) and any(
        state != "ready" for state in states.values()
    ):
        if time.monotonic() > until_s:
            raise StepError(f"not all are ready again after {HEAL_S:g} s: {states}")
        time.sleep(0.5)
    return {
        "killed_while_answering": caught,
        "compared": compared([calm], [answer]),
        "after": compared([calm], [server.ask(PROMPTS[2], tokens)]),
    }


def at_rest(server: Server) -> dict[str, Any]:
    """The status of a server that has nothing to do. Raises StepError if KV or requests are left."""
    until_s = time.monotonic() + ANSWER_S
    while True:
        found = server.status()
        held = {name: one["kv_blocks_held"] for name, one in found["instances"].items() if one["kv_blocks_held"]}
        if not held and not found["requests_in_flight"]:
            return found
        if time.monotonic() > until_s:
            raise StepError(f"still held: {held}, in flight: {found['requests_in_flight']}")
        time.sleep(0.5)


def check_pair(report: Report, server: Server, tokens: int) -> list[dict[str, Any]] | None:
    """All steps on the disaggregated server; its answers, None if there are none."""
    found: list[dict[str, Any]] | None = report.step("answers", lambda: answers(server, tokens))
    if found is None:
        return None
    report.step("hand-offs", lambda: hand_offs(found))
    report.step("the same again", lambda: compared(found, answers(server, tokens)))
    report.step("four of each at once", lambda: compared(found * 4, answers(server, tokens, at_once=4)))
    for instance in ("decode_0", "prefill_0"):
        report.step(f"{instance} is killed", lambda name=instance: survive(server, name, 4 * tokens))
    report.step("at rest", lambda: at_rest(server))
    return found


def check(report: Report, trtpd: Sequence[str], pair: Path, whole: Path, tokens: int) -> None:
    found: list[list[dict[str, Any]] | None] = []

    def split() -> None:
        with serving(trtpd, pair, report.path.with_name("serve-pair.log")) as server:
            found.append(check_pair(report, server, tokens))

    def colocated() -> Any:
        with serving(trtpd, whole, report.path.with_name("serve-whole.log")) as server:
            together = answers(server, tokens)
        first = found[0] if found else None
        return compared(first, together) if first else {"answers": len(together), "to compare with": "nothing"}

    report.step("prefill and decode", split)
    report.step("the same, colocated", colocated)
    report.step("nothing is left", nothing_left)


def nothing_left() -> None:
    """Raises StepError if shared memory of a process that has ended is still there; that of others here is theirs."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("trtpd")]
    orphans = [name for name in names if not any(psutil.pid_exists(int(part)) for part in numbers_of(name))]
    if orphans:
        raise StepError(f"in /dev/shm: {', '.join(orphans)}")


def numbers_of(name: str) -> list[str]:
    """The process numbers in a name."""
    return [part for part in name.split(".") if part.isdecimal()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", type=Path, required=True, help="a build with prefill and decode")
    parser.add_argument("--whole", type=Path, required=True, help="a build of the same model with mixed alone")
    parser.add_argument("--report", type=Path, required=True, help="a folder for what came of it")
    parser.add_argument("--tokens", type=int, default=48, help="length of each answer")
    parser.add_argument("trtpd", nargs="+", help="how trtpd is started")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # ends the server on its way out
    report = Report(given.report / "serve.json")
    check(report, given.trtpd, given.pair, given.whole, given.tokens)
    return 0 if all(step["ok"] for step in report.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
