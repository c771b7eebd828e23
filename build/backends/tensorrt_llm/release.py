"""Release lines of TensorRT-LLM: which one is meant, and what differs between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Mode = Literal["engine", "llm_api"]

DEFAULT_LINE = "1.2"
"""The last stable line with compiled engines, planned for where none is installed and none is asked for."""

COMPILED_LINES = ((1, 0), (1, 1), (1, 2))
LLM_API_LINES = ((1, 3), (1, 4))
_VERSION = re.compile(r"(\d+)\.(\d+)(?:[.a-z]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release of TensorRT-LLM. `line` is its first two numbers; `text` is as it was given."""

    text: str
    line: tuple[int, int]

    @property
    def known(self) -> bool:
        """Whether trtpd knows how to build for it."""
        return self.line in COMPILED_LINES + LLM_API_LINES

    @property
    def mode(self) -> Mode:
        """How roles are built: engines were dropped after 1.2."""
        return "llm_api" if self.line >= LLM_API_LINES[0] else "engine"

    @property
    def name(self) -> str:
        return f"{self.line[0]}.{self.line[1]}"

    @property
    def has_transfer_timeout(self) -> bool:
        """Whether its CacheTransceiverConfig knows kv_transfer_timeout_ms."""
        return self.line >= (1, 2)

    @property
    def transceivers(self) -> tuple[str, ...]:
        """The backends its CacheTransceiverConfig knows, in its spelling."""
        names = ("DEFAULT", "UCX", "NIXL", "MPI") + (("MOONCAKE",) if self.line >= (1, 2) else ())
        return tuple(self.spelled(name) for name in names)

    def spelled(self, transceiver: str) -> str:
        """A transceiver backend as this release's configuration spells it: 1.0 had them in lower case."""
        return transceiver.lower() if self.line < (1, 1) else transceiver.upper()


KNOWN_RELEASES = "1.0, 1.1 and 1.2 (compiled engines), 1.3 and 1.4 (LLM API)"


def parse_release(text: str) -> Release | None:
    """The release a version text means ("1.2", "1.2.1", "1.3.0rc5"), None if it is no version."""
    found = _VERSION.match(text.strip())
    return Release(text=text.strip(), line=(int(found[1]), int(found[2]))) if found else None


def choose_release(asked: str | None, installed: str) -> Release:
    """The release to build for: the one asked for, else the one installed ("none": none), else DEFAULT_LINE.
    A text that is no version gives line (0, 0), which isn't known."""
    text = asked or (installed if installed != "none" else DEFAULT_LINE)
    return parse_release(text) or Release(text=text, line=(0, 0))
