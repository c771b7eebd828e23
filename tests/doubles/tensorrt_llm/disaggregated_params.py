"""DisaggregatedParams, with the fields that this release has."""

from __future__ import annotations

import dataclasses
from typing import Any

from tensorrt_llm._api import API, VERSION

LINE = tuple(int(part) for part in VERSION.split(".")[:2])
_FIELDS: dict[str, dict[str, Any]] = API["llmapi"]["DisaggregatedParams"]["fields"]
_SINCE = {"1.1+": (1, 1), "1.2/1.3 dev": (1, 3), "1.3 dev": (1, 3), "1.3+": (1, 3)}


def _post_init(self: Any) -> None:
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        if self.request_type not in _FIELDS["request_type"]["choices"]:
            raise ValueError(f"Unknown request type: {self.request_type}")


DisaggregatedParams: Any = dataclasses.make_dataclass(
    "DisaggregatedParams",
    [
        (name, Any, dataclasses.field(default=entry["default"]))
        for name, entry in _FIELDS.items()
        if _SINCE.get(entry.get("since", ""), (1, 0)) <= LINE
    ],
    namespace={"__post_init__": _post_init},
    slots=True,
    kw_only=True,
)
