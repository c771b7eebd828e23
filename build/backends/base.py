"""What the builder asks of a backend: the part of a build that knows what one engine loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtpd.build.checkpoint import Checkpoint
from trtpd.build.manifest import EngineConfig

Progress = Callable[[str, int, int], None]
"""(stage, done, total) in bytes; total is 0 where it isn't known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One role to write: what its engine loads goes into `directory`, which holds its config.json already.
    `key` names that content, `digest` the model's weights; `former` is the role's directory in the build that
    is there, None if there is none."""

    config: EngineConfig
    directory: Path
    key: str
    digest: str
    former: Path | None = None


class Backend(Protocol):
    """Makes what an engine loads. Two engine directories with equal keys hold the same, but for their settings."""

    def key(self, digest: str, config: EngineConfig) -> str:
        """What names the content for a model of that digest and such settings."""

    def found_key(self, directory: Path, config: EngineConfig) -> str | None:
        """The key of what an engine directory holds for an engine like `config`, None if it isn't whole."""

    def write(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path, progress: Progress) -> None:
        """Writes all jobs. `work` is a folder on the same disk, absent or with what an earlier try left; the
        builder removes it when the build is in place. Raises BuildError, CheckpointError, OSError."""

    def link(self, source: Path, config: EngineConfig, directory: Path) -> None:
        """Puts the content of the engine directory `source` into `directory`, under new settings. Raises OSError."""

    def steps(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path) -> list[str]:
        """What `write` would do, for people: one line each, commands as they would be run. Writes nothing."""
