"""Starts the real thing for tests: `trtpd build`, `trtpd serve`, and a Triton client of the tests' own."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

TRTPD = [sys.executable, "-P", "-m", "trtpd.cli"]
READY_S = 120.0
ANSWER_S = 120.0


def trtpd(*args: str | Path, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run([*TRTPD, *map(str, args)], capture_output=True, text=True, timeout=timeout_s, check=False)


def orphans_in_shm() -> set[str]:
    """Our entries in /dev/shm (`trtpd-NAME.PID.START...`) whose process is gone: nobody will unlink them."""
    ours = re.compile(r"trtpd-(?:(?:prefill|decode|mixed)_\d+|triton)\.(\d+)\.\d+\.")
    entries = [ours.match(name) for name in os.listdir("/dev/shm")]
    return {entry.string for entry in entries if entry and not psutil.pid_exists(int(entry[1]))}


@dataclass
class Answer:
    """One streamed answer, whole. With several of them `others` has each one's ids and reason, by its number."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    timeline: dict = field(default_factory=dict)
    error: str | None = None
    responses: int = 0
    top_log_probs: list[tuple[int, float]] = field(default_factory=list)
    cached_tokens: int | None = None
    others: dict[int, tuple[list[int], list[str]]] = field(default_factory=dict)


@dataclass
class Server:
    """A running `trtpd serve`."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str
    run_dir: Path
    shm_before: set[str]

    def status(self) -> dict:
        reply = ask(self, query="status")
        assert reply.error is None, reply.error
        return json.loads(reply.text)

    def until(self, condition: Callable[[dict], bool], *, timeout_s: float = 60.0) -> dict:
        """Waits until the status meets a condition; fails with the last status if it doesn't."""
        end_s = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if condition(status):
                return status
            assert time.monotonic() < end_s, f"not within {timeout_s} s; status: {json.dumps(status, indent=1)}"
            time.sleep(0.2)

    def worker_pid(self, instance: str) -> int:
        """The leader process of an instance."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if "trtpd.runtime.worker" in line and instance in line:
                return child.pid
        raise AssertionError(f"no worker process of {instance}")

    def stub_pid(self, model: str) -> int:
        """The Triton Python backend stub of a model."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if line and line[0].endswith("triton_python_backend_stub") and any(f"/{model}/" in a for a in line):
                return child.pid
        raise AssertionError(f"no stub process of {model}")

    def stop(self, signum: int = signal.SIGINT, *, timeout_s: float = 60.0) -> int:
        """Stops it and checks that nothing of it stays behind. The exit status."""
        tree = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signum)
        code = self.process.wait(timeout=timeout_s)
        _, alive = psutil.wait_procs(tree, timeout=3)
        assert not alive, f"left behind: {[(p.pid, p.cmdline()) for p in alive]}"
        left = orphans_in_shm() - self.shm_before
        assert not left, f"/dev/shm still holds {left}"
        assert not self.run_dir.exists(), f"{self.run_dir} is still there"
        return code


