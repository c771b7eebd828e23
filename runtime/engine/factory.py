"""From an engine directory to an Engine. Each engine's module, and what it needs, is imported only when
used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trtpd.build.manifest import EngineConfig, check_loadable, read_engine_config
from trtpd.errors import EngineError
from trtpd.runtime.engine.base import Engine


def load_engine(directory: Path, *, pool_name: str, generation: str) -> Engine:
    """Loads what `trtpd build` put into `directory`; its KV pool is `pool_name` of this `generation`.

    Raises EngineError if it can't be loaded here, CapacityError when /dev/shm has no room for the pool.
    """
    config = read_engine_config(directory)
    constructor = _CONSTRUCTORS.get(config.engine)
    if constructor is None:
        raise EngineError(
            f"{directory} was built for the engine {config.engine!r}; this version has "
            f"{', '.join(sorted(_CONSTRUCTORS))}: build it again with one of them"
        )
    if (config.tp, config.layout.tp, config.layout.pp) != (1, 1, 1):
        raise EngineError(
            f"{directory} was built for tp {config.tp} and pp {config.layout.pp}; an engine is one rank in "
            "this version: set tp: 1 and build again"
        )
    return constructor(config, directory, pool_name, generation)


def _openvino(config: EngineConfig, directory: Path, pool_name: str, generation: str) -> Engine:
    from trtpd.runtime.engine import openvino

    check_loadable(config)
    return openvino.load(config, directory, pool_name=pool_name, generation=generation)


def _emulated(config: EngineConfig, directory: Path, pool_name: str, generation: str) -> Engine:
    from trtpd.runtime.engine import emulated

    check_loadable(config)
    return emulated.load(config, directory, pool_name=pool_name, generation=generation)


def _tensorrt_llm(config: EngineConfig, directory: Path, pool_name: str, generation: str) -> Engine:
    raise EngineError(
        f"{directory} was built for tensorrt_llm, which is not in this version: build with engine: openvino"
    )


_CONSTRUCTORS: dict[str, Callable[[EngineConfig, Path, str, str], Engine]] = {
    "openvino": _openvino,
    "emulated": _emulated,
    "tensorrt_llm": _tensorrt_llm,
}
