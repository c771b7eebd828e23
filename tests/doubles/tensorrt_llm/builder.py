"""BuildConfig: what an engine is built for."""

from __future__ import annotations

import dataclasses
from typing import Any

from tensorrt_llm._api import API, plain_default

_FIELDS: dict[str, dict[str, Any]] = API["build_config_fields"]


def _make() -> type:
    names = [
        (name, Any, dataclasses.field(default=plain_default(entry)))
        for name, entry in _FIELDS.items()
    ]  # fmt: skip
    return dataclasses.make_dataclass("BuildConfig", names)


BuildConfig: Any = _make()

NOT_WRITTEN = ("dry_run", "visualize_network")
"""Fields that an engine's config.json doesn't have."""
