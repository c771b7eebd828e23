"""One workload measured on one side of a comparison, and the processes the sides live in.

Each side is a process of its own, kept to the same CPUs, with its model loaded; it answers one cell a line. Only one
side computes at a time: whoever asks waits for the answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Literal, Self

import msgspec

from trtpd.errors import EngineError, TrtpdError

Kind = Literal["prefill", "decode", "transfer"]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`batch` prompts of `tokens` tokens prefilled together, or `batch` sequences decoded together, each with a
    context of `tokens`; or the KV of one prompt of `tokens` tokens handed over.

    A prefill may be of prompts behind `prefix_tokens` tokens each whose KV is there, and in steps in which `beside`
    sequences with a context of `context_tokens` decode.
    """

    kind: Kind
    tokens: int
    batch: int
    prefix_tokens: int = 0
    beside: int = 0
    context_tokens: int = 0

    @property
    def name(self) -> str:
        behind = f" behind {self.prefix_tokens}" if self.prefix_tokens else ""
        beside = f" beside {self.context_tokens}x{self.beside} decoding" if self.beside else ""
        return f"{self.kind} {self.tokens}x{self.batch}{behind}{beside}"

    @property
    def tokens_per_run(self) -> int:
        """Tokens that one measured run brings forth: all of the prompts, or one for each sequence."""
        return self.tokens * self.batch if self.kind == "prefill" else self.batch


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an engine in the terms of StepTimeModel, and what it took."""

    n_prefill: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    n_decode: int = 0
    decode_kv_tokens: int = 0
    seconds: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one prefill or of one decode step, and of the steps it took where they were asked for; or what went
    wrong."""

    seconds: float = 0.0
    fault: str | None = None
    steps: tuple[TimedStep, ...] = ()


Measure = Callable[[Cell], float | Measured]
"""Seconds of one run of a cell: of the whole prefill, or of one decode step."""


class Side:
    """A measuring process: `python -m MODULE SETUP`, which calls `answer`. Use it as a context manager.

    It is in a process group of its own: a Ctrl-C is this process's to take, and ends the other by the end of its input,
    when what it measures is done.
    """

    def __init__(
        self,
        module: str,
        setup: msgspec.Struct,
        environment: Mapping[str, str] | None = None,
        *,
        command: Sequence[str] = (),
        asks: Path | None = None,
    ) -> None:
        """`command` starts it another way. `asks`: the pipe (mkfifo) it reads cells from, where it can't have its
        standard input."""
        self._module = module
        self._command = command or [sys.executable, "-P", "-m", module, msgspec.json.encode(setup).decode()]
        self._environment = environment
        self._pipe = asks

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE if self._pipe is None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self._environment,
            process_group=0,
        )
        if self._pipe is not None:  # open for reading too, since a writer alone would wait for one
            self._asks: IO[bytes] = open(os.open(self._pipe, os.O_RDWR), "wb", buffering=0)
        else:
            assert self._process.stdin is not None, "opened with a pipe"
            self._asks = self._process.stdin
        try:
            self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):
            self._asks.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def measure(self, cell: Cell) -> float:
        """See Measure. Raises EngineError if the side can't."""
        return self.run(cell).seconds

    def run(self, cell: Cell) -> Measured:
        """As `measure`, with the steps if the side tells them."""
        try:
            self._asks.write(msgspec.json.encode(cell) + b"\n")
            self._asks.flush()
        except OSError as error:
            raise self._gone() from error
        return self._read()

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


def answer(load: Callable[[], Measure], cores: Sequence[int], *, asks: Path | None = None) -> int:
    """What a side's process does: keeps to `cores`, loads, says so, and answers each cell of standard input (or the
    pipe `asks`) until it ends. What else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        try:
            if cores:
                os.sched_setaffinity(0, cores)
            measure = load()
            out.write(_line(Measured()))
            with nullcontext(sys.stdin.buffer) if asks is None else asks.open("rb") as lines:
                for line in lines:
                    found = measure(msgspec.json.decode(line, type=Cell))
                    out.write(_line(found if isinstance(found, Measured) else Measured(seconds=found)))
        except (TrtpdError, OSError) as error:
            out.write(_line(Measured(fault=str(error))))
            return 1
    return 0


def _line(measured: Measured) -> bytes:
    return msgspec.json.encode(measured) + b"\n"
