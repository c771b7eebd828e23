"""From an engine directory to an Engine. Each engine's module, and what it needs, is imported only when
used."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from trtpd.build.manifest import EngineConfig, check_loadable, read_engine_config
from trtpd.errors import EngineError
from trtpd.runtime.engine.base import Engine, RankFollower
from trtpd.runtime.engine.ranks import Ranks


def load_engine(directory: Path, *, pool_name: str, generation: str, ranks: Ranks | None = None) -> Engine:
    """Loads what `trtpd build` put into `directory`; its KV pool is `pool_name` of this `generation`. An engine of
    several ranks needs them: this is rank 0, and the others call `join_engine`.

    Raises EngineError if it can't be loaded here, CapacityError when /dev/shm has no room for the pool.
    """
    config, module = _open(directory)
    engine: Engine = module.load(config, directory, pool_name=pool_name, generation=generation, ranks=ranks)
    return engine


def join_engine(directory: Path, *, pool_name: str, generation: str, ranks: Ranks) -> RankFollower:
    """Loads the part of a rank other than the first. Raises as `load_engine`."""
    config, module = _open(directory)
    follower: RankFollower = module.join(config, directory, pool_name=pool_name, generation=generation, ranks=ranks)
    return follower


def _open(directory: Path) -> tuple[EngineConfig, ModuleType]:
    config = read_engine_config(directory)
    module = _MODULES.get(config.engine)
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
    "tensorrt_llm": "trtpd.runtime.engine.tensorrt_llm.load",
}
"""Each has `load` and `join`."""
