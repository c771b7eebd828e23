"""Which models a Triton server has: what a wrong name could have been."""

from __future__ import annotations

from collections.abc import Sequence

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from trtpd.errors import InputError, TrtpdError
from trtpd.runtime.serve.client import MODEL, status

TIMEOUT_S = 5.0


def check_model(url: str, model: str) -> None:
    """Raises InputError for a model that the server at HOST:PORT doesn't have, with those that it has. A server that
    can't be asked, and a model that isn't ready now, are left to whoever asks next."""
    client = triton.InferenceServerClient(url)
    try:
        if client.is_model_ready(model, client_timeout=TIMEOUT_S):
            return
        known = _known(client, url)
        ready = [name for name in known if client.is_model_ready(name, client_timeout=TIMEOUT_S)]
    except InferenceServerException:
        return
    finally:
        client.close()
    if model not in known and ready:
        raise InputError(f"the server at {url} has no model {model!r}; --model takes {', '.join(ready)}")


def _known(client: triton.InferenceServerClient, url: str) -> Sequence[str]:
    """Of our own servers, which keep the repository's index for their launcher: the router's and its instances'."""
    try:
        return sorted({found.name for found in client.get_model_repository_index(client_timeout=TIMEOUT_S).models})
    except InferenceServerException:
        pass
    try:
        return [MODEL, *sorted(status(url, timeout_s=TIMEOUT_S)["instances"])]
    except TrtpdError:
        return [MODEL]
