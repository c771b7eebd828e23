"""What arguments of the command line may be: each takes the text and raises ArgumentTypeError naming it."""

from __future__ import annotations

import argparse

from trtpd.errors import InputError


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def server(text: str) -> str:
    """HOST:PORT of a gRPC front."""
    from trtpd.runtime.serve.address import server_address

    try:
        return server_address(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or len(text) > 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def nats(text: str) -> float:
    return _number(text, 100.0, "a number of nats (0 or more)")


def seconds(text: str) -> float:
    return _number(text, 1e9, "a number of seconds (0 or more)")


def some_seconds(text: str) -> float:
    """More than none."""
    value = _number(text, 1e9, what := "a number of seconds above 0")
    if value == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _number(text: str, below: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < below:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value
