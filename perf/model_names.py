"""Which models a Triton server has, for who named one that it has not."""

from __future__ import annotations

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from trtpd.errors import TrtpdError
from trtpd.runtime.serve.client import MODEL, status

TIMEOUT_S = 5.0


def model_names(url: str) -> list[str]:
    """By its repository index; `trtpd serve` keeps that to itself, and is asked for its status. Empty where neither is
    told."""
    return _ready_in_index(url) or _in_status(url)


def _ready_in_index(url: str) -> list[str]:
    client = triton.InferenceServerClient(url)
    try:
        listed = client.get_model_repository_index(client_timeout=TIMEOUT_S).models
    except InferenceServerException:
        return []
    finally:
        client.close()
    return sorted({model.name for model in listed if model.state == "READY"})


def _in_status(url: str) -> list[str]:
    try:
        return [MODEL, *sorted(status(url, timeout_s=TIMEOUT_S)["instances"])]
    except (TrtpdError, ValueError, KeyError, TypeError):  # another server's `pd` may answer anything
        return []
