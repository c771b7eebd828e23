"""Options that are lists with commas between."""

from __future__ import annotations

from trtpd.errors import InputError


def parts(text: str | None, option: str) -> tuple[str, ...]:
    """Of a list as it was typed; none of an option that wasn't given. Raises InputError for a list, or a place in it,
    that names nothing: a run with defaults would be another one than was asked for."""
    if text is None:
        return ()
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        fault = "names nothing" if not any(found) else "has an empty place"
        raise InputError(f"{option} is {text!r}, which {fault}; give a list with commas between, or leave {option} out")
    return found
