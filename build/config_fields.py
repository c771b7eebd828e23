"""JSON objects of a model folder, and typed access to their keys: errors name the file, the key and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtpd.build.bounds import MOST_WIDE
from trtpd.build.decoding import json_object
from trtpd.errors import CheckpointError

_MOST_NUMBER = 1e30


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder. Raises CheckpointError if missing, unreadable, not JSON or not an object."""
    try:
        return json_object(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: missing; give a Hugging Face folder with its {path.name}, or download the model again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error}); check its owner and mode") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; it may be truncated: download it again") from error


class Fields:
    """The keys of an object. A key that is null counts as absent. Every method raises CheckpointError."""

    def __init__(self, config: dict[str, Any], where: Path, prefix: str = "") -> None:
        self._config = config
        self._where = where
        self._prefix = prefix

    def wrong(self, key: str, rule: str) -> CheckpointError:
        """What to raise for a key whose value breaks `rule`."""
        return CheckpointError(f"{self._where}: {self._prefix}{key} is {json.dumps(self._config.get(key))}; {rule}")

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null, for those where that isn't the same as absent."""
        return key in self._config and self._config[key] is None

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST_WIDE) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"it must be a whole number of at least {least}")
        if value > most:
            raise self.wrong(key, f"it must be at most {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_NUMBER:
            raise self.wrong(key, f"it must be a number above 0 and at most {_MOST_NUMBER:g}")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        return self.number(key) if self.has(key) else default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "it must be text")
        return value

    def listed(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "it must be a list of names")
        return value

    def part(self, key: str) -> tuple[dict[str, Any], Fields]:
        """The object under a key, empty if there is none."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "it must be an object")
        return value, Fields(value, self._where, f"{self._prefix}{key}.")

    def must_be(self, key: str, wanted: Any) -> None:
        """Takes the one value, or none."""
        if self.has(key) and self._config[key] != wanted:
            raise self.wrong(key, f"only {json.dumps(wanted)} is supported")

    def must_lack(self, key: str) -> None:
        if self.has(key):
            raise self.wrong(key, "a model with it isn't supported")

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        return value
