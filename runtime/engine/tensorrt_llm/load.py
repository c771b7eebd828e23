"""From an engine directory that was built for TensorRT-LLM to an engine, or to one rank of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpd.build.backends.tensorrt_llm.release import parse_release
from trtpd.build.machine import installed_version
from trtpd.build.manifest import EngineConfig, TensorRTConfig
from trtpd.errors import EngineError
from trtpd.runtime.engine.group import check_group
from trtpd.runtime.engine.ranks import Ranks
from trtpd.runtime.engine.tensorrt_llm.backend import Backend, translated
from trtpd.runtime.engine.tensorrt_llm.compiled import CompiledBackend, import_bindings, make_executor
from trtpd.runtime.engine.tensorrt_llm.engine import TensorRTEngine
from trtpd.runtime.engine.tensorrt_llm.llm_api import LlmBackend


def load(
    config: EngineConfig, directory: Path, *, pool_name: str, generation: str, ranks: Ranks | None = None
) -> TensorRTEngine:
    """The engine; in a group this is rank 0. Raises EngineError."""
    del pool_name, generation
    check_group(config, ranks)
    trt = settings_of(config)
    version = installed_version("tensorrt_llm")
    check_release(trt, version)
    backend: Backend
    if trt.mode == "llm_api":
        backend = LlmBackend.load(config, directory, version=version)
    else:
        bindings = import_bindings()
        executor = make_executor(bindings, config, directory)
        try:
            backend = CompiledBackend(bindings, executor, version=version)
        except BaseException:
            executor.shutdown()
            raise
    return TensorRTEngine(config, backend, version=version)


def join(config: EngineConfig, directory: Path, *, pool_name: str, generation: str, ranks: Ranks) -> ExecutorRank:
    """A rank other than the first. Raises EngineError."""
    del pool_name, generation
    check_group(config, ranks)
    check_release(settings_of(config), installed_version("tensorrt_llm"))
    return ExecutorRank(make_executor(import_bindings(), config, directory))


class ExecutorRank:
    """A rank other than the first: it computes inside `shutdown()`, which returns when the leader's executor has shut
    down."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._ended = False

    def run(self) -> None:
        """See RankFollower."""
        self._ended = True
        with translated("a rank"):
            self._executor.shutdown()

    def close(self) -> None:
        """See RankFollower."""
        if not self._ended:
            self.run()


def settings_of(config: EngineConfig) -> TensorRTConfig:
    """Raises EngineError for a config.json of another engine."""
    if config.tensorrt_llm is None:
        raise EngineError(f"config.json of the {config.role} engine has no tensorrt_llm section: build this role again")
    return config.tensorrt_llm


def check_release(trt: TensorRTConfig, version: str) -> None:
    """Raises EngineError unless the installed release is of the line the role was built for."""
    release = parse_release(version)
    if release is None or release.name != trt.release or release.mode != trt.mode:
        raise EngineError(
            f"this role was built for TensorRT-LLM {trt.release} ({trt.mode}), and {version} is installed: run it in "
            "the image it was built in, or build it again here"
        )
