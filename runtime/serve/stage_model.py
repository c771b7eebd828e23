"""What a stage model's shim calls: owns one instance's worker, and answers requests for its stage alone.

Stage requests exist to be measured (perf_analyzer): `prefill_N` computes a prompt and lets go of it, `decode_N`
decodes behind synthetic KV. Both count as the instance's load.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trtpd.build.manifest import EngineConfig, RoleName, read_engine_config, read_manifest
from trtpd.errors import EngineError, InputError, RequestError, SaturatedError, ServeError, TrtpdError
from trtpd.runtime.serve.answer import failure_of
from trtpd.runtime.serve.emitter import Emitter, End, Piece
from trtpd.runtime.serve.inputs import Inputs
from trtpd.runtime.serve.request import check_size
from trtpd.runtime.serve.rundir import note_stub
from trtpd.runtime.serve.sinks import error_response
from trtpd.runtime.serve.text import TextLayer
from trtpd.runtime.serve.worker_process import LOAD_TIMEOUT_S, WorkerCommand, WorkerProcess, worker_environment
from trtpd.runtime.worker import roles
from trtpd.runtime.worker.gpus import binding_for
from trtpd.runtime.worker.local_client import LocalClient
from trtpd.runtime.worker.mpirun import hosts_of

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 120.0
DRAIN_S = 10.0
STOP_GRACE_S = 5.0
ANSWER_S = 2.0
"""A worker says how it is from a thread of its own, whatever it computes. One that takes longer is stopped or hangs."""
MAX_CALLS = 128


class StageModel:
    """One instance. `pb_utils` is Any: it exists only inside a Triton stub."""

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        """Returns when the worker serves. Raises TrtpdError."""
        self._pb = pb_utils
        self._name = args["model_name"]
        build = build_of(args)
        self._run_dir = Path(os.environ["TRTPD_RUN_DIR"])
        note_stub(self._run_dir, self._name)
        self._config = engine_config_of(build, self._name, roles.ordered(self._run_dir, self._name))
        self._text = TextLayer(build / "tokenizer")
        self._worker = WorkerProcess(worker_command(build, self._name), worker_environment(os.environ))
        self._ids = itertools.count(1)
        self._gone: set[int] = set()
        self._emitter = Emitter(self._gone.add)
        self._calls = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="stage")
        self._worker.start(LOAD_TIMEOUT_S)
        self._emitter.start()

    def execute(self, requests: list[Any]) -> None:
        """Answers each through its response sender."""
        for request in requests:
            request_id = next(self._ids)
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            # One response for a prefill, so that /generate can ask for it too; a decode streams.
            self._emitter.open(request_id, StageSink(self._pb, request), stream="kv_tokens" in tensors)
            self._calls.submit(self._answer, request_id, tensors)

    def finalize(self) -> None:
        """Lets what runs end for a while, then stops the worker: without grace if it doesn't answer."""
        ready, grace_s = self._worker.ready, STOP_GRACE_S
        if ready is not None:
            with LocalClient(ready.local) as client:
                grace_s = STOP_GRACE_S if _drain(client, time.monotonic() + DRAIN_S) else 0.0
        self._worker.stop(grace_s=grace_s)
        self._calls.shutdown(wait=True)
        self._emitter.stop(failure_of(ServeError.code, f"{self._name} is stopping"))

    def _answer(self, request_id: int, tensors: Mapping[str, Any]) -> None:
        end = End(finish_reason="stop")
        try:
            end = self._run(request_id, tensors)
        except RequestError as error:
            end = End(failure=failure_of(error.code, str(error)))
        except SaturatedError as error:
            end = End(failure=failure_of(error.code, str(error), retry_after_s=error.retry_after_s))
        except TrtpdError as error:
            end = End(failure=failure_of(error.code, str(error)))
        except Exception as error:  # whatever it was, the client must get its last response
            log.exception("stage request %d", request_id)
            end = End(failure=failure_of("internal", repr(error)))
        self._emitter.close(request_id, end)
        self._gone.discard(request_id)

    def _run(self, request_id: int, tensors: Mapping[str, Any]) -> End:
        ready = self._worker.ready
        if ready is None:
            raise EngineError(f"{self._name}: its worker is being restarted; try again in a few seconds")

        def given_up() -> bool:
            return request_id in self._gone or self._worker.ready is not ready

        with LocalClient(ready.local) as client:
            run = self._decode if "kv_tokens" in tensors else self._prefill
            end = run(client, request_id, tensors, given_up)
        if end is not None:
            return end
        if request_id in self._gone:
            return End(cancelled=True)
        raise EngineError(f"{self._name}: its worker ended during this request; try again in a few seconds")

    def _prefill(
        self, client: LocalClient, request_id: int, tensors: Mapping[str, Any], given_up: Callable[[], bool]
    ) -> End | None:
        """None if given up."""
        done = client.prefill(self._prompt(tensors), timeout_s=REQUEST_TIMEOUT_S, cancelled=given_up)
        if done is None:
            return None
        self._emitter.push(request_id, Piece(ids=[done.first_token]))
        times = {"queue_ms": done.queue_s * 1e3, "prefill_ms": done.prefill_s * 1e3}
        return End(finish_reason="length", timeline=json.dumps(times))

    def _decode(
        self, client: LocalClient, request_id: int, tensors: Mapping[str, Any], given_up: Callable[[], bool]
    ) -> End | None:
        """None if given up."""
        if prompt := tensors.keys() & {"input_ids", "text_input"}:
            raise RequestError(f"kv_tokens and {min(prompt)} are both given; they measure different stages: send one")
        limit = self._config.max_seq_tokens
        kv_tokens = _integer(tensors, "kv_tokens", 1, limit - 1)
        max_tokens = _integer(tensors, "max_tokens", 1, limit - kv_tokens)
        batches = client.decode(
            kv_tokens=kv_tokens,
            max_tokens=max_tokens,
            timeout_s=REQUEST_TIMEOUT_S,
            cancelled=given_up,
        )
        done = False
        for batch in batches:
            self._emitter.push(request_id, Piece(ids=list(batch.ids)))
            done = batch.done
        return End(finish_reason="length", timeline="{}") if done else None

    def _prompt(self, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        if ("input_ids" in tensors) == ("text_input" in tensors):
            raise RequestError(
                "send input_ids or text_input to measure prefill, or kv_tokens and max_tokens to measure decode"
            )
        inputs = Inputs(tensors)
        if "text_input" in tensors:
            text = inputs.text("text_input") or ""
            check_size(len(text.encode()), self._text, self._config.max_seq_tokens)
            ids = self._text.encode(text)
        else:
            ids = tuple(inputs.integers("input_ids"))
        if not 0 < len(ids) < self._config.max_seq_tokens:
            raise RequestError(f"the prompt has {len(ids)} tokens; it must have 1 to {self._config.max_seq_tokens - 1}")
        return ids


class StageSink:
    """One stage request's response sender."""

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb = pb_utils
        self._sender = request.get_response_sender()

    def send(self, piece: Piece, end: End | None) -> None:
        pb, flags = self._pb, 0 if end is None else self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if end is not None and end.failure is not None:
            self._sender.send(error_response(pb, end.failure), flags=flags)
        elif end is not None and end.cancelled:
            self._sender.send(flags=flags)
        else:
            tensors = [pb.Tensor("output_ids", np.array([piece.ids], dtype=np.int32))]
            if end is not None:
                tensors.append(pb.Tensor("timeline", np.array([end.timeline.encode()], dtype=np.object_)))
            self._sender.send(pb.InferenceResponse(tensors), flags=flags)

    def left(self) -> bool:
        return bool(self._sender.is_cancelled())


def build_of(args: Mapping[str, str]) -> Path:
    """BUILD, from where Triton found the model: BUILD/model_repo/NAME."""
    return Path(args["model_repository"]).resolve().parents[1]


def engine_config_of(build: Path, instance: str, role: RoleName | None = None) -> EngineConfig:
    """What an instance loads in its own role, or in `role`. Raises ServeError if the build has no such instance."""
    try:
        entry = roles.entry_of(read_manifest(build), instance, role)
    except InputError as error:
        raise ServeError(
            f"{build} has no instance {instance!r} as asked for ({error}); render its model repository with "
            "`trtpd build`"
        ) from error
    return read_engine_config(build / entry.directory)


def worker_command(build: Path, instance: str) -> WorkerCommand:
    """Router, run directory, keys, GPUs and tag come from the launcher through the environment, and the role, where it
    isn't the instance's own, through the run directory. Its hosts stay the same in any role."""
    keys = os.environ.get("TRTPD_KEYS")
    run_dir, manifest = Path(os.environ["TRTPD_RUN_DIR"]), read_manifest(build)
    role = roles.ordered(run_dir, instance)
    config = engine_config_of(build, instance, role)
    return WorkerCommand(
        build=build,
        instance=instance,
        router=os.environ["TRTPD_ROUTER"],
        run_dir=run_dir,
        keys=Path(keys) if keys else None,
        ranks=config.processes,
        hosts=hosts_of(manifest.settings, roles.home_role(manifest, instance)),
        gpus=binding_for(instance),
        role=role,
        tag=os.environ.get("TRTPD_TAG", ""),
    )


def _drain(client: LocalClient, until_s: float) -> bool:
    """Lets what runs end, until then. False for a worker that doesn't even say how it is."""
    try:
        client.status(ANSWER_S)
    except ServeError as error:
        log.warning("killing a worker that does not answer: %s", error)
        return False
    try:
        client.drain(timeout_s=max(0.0, until_s - time.monotonic()))
        while client.status(ANSWER_S).jobs and time.monotonic() < until_s:
            time.sleep(0.05)
    except ServeError as error:
        log.warning("stopping a worker that did not drain: %s", error)
    return True


def _integer(tensors: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = Inputs(tensors).integer(name, low=low, high=high)
    if value is None:
        raise RequestError(f"{name} is missing; to measure decode send kv_tokens and max_tokens")
    return value
