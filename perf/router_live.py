"""What the live router costs, through real Triton, on emulated engines.

    python -m trtpd.perf.router_live [--json] [--streams 512] [--tokens 300] [--interval 8] [--model DIR]

Three questions, each with its own server:
- tokens: how many tokens a second go through with `--streams` answers at once, at about `--interval` tokens a response,
  and the CPU of each process meanwhile. Counted from the last answer's first token to the first answer's end.
- first token: what client, Triton and router add to the engine's step in the time to first token of a lone request.
- readers: whether 64 streams that nobody reads make 64 that are read any slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtpd.errors import ServeError, TrtpdError
from trtpd.perf.process_cpu import cpu_times
from trtpd.perf.served import Served, served_tiny

PROMPT = "hello there my friend"
CONNECTIONS = 4
READERS = 64
PROBES = 200
PAUSE_S = 0.02
STEP_MS = 0.5
WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Tokens a second while all streams ran; `cpu_cores` is each process's CPU seconds per second of the whole."""

    streams: int
    tokens_per_s: float
    tokens_per_response: float
    errors: int
    cpu_cores: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """See `first_token`; in ms."""

    client_p50_ms: float
    client_p90_ms: float
    added_p50_ms: float
    router_p50_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Time per token of READERS streams that are read: alone, and beside as many that nobody reads."""

    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float


class Streams:
    """Requests on a few connections, each answer's instants kept."""

    def __init__(self, url: str, connections: int = CONNECTIONS) -> None:
        self._clients = [triton.InferenceServerClient(url) for _ in range(connections)]
        self._lock = threading.Lock()
        self._open = 0
        self._ended = threading.Event()
        self.sent_s: dict[str, float] = {}
        self.token_s: dict[str, list[tuple[float, int]]] = {}
        self.errors: list[str] = []
        self.responses = 0
        self.timeline = ""
        for client in self._clients:
            client.start_stream(callback=self._on_response)

    def run(self, count: int, model: str, inputs: list[Any]) -> None:
        """Sends `count` requests at once and waits for the end of all. Raises ServeError if that takes too long."""
        self._open, self.responses = count, 0
        self.sent_s, self.token_s, self.errors = {}, {}, []
        self._ended.clear()
        for index in range(count):
            self.sent_s[str(index)] = time.perf_counter()
            self._clients[index % len(self._clients)].async_stream_infer(
                model, inputs, request_id=str(index), enable_empty_final_response=True
            )
        if not self._ended.wait(WAIT_S):
            raise ServeError(f"{self._open} of {count} answers have no end after {WAIT_S:g} s")

    def close(self) -> None:
        for client in self._clients:
            client.stop_stream(cancel_requests=self._open > 0)
            client.close()

    def _on_response(self, result: Any, error: Exception | None) -> None:
        now_s = time.perf_counter()
        ended, tokens, name = True, 0, ""
        if error is None:
            response = result.get_response()
            ids = result.as_numpy("output_ids")
            name, tokens = response.id, 0 if ids is None else ids.size
            ended = response.parameters["triton_final_response"].bool_param
            if ended and (timeline := result.as_numpy("timeline")) is not None:
                self.timeline = timeline.reshape(-1)[0].decode()
        with self._lock:
            self.responses += tokens > 0
            if error is not None:
                self.errors.append(str(error))
            elif tokens:
                self.token_s.setdefault(name, []).append((now_s, tokens))
            self._open -= ended
            if self._open == 0:
                self._ended.set()


