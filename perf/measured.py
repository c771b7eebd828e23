"""One workload measured on one side of a comparison, and the processes the sides live in.

Each side is a process of its own, kept to the same CPUs, with its model loaded; it answers one cell a line. Only one
side computes at a time: whoever asks waits for the answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, Self

import msgspec

from trtpd.errors import EngineError, TrtpdError

Kind = Literal["prefill", "decode"]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`batch` prompts of `tokens` tokens prefilled together, or `batch` sequences decoded together, each with a
    context of `tokens`."""

    kind: Kind
    tokens: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens}x{self.batch}"

    @property
    def tokens_per_run(self) -> int:
        """Tokens that one measured run brings forth: all of the prompts, or one for each sequence."""
        return self.tokens * self.batch if self.kind == "prefill" else self.batch


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one prefill or of one decode step; or what went wrong."""

    seconds: float = 0.0
    fault: str | None = None


Measure = Callable[[Cell], float]
"""Seconds of one run of a cell: of the whole prefill, or of one decode step."""


class Side:
    """A measuring process: `python -m MODULE SETUP`, which calls `answer`. Use it as a context manager."""

    def __init__(self, module: str, setup: msgspec.Struct) -> None:
        self._module = module
        self._command = [sys.executable, "-P", "-m", module, msgspec.json.encode(setup).decode()]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None, "opened with a pipe"
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def measure(self, cell: Cell) -> float:
        """See Measure. Raises EngineError if the side can't."""
        assert self._process.stdin is not None, "opened with a pipe"
        try:
            self._process.stdin.write(msgspec.json.encode(cell) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error
        return self._read().seconds

    def _read(self) -> Measured:
        assert self._process.stdout is not None, "opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        measured = msgspec.json.decode(line, type=Measured)
        if measured.fault is not None:
            raise EngineError(f"{self._module} could not measure: {measured.fault}")
        return measured

    def _gone(self) -> EngineError:
        return EngineError(f"{self._module} ended (status {self._process.wait()}) before it answered; see its output")


def answer(load: Callable[[], Measure], cores: Sequence[int]) -> int:
    """What a side's process does: keeps to `cores`, loads, says so, and answers each cell of standard input until it
    ends. What else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        try:
            if cores:
                os.sched_setaffinity(0, cores)
            measure = load()
            out.write(_line(Measured()))
            for line in sys.stdin.buffer:
                out.write(_line(Measured(seconds=measure(msgspec.json.decode(line, type=Cell)))))
        except (TrtpdError, OSError) as error:
            out.write(_line(Measured(fault=str(error))))
            return 1
    return 0


def _line(measured: Measured) -> bytes:
    return msgspec.json.encode(measured) + b"\n"
