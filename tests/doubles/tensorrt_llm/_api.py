"""api.json, and what it means. Standard library only: any Python may run the stand-in's trtllm-build."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

API: dict[str, Any] = json.loads((Path(__file__).resolve().parents[1] / "api.json").read_text())
VERSION = os.environ.get("TRTPD_DOUBLE_VERSION", "1.2.1")
SM = int(os.environ.get("TRTPD_DOUBLE_SM", "90"))


def device_count() -> int:
    """GPUs of the stand-in: those CUDA_VISIBLE_DEVICES names."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([part for part in named.split(",") if part.strip()])


def plain_default(entry: dict[str, Any]) -> Any:
    """A field's default; one that is an object of another class is None here."""
    default = entry.get("default")
    return None if isinstance(default, str) and default.endswith("()") else default
