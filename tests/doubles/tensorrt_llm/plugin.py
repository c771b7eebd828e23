"""PluginConfig: what kernels an engine is built with."""

from __future__ import annotations

import argparse
from typing import Any

from tensorrt_llm._api import API, plain_default

FIELDS: dict[str, dict[str, Any]] = API["plugin_config_fields"]


class PluginConfig:
    """Fields by name. "enable" and "disable" mean True and False (None for a dtype); unknown names are ignored."""

    def __init__(self, **values: Any) -> None:
        self._values = {name: plain_default(entry) for name, entry in FIELDS.items()}
        for name, value in values.items():
            if name in FIELDS:
                self._values[name] = _meant(name, value)

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> PluginConfig:
        return cls(**vars(namespace))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in FIELDS:
            raise AttributeError(name)
        return self._values[name]

    def set(self, name: str, value: Any) -> None:
        assert name in FIELDS, name
        self._values[name] = _meant(name, value)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)


def _meant(name: str, value: Any) -> Any:
    switch = FIELDS[name]["type"] in ("bool", "Optional[bool]")
    if value == "enable":
        return True
    if value == "disable":
        return False if switch else None
    return value
