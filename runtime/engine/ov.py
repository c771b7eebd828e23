"""OpenVINO as this engine uses it: the paged-attention node of the version we know, compiled for the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from trtpd.errors import EngineError
from trtpd.kv_transfer.layout import KVDtype

WANTED_VERSION = "2026.4.1"


def paged_attention_op(openvino: ModuleType) -> Any:
    """The constructor of the paged-attention node. Its symbol is private and its inputs change between
    releases, so EngineError unless exactly WANTED_VERSION is installed."""
    found = str(openvino.__version__).partition("-")[0]
    if found != WANTED_VERSION:
        raise EngineError(
            f"openvino {found} is installed, and its paged attention may take other inputs than that of "
            f"{WANTED_VERSION}, which this version of trtpd needs: pip install openvino=={WANTED_VERSION}"
        )
    try:
        from openvino.op import _PagedAttentionExtension
    except ImportError as error:
        raise EngineError(
            f"this build of openvino {found} has no paged attention ({error}): install the one from PyPI, "
            f"pip install --force-reinstall openvino=={WANTED_VERSION}"
        ) from error
    return _PagedAttentionExtension


def cpu_capabilities(openvino: ModuleType) -> frozenset[str]:
    """What the CPU plugin computes with here, e.g. "FP32", "BF16", "INT8"."""
    return frozenset(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def compile_for_cpu(openvino: ModuleType, model: Any, *, threads: int, kv_dtype: KVDtype) -> Any:
    """Compiles for the CPU plugin. It computes in bf16 where the KV is bf16, else in f32: the two can't
    differ.

    Threads are not pinned one by one: the process keeps to its cores. Raises EngineError.

    Each model has a Core of its own, freed with it. A Core gives the thread that makes it a signal stack and puts
    the former one back when it goes: Cores freed in another order than last made, first freed leave a stack that is
    gone, and the next signal the process handles is a segmentation fault. So a process that handles signals holds
    one engine at a time, as a worker does. Sharing or keeping Cores is no way out: their executors outlive a failed
    step and run what is left of it (seen with 2026.4.1, also a segmentation fault).
    """
    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if kv_dtype == "bf16" else "f32",
        "KV_CACHE_PRECISION": kv_dtype,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    try:
        return openvino.Core().compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise EngineError(
            f"openvino can't compile this model for the CPU ({one_line(error)}); build this role again, and if that "
            "does not help report the model's config.json"
        ) from error


def one_line(error: Exception) -> str:
    """OpenVINO's messages are stacks of lines."""
    return " ".join(str(error).split())
