"""Arguments of the LLM class, as models that refuse a key they don't know; and the class, which computes by trtpd."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from tensorrt_llm._api import API, VERSION, plain_default

LINE = tuple(int(part) for part in VERSION.split(".")[:2])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CudaGraphConfig(_Strict):
    """Not in api.json; as in the public source of llm_args.py."""

    batch_sizes: list[int] | None = None
    max_batch_size: int = Field(default=0, ge=0)
    enable_padding: bool = False


_SINCE = {"kv_transfer_timeout_ms": (1, 2), "kv_transfer_sender_future_timeout_ms": (1, 2)}
_TYPES = {
    "int": int,
    "bool": bool,
    "float": float,
    "str": str,
    "Optional[int]": int | None,
    "Optional[float]": float | None,
}


def _since(name: str, entry: dict[str, Any]) -> tuple[int, ...]:
    return _SINCE.get(name, (1, 3) if str(entry.get("since", "")).startswith("1.3") else (1, 0))


def _model(kind: str, *, base: type[BaseModel] = _Strict, **typed: Any) -> Any:
    fields: dict[str, Any] = {}
    for name, entry in API["llmapi"][kind]["fields"].items():
        if _since(name, entry) > LINE:
            continue
        annotation = typed.get(name, _TYPES.get(entry["type"], Any))
        required = entry.get("default") == "<required>"
        fields[name] = (annotation, ... if required else plain_default(entry))
    return create_model(kind, __base__=base, **fields)


_LOWER, _UPPER = Literal["default", "ucx", "nixl", "mpi"], Literal["DEFAULT", "UCX", "NIXL", "MPI"]
_WITH_MOONCAKE = Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"]
_BACKENDS: Any = _LOWER if LINE < (1, 1) else _UPPER if LINE < (1, 2) else _WITH_MOONCAKE

KvCacheConfig = _model("KvCacheConfig")
CacheTransceiverConfig = _model("CacheTransceiverConfig", backend=_BACKENDS | None)
_BaseLlmArgs = _model(
    "BaseLlmArgs", kv_cache_config=KvCacheConfig | None, cache_transceiver_config=CacheTransceiverConfig | None
)
TorchLlmArgs = _model("TorchLlmArgs", base=_BaseLlmArgs, cuda_graph_config=CudaGraphConfig | None)


def __getattr__(name: str) -> Any:
    """What needs more than this file, when it is asked for."""
    homes = {
        "LLM": "_llm",
        "RequestOutput": "_llm",
        "SamplingParams": "sampling_params",
        "DisaggregatedParams": "disaggregated_params",
    }
    if name not in homes:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"tensorrt_llm.{homes[name]}"), name)