@contextmanager
def serving(build: Path, log: Path, *options: str, inside: Sequence[str] = ()) -> Iterator[Server]:
    """A server on free ports, stopped with SIGINT at the end unless the test stopped it. `inside` is a command that
    runs another as itself, elsewhere (in namespaces of its own)."""
    before = orphans_in_shm()
    ports = ["--http", "0", "--grpc", "0", "--metrics", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*inside, *TRTPD, "serve", str(build), *ports, "--json", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(f"trtpd serve exited with {process.wait()}: {log.read_text()[-4000:]}")
    ready = json.loads(line)
    server = Server(
        process=process,
        http=ready["http"],
        grpc=ready["grpc"],
        metrics=ready["metrics"],
        run_dir=Path(ready["run_dir"]),
        shm_before=before,
    )
    try:
        yield server
        if process.poll() is None:
            assert server.stop() == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def _tensor(name: str, value: object) -> triton.InferInput:
    """An input tensor with the type of its Python value; names that Triton clients send as INT32 or UINT64 keep it."""
    if isinstance(value, bool):
        array, kind = np.array([[value]], bool), "BOOL"
    elif isinstance(value, bytes | str):
        data = value.encode() if isinstance(value, str) else value
        array, kind = np.array([[data]], object), "BYTES"
    elif isinstance(value, list) and isinstance(value[0], str):
        array, kind = np.array([[v.encode() for v in value]], object), "BYTES"
    elif isinstance(value, list):
        numbers = isinstance(value[0], float)
        array, kind = np.array([value], np.float32 if numbers else np.int32), "FP32" if numbers else "INT32"
    elif isinstance(value, float):
        array, kind = np.array([[value]], np.float32), "FP32"
    elif name in ("seed", "random_seed"):
        array, kind = np.array([[value]], np.uint64), "UINT64"
    else:
        array, kind = np.array([[value]], np.int32), "INT32"
    tensor = triton.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def ask(
    server: Server,
    *,
    model: str = "pd",
    leave_after: int | None = None,
    on_tokens: Callable[[int], None] | None = None,
    timeout_s: float = ANSWER_S,
    **inputs: object,
) -> Answer:
    """Sends one request and collects its stream. `leave_after`: hang up after that many tokens.

    `on_tokens` is called with the number of tokens received so far, after each response.
    """
    if "query" not in inputs:
        inputs.setdefault("stream", True)
    responses: queue.Queue[tuple[object, Exception | None]] = queue.Queue()
    client = triton.InferenceServerClient(server.grpc)
    answer = Answer()
    ended = False
    try:
        client.start_stream(callback=lambda result, error: responses.put((result, error)))
        client.async_stream_infer(
            model,
            [_tensor(name, value) for name, value in inputs.items() if value is not None],
            enable_empty_final_response=True,
        )
        end_s = time.monotonic() + timeout_s
        while True:
            result, error = responses.get(timeout=max(0.01, end_s - time.monotonic()))
            if error is not None:
                answer.error = str(error)
                return answer
            _add(answer, result)
            if result.get_response().parameters["triton_final_response"].bool_param:  # type: ignore[attr-defined]
                ended = True
                return answer
            if on_tokens:
                on_tokens(len(answer.ids))
            if leave_after is not None and len(answer.ids) >= leave_after:
                return answer
    except InferenceServerException as error:
        answer.error = str(error)
        return answer
    finally:
        client.stop_stream(cancel_requests=not ended)
        client.close()


def _add(answer: Answer, result: object) -> None:
    def read(name: str) -> list:
        array = result.as_numpy(name)  # type: ignore[attr-defined]
        return [] if array is None else array.reshape(-1).tolist()

    if texts := read("text_output"):
        answer.responses += 1
        answer.text += texts[0].decode()
    answer.ids += read("output_ids")
    answer.log_probs += read("output_log_probs")
    answer.top_log_probs += list(zip(read("top_log_prob_ids"), read("top_log_probs"), strict=True))
    reasons = [value.decode() for value in read("finish_reason") if value]
    for number in read("sequence_index"):
        ids, ended = answer.others.setdefault(number, ([], []))
        ids += read("output_ids")
        ended += reasons
    if cached := read("cached_tokens"):
        answer.cached_tokens = cached[0]
    if reasons:
        answer.finish_reason = reasons[0]
    if timelines := [value for value in read("timeline") if value]:
        answer.timeline = json.loads(timelines[0])


def nothing_is_held(server: Server) -> None:
    """KV blocks, leases and requests in flight are all 0, on both sides and in the router."""

    def empty(status: dict) -> bool:
        instances = status["instances"].values()
        return (
            status["requests_in_flight"] == 0
            and all(i["kv_blocks_free"] == i["kv_blocks"] for i in instances)
            and all(i["kv_blocks_held"] == 0 and i["running"] == 0 and i["waiting"] == 0 for i in instances)
            and all(i["requests"] == 0 for i in instances)
        )

    server.until(empty, timeout_s=30)
