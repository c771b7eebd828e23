"""The address of a server as users give it, HOST:PORT, checked before anything dials it: gRPC takes a port modulo 65536
and answers a slip in its own words."""

from __future__ import annotations

import re

from trtpd.errors import InputError

_ADDRESS = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})|\[[0-9A-Fa-f:.%a-z]+\]):([0-9]{1,5})")
EXAMPLE = "127.0.0.1:8001"


def server_address(text: str) -> str:
    """`text` as it is. Raises InputError, saying what is wrong, unless it is HOST:PORT with a port of 1 to 65535."""
    scheme, found, rest = text.partition("://")
    if found:
        shown = rest.partition("/")[0] or EXAMPLE
        raise InputError(f"{text!r} has {scheme}:// in front; give HOST:PORT of the gRPC front alone, such as {shown}")
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise InputError(
            f"{text!r} is not the address of a server; give HOST:PORT of its gRPC front, such as {EXAMPLE}"
        )
    if not 0 < int(match[1]) <= 65535:
        raise InputError(f"{text!r} has port {match[1]}; a port is 1 to 65535")
    return text
