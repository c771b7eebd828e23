"""Triton's HTTP model control, as much of it as the launcher needs. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from trtpd.errors import ServeError

GONE = ("UNAVAILABLE", "")


KEY_HEADER = "trtpd-control"


class TritonControl:
    """Talks to one server. Thread-safe: every call has a connection of its own. `key`: what its control asks for."""

    def __init__(self, host: str, port: int, *, key: str = "") -> None:
        self._host = host
        self._port = port
        self._headers = {KEY_HEADER: key}

    def live(self) -> bool:
        try:
            status, _ = self._call("GET", "/v2/health/live", timeout_s=2.0)
        except ServeError:
            return False
        return status == 200

    def ready(self, model: str) -> bool:
        """What the server says; it does not notice a dead stub."""
        status, _ = self._call("GET", f"/v2/models/{model}/ready", timeout_s=2.0)
        return status == 200

    def load(self, model: str, *, timeout_s: float) -> None:
        """Returns when the model serves. Raises ServeError with the server's reason."""
        status, body = self._call("POST", f"/v2/repository/models/{model}/load", timeout_s=timeout_s)
        if status != 200:
            raise ServeError(f"model {model} did not load: {_reason(body)}")

    def unload(self, model: str, *, timeout_s: float) -> bool:
        """Refuses new requests at once, lets running ones end; True when it is gone in time."""
        deadline_s = time.monotonic() + timeout_s
        self._call("POST", f"/v2/repository/models/{model}/unload", timeout_s=max(1.0, timeout_s))
        while self.state(model) not in GONE:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True

    def state(self, model: str) -> str:
        """READY, LOADING, UNLOADING, UNAVAILABLE, or "" for a model never loaded."""
        status, body = self._call("POST", "/v2/repository/index", timeout_s=5.0)
        if status != 200:
            raise ServeError(f"the server's model index can't be read: {_reason(body)}")
        entries: list[dict[str, Any]] = json.loads(body)
        return next((str(entry.get("state", "")) for entry in entries if entry["name"] == model), "")

    def _call(self, method: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body=b"{}" if method == "POST" else None, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServeError(
                f"tritonserver at {self._host}:{self._port} did not answer {method} {path}: {error}"
            ) from error
        finally:
            connection.close()


def _reason(body: bytes) -> str:
    """What a model said went wrong, without the server's words around it and the Python frames behind."""
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
    _, said, message = text.partition("TritonModelException: ")
    return message.partition("\n\nAt:\n")[0].strip() if said else text
