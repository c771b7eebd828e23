"""KServe gRPC streaming, as Triton speaks it: one call per request, all of them over a few connections.

Requests are serialised before they are due, and a response is timed before it is parsed.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

from trtpd.errors import InputError, NoInstanceError, RequestError, SaturatedError, ServeError
from trtpd.perf.model_names import model_names
from trtpd.perf.records import ServerTimes
from trtpd.perf.transport import Arrived, Ending, Question
from trtpd.perf.workload import MOST_TOKENS
from trtpd.runtime.serve.address import server_address
from trtpd.runtime.serve.timeline import TimelineReport, from_json

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
READY = "/inference.GRPCInferenceService/ModelReady"
OPEN_TIMEOUT_S = 10.0
"""To reach the server over all connections."""

MOST_CHANNELS = 1000
REFUSALS = frozenset({SaturatedError.code, NoInstanceError.code, RequestError.code, "draining"})
"""Reasons of the server's that mean: not taken. Every other one is a failure of what was taken."""

_CODE = re.compile(r"code=(\w+)(?: retry_after_s=[\d.]+)? ?(.*)", re.DOTALL)
_TYPES = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}


class TritonTransport:
    """The model `model` at `url` (HOST:PORT). `pd` is asked as its clients ask it, `prefill_N` for a prompt, `decode_N`
    for decoding behind synthetic KV of the prompt's length."""

    def __init__(self, url: str, *, model: str = "pd", channels: int = 1) -> None:
        if not 1 <= channels <= MOST_CHANNELS:
            raise InputError(f"{channels} gRPC connections; there must be 1 to {MOST_CHANNELS} (--channels)")
        if not model:
            raise InputError("the name of the model is empty; name one with --model, such as pd, prefill_0 or decode_0")
        self._url = server_address(url)
        self._model = model
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
        ]
        self._channels = [(url, options) for _ in range(channels)]
        self._open: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []
        self._next = 0

    async def open(self) -> None:
        """See Transport; of a model that isn't served the message says which are."""
        self._open = [grpc.aio.insecure_channel(url, options=options) for url, options in self._channels]
        self._calls = [
            channel.stream_stream(
                METHOD,
                request_serializer=_as_is,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            for channel in self._open
        ]
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                for channel in self._open:
                    await _connected(channel)
            ready = self._open[0].unary_unary(
                READY,
                request_serializer=service_pb2.ModelReadyRequest.SerializeToString,
                response_deserializer=service_pb2.ModelReadyResponse.FromString,
            )
            serves = (await ready(service_pb2.ModelReadyRequest(name=self._model), timeout=OPEN_TIMEOUT_S)).ready
        except (TimeoutError, ConnectionError, grpc.aio.AioRpcError) as error:
            await self.close()
            raise ServeError(
                f"no server at {self._url}; start one with `trtpd serve BUILD`, or give its gRPC address with --url"
            ) from error
        if not serves:
            await self.close()
            names = await asyncio.to_thread(model_names, self._url)
            if names and self._model not in names:
                raise InputError(
                    f"the server at {self._url} has no model {self._model!r}; --model takes {', '.join(names)}"
                )
            raise ServeError(f"the server at {self._url} does not serve {self._model} now; see `trtpd status`")

    async def close(self) -> None:
        for channel in self._open:
            await channel.close()
        self._open.clear()

    def prepare(self, question: Question) -> bytes:
        request = service_pb2.ModelInferRequest(model_name=self._model)
        for name, kind, value in self._inputs(question):
            tensor = request.inputs.add(name=name, datatype=kind)
            tensor.shape.extend([1, 1])
            request.raw_input_contents.append(_raw(kind, value))
        return bytes(request.SerializeToString())

    def _inputs(self, question: Question) -> list[tuple[str, str, object]]:
        if self._model.startswith("prefill_"):
            return [("text_input", "BYTES", question.prompt)]
        if self._model.startswith("decode_"):
            return [("kv_tokens", "INT32", question.kv_tokens), ("max_tokens", "INT32", question.max_tokens)]
        inputs: list[tuple[str, str, object]] = [
            ("text_input", "BYTES", question.prompt),
            ("max_tokens", "INT32", question.max_tokens),
            ("end_id", "INT32", -1),  # the answer is as long as the workload says, whatever the model writes
            ("stream", "BOOL", True),
            ("return_num_input_tokens", "BOOL", True),
            ("deadline_ms", "FP32", question.timeout_s * 1e3),
        ]
        for name, seconds in (("ttft_ms", question.ttft_s), ("tpot_ms", question.tpot_s)):
            if seconds is not None:
                inputs.append((name, "FP32", seconds * 1e3))
        return inputs

    async def send(self, request: bytes, arrived: Arrived, ids: list[int] | None = None) -> Ending:
        """See Transport. `ids`, where given, takes the tokens themselves, for who checks them."""
        self._next = (self._next + 1) % len(self._calls)
        call = self._calls[self._next]()
        last: dict[str, Any] = {}
        error: Ending | None = None
        tokens = 0
        try:
            await call.write(request)
            await call.done_writing()
            while (response := await call.read()) is not grpc.aio.EOF:
                if response is None:  # grpc's word for bytes that are no such message
                    raise ValueError("a response is no ModelStreamInferResponse")
                if response.error_message:  # read on: Triton may keep a request whose stream is cancelled here
                    error = error or ending_of_error(response.error_message)
                    continue
                count = _tokens(response.infer_response)
                if count:
                    arrived(count)
                    tokens += count
                    if ids is not None:
                        ids += _ids(response.infer_response)
                _keep(last, response.infer_response)
        except grpc.aio.AioRpcError as fault:
            reason = f"grpc_{fault.code().name.lower()}"
            return error or Ending(state="failed", reason=reason, message=fault.details() or "")
        except ValueError as fault:
            return Ending(state="failed", reason="protocol", message=f"a response can't be read: {fault}")
        finally:
            call.cancel()
        return error or _ending(last, tokens)


async def _connected(channel: grpc.aio.Channel) -> None:
    """Raises ConnectionError once no address of the host could be reached: gRPC itself would try on."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise ConnectionError("refused")
        await channel.wait_for_state_change(state)


def ending_of_error(message: str) -> Ending:
    """The server's error: `code=` in it says whether the request was refused or failed."""
    found = _CODE.match(message)
    code, text = (found[1], found[2]) if found else ("server_error", message)
    return Ending(state="refused" if code in REFUSALS else "failed", reason=code, message=text.strip())


def _as_is(request: bytes) -> bytes:
    return request


def _raw(kind: str, value: object) -> bytes:
    if isinstance(value, str):
        encoded = value.encode()
        return len(encoded).to_bytes(4, "little") + encoded
    return np.array([value], dtype=_TYPES[kind]).tobytes()


def _tokens(response: Any) -> int:
    """Raises ValueError for a shape that no answer has."""
    for output in response.outputs:
        if output.name == "output_ids":
            tokens: int = math.prod(output.shape)
            if not 0 <= tokens <= MOST_TOKENS:
                raise ValueError(f"output_ids has the shape {list(output.shape)}")
            return tokens
    return 0


def _ids(response: Any) -> list[int]:
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == "output_ids":
            if output.datatype not in _TYPES:
                raise ValueError(f"output_ids is of type {output.datatype!r}")
            found: list[int] = np.frombuffer(raw, _TYPES[output.datatype]).tolist()
            return found
    return []


def _keep(last: dict[str, Any], response: Any) -> None:
    """What only the last response brings. Raises ValueError for text that is no UTF-8."""
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.datatype == "BYTES" and output.name in ("finish_reason", "timeline"):
            try:
                last[output.name] = raw[4:].decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{output.name} is no UTF-8 ({error})") from error
        elif output.name == "num_input_tokens":
            last[output.name] = int.from_bytes(raw[:4], "little")


def _ending(last: Mapping[str, Any], tokens: int) -> Ending:
    if not last.get("finish_reason") and "timeline" not in last:
        return Ending(state="failed", reason="no_end", message="the stream ended without a last response")
    timeline = _timeline(last.get("timeline", ""))
    return Ending(
        state="finished",
        reason=last.get("finish_reason", ""),
        prompt_tokens=last.get("num_input_tokens", timeline.prompt_tokens if timeline else None),
        output_tokens=timeline.output_tokens if timeline else tokens,
        server=None if timeline is None else server_times(timeline),
    )


def _timeline(text: str) -> TimelineReport | None:
    """None where the stage gives none of this shape."""
    try:
        return from_json(text)
    except ServeError:
        return None


def server_times(timeline: TimelineReport) -> ServerTimes:
    """A timeline's durations in seconds."""
    moved, who = timeline.transfer, timeline.attempts[-1] if timeline.attempts else None
    return ServerTimes(
        queue_s=_seconds(timeline.queue_ms),
        prefill_s=_seconds(timeline.prefill_ms),
        ttft_s=_seconds(timeline.ttft_ms),
        second_token_s=_seconds(timeline.second_token_ms),
        tpot_s=_seconds(timeline.tpot_ms),
        transfer_s=None if moved is None else moved.ms / 1e3,
        exposed_s=None if moved is None else moved.exposed_ms / 1e3,
        transfer_bytes=0 if moved is None else moved.bytes,
        transfer_path="" if moved is None else moved.path,
        retries=timeline.retries,
        prefill="" if who is None else who.prefill,
        decode="" if who is None else who.decode or "",
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
