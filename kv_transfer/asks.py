"""What a sink asks a source that answers from a thread, whatever carries the messages."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

Index = Annotated[int, Meta(ge=0, le=1 << 40)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Status(enum.IntEnum):
    """How a source answers."""

    OK = 0
    NOT_HELD = 1
    OTHER_GENERATION = 2
    OTHER_LAYOUT = 3
    BAD_REQUEST = 4


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First request: OK if the source is of this generation and layout."""

    generation: Annotated[str, Meta(max_length=256)]
    fingerprint: Annotated[str, Meta(max_length=256)]


class Renew(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Renews a lease: OK or NOT_HELD."""

    request_id: Number
    attempt: Number


class Check(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """OK with the present epoch of every block of the hold, as 64-bit numbers, or NOT_HELD."""

    request_id: Number
    attempt: Number
