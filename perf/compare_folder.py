"""A comparison's folder: every step leaves a file, so that a command that was cut short goes on.

FOLDER/
  plan.json         what is compared; another comparison needs another folder
  slo.json          the targets, fixed before any loaded run
  unloaded.json     whether the run they come from was disturbed
  tuning/ points/   records and figures of each run
  arms/             builds (weights linked), logs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from trtpd.build.files import write_whole
from trtpd.errors import InputError
from trtpd.perf.client import Run
from trtpd.perf.compare_arms import Variant
from trtpd.perf.comparison import Aside, Choice, PointFile
from trtpd.perf.records import Record, load_records, save_records

Kind = Literal["tuning", "points"]
"""Of a loaded run: a tuning's, or one that is compared."""

Stored = TypeVar("Stored", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Folder:
    """Its files. Nothing is written but by `remembered` and what is called `keep`."""

    path: Path

    def remembered(self, name: str, kind: type[Stored], find: Callable[[], Stored]) -> Stored:
        """What the file says, or what `find` finds, which is put there. Raises InputError for a file of another
        shape."""
        path = self.path / name
        if path.is_file():
            return read(path, kind)
        found = find()
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        return found

    def run_path(self, kind: Kind, variant: Variant, rate: float, repeat: int) -> Path:
        """Where a run's figures are; its records lie beside them."""
        return self.path / kind / f"{variant.folder}.{rate:g}.{repeat}.json"

    def run_file(self, kind: Kind, variant: Variant, rate: float, repeat: int) -> PointFile | None:
        """What is known of a run without its records; None if it was not made."""
        path = self.run_path(kind, variant, rate, repeat)
        return read(path, PointFile) if path.is_file() else None

    def records(self, kind: Kind, variant: Variant, file: PointFile) -> tuple[Record, ...]:
        """Of a run that is there."""
        path = self.run_path(kind, variant, file.rate, file.repeat).with_suffix(".jsonl.gz")
        return tuple(load_records(path)[1])

    def keep(self, kind: Kind, variant: Variant, file: PointFile, run: Run) -> None:
        """Records first: a run whose figures are there is whole."""
        path = self.run_path(kind, variant, file.rate, file.repeat)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        save_records(path.with_suffix(".jsonl.gz"), run.info, run.records)
        write_whole(path, msgspec.json.encode(file))

    def choice(self, arm: str) -> Choice | None:
        """What was chosen for an arm, if its tuning came to an end."""
        path = self._choice(arm)
        return read(path, Choice) if path.is_file() else None

    def keep_choice(self, choice: Choice) -> None:
        self._choice(choice.arm).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._choice(choice.arm), msgspec.json.encode(choice))

    def points(self, variant: Variant) -> Iterator[PointFile]:
        """All measured runs of a variant, by name."""
        for path in sorted((self.path / "points").glob(f"{variant.folder}.*.json")):
            yield read(path, PointFile)

    def tunings(self, variant: Variant) -> int:
        """How many tuning runs of a variant are there."""
        return sum(1 for _ in (self.path / "tuning").glob(f"{variant.folder}.*.json"))

    def interference(self, variant: Variant) -> tuple[Record, ...] | None:
        path = self._interference(variant)
        return tuple(load_records(path)[1]) if path.is_file() else None

    def keep_interference(self, variant: Variant, run: Run, aside: Aside) -> None:
        path = self._interference(variant)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_records(path, run.info, run.records)
        self.keep_aside(self.interference_name(variant), aside)

    def interference_name(self, variant: Variant) -> str:
        """Of its aside."""
        return f"arms/{variant.folder}.interference.json"

    def aside(self, name: str) -> Aside | None:
        path = self.path / name
        return read(path, Aside) if path.is_file() else None

    def keep_aside(self, name: str, aside: Aside) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(aside))

    def _interference(self, variant: Variant) -> Path:
        return self.path / "points" / f"{variant.folder}.interference.jsonl.gz"

    def _choice(self, arm: str) -> Path:
        return self.path / "tuning" / f"choice.{'-'.join(arm.replace(',', '').split())}.json"


def read(path: Path, kind: type[Stored]) -> Stored:
    """Raises InputError for a file that can't be read as that."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise InputError(f"{path}: can't be read ({error}); compare again into another folder, -o") from error
