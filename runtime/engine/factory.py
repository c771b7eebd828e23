"""From an engine directory to an Engine. Each engine's module, and what it needs, is imported only when
used."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from trtpd.build.manifest import EngineConfig, check_loadable, read_engine_config
from trtpd.errors import EngineError
from trtpd.runtime.engine.base import Engine
from trtpd.runtime.engine.group import Follower
from trtpd.runtime.engine.ranks import Ranks


def load_engine(directory: Path, *, pool_name: str, generation: str, ranks: Ranks | None = None) -> Engine:
    """Loads what `trtpd build` put into `directory`; its KV pool is `pool_name` of this `generation`. An engine of
    several ranks needs them: this is rank 0, and the others call `join_engine`.

    Raises EngineError if it can't be loaded here, CapacityError when /dev/shm has no room for the pool.
    """
    config, module = _open(directory)
    engine: Engine = module.load(config, directory, pool_name=pool_name, generation=generation, ranks=ranks)
    return engine


def join_engine(directory: Path, *, pool_name: str, generation: str, ranks: Ranks) -> Follower:
    """Loads the part of a rank other than the first. Raises as `load_engine`."""
    config, module = _open(directory)
    follower: Follower = module.join(config, directory, pool_name=pool_name, generation=generation, ranks=ranks)
    return follower


def _open(directory: Path) -> tuple[EngineConfig, ModuleType]:
    config = read_engine_config(directory)
    module = _MODULES.get(config.engine)
    if config.engine == "tensorrt_llm":
        raise EngineError(
            f"{directory} was built for tensorrt_llm, which is not in this version: build with engine: openvino"
        )
    if module is None:
        raise EngineError(
            f"{directory} was built for the engine {config.engine!r}; this version has "
            f"{', '.join(sorted(_MODULES))}: build it again with one of them"
        )
    check_loadable(config)
    return config, importlib.import_module(module)


_MODULES = {
    "openvino": "trtpd.runtime.engine.openvino",
    "emulated": "trtpd.runtime.engine.emulated",
}
"""Each has `load` and `join`."""
