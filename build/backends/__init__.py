"""One backend for each engine that loads something: from name to Backend, imported when used."""

from __future__ import annotations

from trtpd.build.backends.base import Backend


def backend_of(engine: str) -> Backend | None:
    """The backend of an engine, None for one that loads nothing."""
    if engine == "openvino":
        from trtpd.build.backends.openvino import OpenVINOBackend

        return OpenVINOBackend()
    if engine == "tensorrt_llm":
        from trtpd.build.backends.tensorrt_llm.backend import TensorRTBackend

        return TensorRTBackend()
    return None
