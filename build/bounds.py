"""How large the numbers of a model may be, and that a configuration leaves out none of the checkpoint's layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trtpd.errors import CheckpointError

MOST_POSITIONS = 100_000_000
MOST_LAYERS = 1_000
MOST_TOKENS = 10_000_000
MOST_WIDE = 1_000_000
"""Widths and numbers of heads. Far above any model: what is beyond is a slip, and would take for ever."""


def refuse_further_layers(where: Path, names: Iterable[str], prefix: str, layers: int) -> None:
    """Raises CheckpointError if a tensor named `prefix`N. belongs to a layer that a model of `layers` layers lacks:
    leaving it out would silently make another model."""
    pattern = re.compile(re.escape(prefix) + r"(\d{1,9})\.")
    found = [int(match.group(1)) for name in names if (match := pattern.match(name))]
    if found and max(found) >= layers:
        raise CheckpointError(
            f"{where}: holds tensors of {max(found) + 1} layers, but its configuration says {layers} "
            "(num_hidden_layers); set it right, or download the model again"
        )
