"""A stand-in for TensorRT's runtime: as much as opening an engine takes."""

from __future__ import annotations

from typing import Any

from tensorrt_llm.engine_file import read_engine

__version__ = "10.14.1"


class Logger:
    ERROR = 1

    def __init__(self, severity: int = ERROR) -> None:
        self.min_severity = severity


class ICudaEngine:
    def __init__(self, profiles: dict[str, list[list[list[int]]]]) -> None:
        self._profiles = profiles
        self.num_io_tensors = len(profiles)
        self.num_optimization_profiles = len(next(iter(profiles.values())))

    def get_tensor_name(self, index: int) -> str:
        return list(self._profiles)[index]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self._profiles[name][profile_index]]


class Runtime:
    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        """None for bytes that it can't read, as TensorRT does."""
        found = read_engine(serialized_engine)
        return ICudaEngine(found[0]["profiles"]) if found is not None else None
