"""Which models a Triton server has: what a wrong name could have been."""

from __future__ import annotations

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from trtpd.errors import InputError

TIMEOUT_S = 5.0


def check_model(url: str, model: str) -> None:
    """Raises InputError for a model that the server at HOST:PORT doesn't have, with those that it has. A server that
    can't be asked is left to whoever asks it next."""
    client = triton.InferenceServerClient(url)
    try:
        index = client.get_model_repository_index(client_timeout=TIMEOUT_S)
    except InferenceServerException:
        return
    finally:
        client.close()
    names = sorted({found.name for found in index.models})
    if model not in names:
        raise InputError(
            f"the server at {url} has no model {model!r}; --model takes {', '.join(names) or 'none there'}"
        )
