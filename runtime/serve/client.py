"""A small client of the model `pd`: stream an answer, ask for the status. Every wait has an end."""

from __future__ import annotations

import contextlib
import json
import queue
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from trtpd.errors import CapacityError, NoInstanceError, RequestError, SaturatedError, ServeError, TrtpdError
from trtpd.runtime.serve.address import server_address
from trtpd.runtime.serve.emitter import SHUTTING_DOWN
from trtpd.runtime.serve.timeline import TimelineReport, from_json

MODEL = "pd"
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0
STATUS_TIMEOUT_S = 10.0
MOST_FLOAT = 3e38
_AGAIN = "ask again once `trtpd status` answers (if it doesn't, start a server with `trtpd serve BUILD`)"
_LOST = ("UNAVAILABLE", "UNKNOWN", "INTERNAL", "CANCELLED")
"""gRPC's own ends of a stream whose server went away. What the server itself says has no such status."""
_UNREACHED = {
    "Connection refused": "nothing listens there",
    "hostname lookup error": "no host has that name",
    "Domain name not found": "no host has that name",
    "Deadline Exceeded": f"no answer within {CONNECT_TIMEOUT_S:g} s",
    "No route to host": "no route to that host",
    "Network is unreachable": "no network to that host",
    "Socket closed": "what listens there is no gRPC server: is it the HTTP port?",
    "http1.x server": "an HTTP server listens there: the gRPC front has another port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer. `finish_reason` and `timeline` come with the last one."""

    text: str
    ids: tuple[int, ...]
    finish_reason: str = ""
    timeline: TimelineReport | None = None


def generate(
    url: str,
    *,
    prompt: str | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
    max_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Iterator[Chunk]:
    """Streams the answer to a raw `prompt` or to a chat. Closing the iterator cancels the request.

    Raises RequestError for a refused request, SaturatedError and NoInstanceError as the server says, ServeError
    when it can't be reached, breaks, or takes longer than `timeout_s`, and for whatever ends an answer in the middle.
    """
    inputs = [
        _text("text_input", None if prompt is None else [prompt]),
        _text("messages", None if messages is None else [json.dumps([dict(m) for m in messages])]),
        _number("max_tokens", max_tokens, "INT32"),
        _number("temperature", temperature, "FP32"),
        _number("top_k", top_k, "INT32"),
        _number("top_p", top_p, "FP32"),
        _number("seed", seed, "UINT64"),
        _text("stop_words", list(stop) or None),
        _number("stream", True, "BOOL"),
    ]
    came_tokens = 0
    try:
        with contextlib.closing(_stream(url, [tensor for tensor in inputs if tensor], timeout_s)) as results:
            for result in results:
                chunk = _chunk(result)
                came_tokens += len(chunk.ids)
                yield chunk
    except (ServeError, CapacityError) as error:
        if came_tokens == 0:
            raise
        tokens = f"{came_tokens} token{'s' if came_tokens > 1 else ''} of it came"
        raise ServeError(f"the answer is incomplete, {tokens}: {error}") from error


def _chunk(result: Any) -> Chunk:
    timeline = _read_text(result, "timeline")
    return Chunk(
        text=_read_text(result, "text_output"),
        ids=tuple(_read(result, "output_ids")),
        finish_reason=_read_text(result, "finish_reason"),
        timeline=from_json(timeline) if timeline else None,
    )


def status(url: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, Any]:
    """What the server says of its instances, load and faults; status.py has its shape. Raises as `generate`."""
    with contextlib.closing(_stream(url, [_text("query", ["status"])], timeout_s)) as results:
        for result in results:
            found: dict[str, Any] = json.loads(_read_text(result, "text_output"))
            return found
    raise ServeError(f"{url} gave no status; is it another version of trtpd?")


def _stream(url: str, inputs: list[Any], timeout_s: float) -> Generator[Any, None, None]:
    """Responses that carry something, up to the last. Leaving it early cancels the request."""
    arrived: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(server_address(url))
    finished = False
    try:
        _check_serving(client, url)
        client.start_stream(callback=lambda result, error: arrived.put((result, error)), stream_timeout=timeout_s)
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        while not finished:
            result, error = arrived.get(timeout=timeout_s + 1.0)
            if error is not None:
                finished = True
                raise _translated(error, url)
            response = result.get_response()
            finished = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield result
    except InferenceServerException as error:
        raise _translated(error, url) from error
    except queue.Empty as error:
        raise ServeError(f"{url} gave no answer within {timeout_s:g} s") from error
    finally:
        client.stop_stream(cancel_requests=not finished)
        client.close()


def _check_serving(client: Any, url: str) -> None:
    """Raises ServeError with the mend if nothing listens there or `pd` is not up."""
    try:
        ready = client.is_model_ready(MODEL, client_timeout=CONNECT_TIMEOUT_S)
    except InferenceServerException as error:
        raise ServeError(
            f"no server at {url} ({_why_unreached(_first_line(error.message()))}); start one with `trtpd serve BUILD`, "
            "or give its gRPC address with --url HOST:PORT"
        ) from error
    if not ready:
        raise ServeError(
            f"the server at {url} does not serve {MODEL} now: it is starting (then try again in a few seconds) or "
            "stopping (then start one with `trtpd serve BUILD`)"
        )


def _why_unreached(message: str) -> str:
    """What gRPC says of a connection that can't be had, in plain words where they are known."""
    return next((words for sign, words in _UNREACHED.items() if sign in message), message)


def _translated(error: InferenceServerException, url: str) -> TrtpdError:
    """Triton's error as ours; `code=` in its message says which."""
    message = _first_line(error.message())
    found = re.match(r"code=(\w+)(?: retry_after_s=([\d.]+))? ?(.*)", message)
    if found is None:
        status = str(error.status() or "")
        if any(sign in status for sign in _LOST):
            return ServeError(f"the server at {url} went away (gRPC: {message}); {_AGAIN}")
        return RequestError(message) if "INVALID_ARG" in status else ServeError(f"{url}: {message}")
    code, retry_after, text = found[1], found[2], found[3]
    if code == SHUTTING_DOWN:
        return ServeError(f"the server at {url} is going away and ended this; {_AGAIN}")
    if code == RequestError.code:
        return RequestError(text)
    if code == SaturatedError.code:
        wait_s = float(retry_after or 1.0)
        return SaturatedError(_advised(f"the server is full: {text}", f"try again in {wait_s} s"), retry_after_s=wait_s)
    if code == NoInstanceError.code:
        return NoInstanceError(_advised(f"nothing serves this now: {text}", "see `trtpd status`"))
    return ServeError(f"{url}: {text} ({code})")


def _advised(text: str, advice: str) -> str:
    """With what to do, unless the server has said it."""
    return text if advice in text else f"{text}; {advice}"


def _first_line(message: str | None) -> str:
    return (message or "unknown error").strip().splitlines()[0]


def _number(name: str, value: float | None, kind: str) -> Any:
    if value is None:
        return None
    if kind == "FP32" and not abs(value) <= MOST_FLOAT:
        raise RequestError(f"{name} is {value}; it must be a finite number")
    types = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    ranges = {"INT32": (-(1 << 31), (1 << 31) - 1), "UINT64": (0, (1 << 64) - 1)}
    low, high = ranges.get(kind, (0, 0))
    if kind in ranges and not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must lie between {low} and {high}")
    return _tensor(name, np.array([[value]], dtype=types[kind]), kind)


def _text(name: str, values: Sequence[str] | None) -> Any:
    if values is None:
        return None
    try:
        encoded = [value.encode() for value in values]
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode text ({error.reason})") from error
    return _tensor(name, np.array([encoded], dtype=np.object_), "BYTES")


def _tensor(name: str, array: Any, kind: str) -> Any:
    tensor = triton.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _read(result: Any, name: str) -> list[Any]:
    array = result.as_numpy(name)
    return [] if array is None else list(array.reshape(-1).tolist())


def _read_text(result: Any, name: str) -> str:
    values = _read(result, name)
    return values[0].decode() if values else ""