def tensor(name: str, value: Any, kind: str) -> Any:
    array = np.array([[value]], dtype={"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}[kind])
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def asked(max_tokens: int) -> list[Any]:
    return [
        tensor("text_input", PROMPT.encode(), "BYTES"),
        tensor("max_tokens", max_tokens, "INT32"),
        tensor("stream", True, "BOOL"),
    ]


def pipeline(model: Path, *, streams: int, interval_tokens: int, decode_step_ms: float) -> dict[str, Any]:
    return {
        "model": str(model),
        "engine": "emulated",
        "pools": {
            "prefill": {"kv_tokens": 65536},
            "decode": {"kv_tokens": 262144, "max_batch": streams},
        },
        "kv": {"max_seq_tokens": 1024},
        "scheduler": {"max_queue": 4096},
        "streaming": {"interval_tokens": interval_tokens},
        "emulated": {
            "prefill_tokens_per_s": 1e9,
            "step_ms": STEP_MS,
            "decode_step_ms": decode_step_ms,
            "decode_sequence_ms": 0,
            "decode_kv_token_us": 0,
        },
    }


def throughput(server: Served, streams: int, max_tokens: int) -> Throughput:
    load = Streams(server.grpc)
    try:
        load.run(min(streams, 32), "pd", asked(8))  # connections, pages and code are warm
        before, own, began_s = cpu_times(server.root), psutil.Process().cpu_times(), time.perf_counter()
        load.run(streams, "pd", asked(max_tokens))
        took_s, after, own_after = time.perf_counter() - began_s, cpu_times(server.root), psutil.Process().cpu_times()
    finally:
        load.close()
    cpu = {label: seconds / took_s for label, seconds in after.since(before).items()}
    cpu["client"] = (own_after.user + own_after.system - own.user - own.system) / took_s
    if not load.token_s:
        raise ServeError(f"no answer had a token; the first error: {load.errors[0] if load.errors else 'none'}")
    from_s = max(instants[0][0] for instants in load.token_s.values())
    to_s = min(instants[-1][0] for instants in load.token_s.values())
    counted = sum(n for instants in load.token_s.values() for at_s, n in instants if from_s < at_s <= to_s)
    everything = sum(n for instants in load.token_s.values() for _, n in instants)
    return Throughput(
        streams=streams,
        tokens_per_s=counted / (to_s - from_s) if to_s > from_s else 0.0,
        tokens_per_response=everything / load.responses,
        errors=len(load.errors),
        cpu_cores={label: round(cores, 2) for label, cores in sorted(cpu.items()) if cores >= 0.005},
    )


def first_token(server: Served) -> FirstToken:
    """Lone requests, one by one. `added` is all that isn't the engine's step: client, Triton and router; `router` is
    the part of it between the request's arrival at the router and its first token's leaving."""
    load = Streams(server.grpc, connections=1)
    seen, inside = [], []
    try:
        for _ in range(PROBES):
            load.run(1, "pd", asked(2))
            if load.errors:
                raise ServeError(f"a request was answered with an error: {load.errors[0]}")
            seen.append((load.token_s["0"][0][0] - load.sent_s["0"]) * 1e3)
            inside.append(json.loads(load.timeline)["ttft_ms"])
            time.sleep(PAUSE_S)
    finally:
        load.close()
    deciles = statistics.quantiles(seen, n=10)
    return FirstToken(
        client_p50_ms=deciles[4],
        client_p90_ms=deciles[8],
        added_p50_ms=deciles[4] - STEP_MS,
        router_p50_ms=statistics.median(inside) - STEP_MS,
    )


class Unread:
    """Streams that take nothing in: their responses pile up in front of the client."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self._done = threading.Event()
        self._channel = grpc.insecure_channel(url)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._calls = [stub.ModelStreamInfer(self._requests(index, max_tokens)) for index in range(count)]

    def close(self) -> None:
        self._done.set()
        for call in self._calls:
            call.cancel()
        self._channel.close()

    def _requests(self, index: int, max_tokens: int) -> Iterator[service_pb2.ModelInferRequest]:
        request = service_pb2.ModelInferRequest(model_name="pd", id=f"unread{index}")
        for name, kind, content in (
            ("text_input", "BYTES", struct.pack("<I", len(PROMPT)) + PROMPT.encode()),
            ("max_tokens", "INT32", struct.pack("<i", max_tokens)),
            ("stream", "BOOL", b"\x01"),
        ):
            request.inputs.add(name=name, datatype=kind, shape=[1, 1])
            request.raw_input_contents.append(content)
        yield request
        self._done.wait()


def readers(server: Served, max_tokens: int) -> Readers:
    alone = _per_token_ms(server, max_tokens)
    unread = Unread(server.grpc, READERS, max_tokens)
    try:
        beside = _per_token_ms(server, max_tokens)
    finally:
        unread.close()
    return Readers(
        alone_p50_ms=float(np.percentile(alone, 50)),
        alone_p99_ms=float(np.percentile(alone, 99)),
        beside_p50_ms=float(np.percentile(beside, 50)),
        beside_p99_ms=float(np.percentile(beside, 99)),
    )


def _per_token_ms(server: Served, max_tokens: int) -> list[float]:
    load = Streams(server.grpc)
    try:
        load.run(READERS, "pd", asked(max_tokens))
    finally:
        load.close()
    if load.errors:
        raise ServeError(f"{len(load.errors)} of {READERS} streams failed: {load.errors[0]}")
    spans = [(instants[-1][0] - instants[0][0], sum(n for _, n in instants[1:])) for instants in load.token_s.values()]
    return [seconds * 1e3 / tokens for seconds, tokens in spans if tokens]


def measure(options: argparse.Namespace) -> tuple[Throughput, FirstToken, Readers]:
    many = partial(pipeline, streams=options.streams, interval_tokens=options.interval, decode_step_ms=5.0)
    lone = partial(pipeline, streams=options.streams, interval_tokens=1, decode_step_ms=10.0)
    with served_tiny("router-live", many, model=options.model) as server:
        tokens = throughput(server, options.streams, options.tokens)
    with served_tiny("router-live", lone, model=options.model) as server:
        return tokens, first_token(server), readers(server, 800)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="router_live", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--streams", type=int, default=512, help="answers at once")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each")
    parser.add_argument("--interval", type=int, default=8, help="tokens of a response (streaming.interval_tokens)")
    parser.add_argument("--model", type=Path, help="folder whose tokenizer is used; SmolLM2 where none is given")
    options = parser.parse_args(argv)
    if min(options.streams, options.interval) < 1 or not 2 <= options.tokens <= 900:
        parser.error("--streams and --interval must be at least 1, --tokens between 2 and 900")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        tokens, first, reading = measure(options)
    except TrtpdError as error:
        print(f"router_live: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps({"tokens": asdict(tokens), "first_token": asdict(first), "readers": asdict(reading)}))
        return 0
    cpu = ", ".join(f"{kind} {cores:.2f}" for kind, cores in tokens.cpu_cores.items())
    print(
        f"tokens: {tokens.tokens_per_s:,.0f} a second with {tokens.streams} streams, "
        f"{tokens.tokens_per_response:.1f} a response, {tokens.errors} errors; cores: {cpu}\n"
        f"first token: {first.client_p50_ms:.2f} ms (p90 {first.client_p90_ms:.2f}), {first.added_p50_ms:.2f} ms more "
        f"than the engine's step, {first.router_p50_ms:.2f} of them in the router\n"
        f"readers: {reading.alone_p50_ms:.2f} ms a token (p99 {reading.alone_p99_ms:.2f}) alone, "
        f"{reading.beside_p50_ms:.2f} (p99 {reading.beside_p99_ms:.2f}) beside {READERS} streams nobody reads"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
