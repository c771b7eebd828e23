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
    if not text.isdecimal() or text.strip("0") == "":
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    if len(text.lstrip("0")) > 12:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; it must have at most 12 digits")
    return int(text)


def nats(text: str) -> float:
    return _number(text, 100.0, "a number of nats (0 or more)")


def seconds(text: str) -> float:
    return _number(text, 1e9, "a number of seconds (0 or more)")


def some_seconds(text: str) -> float:
    """More than none."""
    return _above_0(text, 1e9, "a number of seconds above 0")


def some_milliseconds(text: str) -> float:
    """More than none."""
    return _above_0(text, 1e12, "a number of milliseconds above 0")


def _above_0(text: str, below: float, what: str) -> float:
    value = _number(text, below, what)
    if value == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _number(text: str, below: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    if value >= below:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; it must be below {below:g}")
    return value
