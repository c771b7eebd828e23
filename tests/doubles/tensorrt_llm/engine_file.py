"""Engine files of the stand-in: a mark, a JSON header (version, sm, profiles), and the rank's weights as they were
in the checkpoint (safetensors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARK = b"TRTLLM-STAND-IN\n"


def write_engine(path: Path, weights: Path, header: dict[str, Any]) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(MARK + len(raw).to_bytes(8, "little") + raw + weights.read_bytes())


def read_engine(raw: bytes) -> tuple[dict[str, Any], bytes] | None:
    """(header, safetensors bytes), None if it isn't such a file."""
    if not raw.startswith(MARK):
        return None
    start = len(MARK) + 8
    length = int.from_bytes(raw[len(MARK) : start], "little")
    return json.loads(raw[start : start + length]), raw[start + length :]
