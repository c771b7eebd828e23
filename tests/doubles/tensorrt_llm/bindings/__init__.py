"""The stand-in's extension module."""

from tensorrt_llm.bindings import executor

__all__ = ["executor"]
