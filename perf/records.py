"""What a client saw of each request: instants, counts, how it ended. Everything else is computed from these."""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from trtpd.build.files import ELSEWHERE, mend_of
from trtpd.errors import InputError
from trtpd.perf.workload import read_lines

State = Literal["finished", "refused", "failed", "cancelled", "unmeasured"]
LONGEST_GAPS_SHARE = 0.1


class ServerTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server's timeline says of a request, in seconds; None where it never came so far."""

    queue_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    second_token_s: float | None = None
    tpot_s: float | None = None
    transfer_s: float | None = None
    exposed_s: float | None = None
    transfer_bytes: int = 0
    transfer_path: str = ""
    retries: int = 0
    prefill: str = ""
    decode: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that was offered. Instants are seconds after the start of the run.

    Durations begin at `scheduled_s`, when the request was due, not at `sent_s`: a client that falls behind must not
    make its server look better. `at_s` are the instants at which responses with tokens arrived, `tokens` how many each
    brought. `prompt_tokens` are those asked for, `served_prompt_tokens` those the server counted. `tokens_guessed`: the
    server didn't say how many tokens the answer has, so each response counts as one.

    An answer that came in one response has no pace: its tokens' instants are not known, which is not 0 s between them.
    """

    number: int
    kind: str
    scheduled_s: float
    prompt_tokens: int
    max_tokens: int
    state: State
    sent_s: float | None = None
    ended_s: float | None = None
    reason: str = ""
    message: str = ""
    at_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    served_prompt_tokens: int | None = None
    tokens_guessed: bool = False
    server: ServerTimes | None = None

    @property
    def output_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def lateness_s(self) -> float | None:
        """By how much the client sent it late."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return self.at_s[0] - self.scheduled_s if self.at_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None below two responses."""
        count = self.output_tokens
        return (self.at_s[-1] - self.at_s[0]) / (count - 1) if count > 1 and len(self.at_s) > 1 else None

    @property
    def in_one_response(self) -> bool:
        """All of an answer of several tokens, or of who knows how many where more than one was asked for."""
        several = self.output_tokens > 1 or (self.tokens_guessed and self.max_tokens > 1)
        return several and len(self.at_s) == 1

    @property
    def second_token_s(self) -> float | None:
        """The gap behind the first token, which carries the hand-off."""
        gaps = self.gaps_s()
        return gaps[0] if gaps else None

    @property
    def longest_gaps_s(self) -> float | None:
        """Mean of the longest tenth of the gaps: Mooncake's TBT."""
        gaps = sorted(self.gaps_s(), reverse=True)
        worst = gaps[: math.ceil(len(gaps) * LONGEST_GAPS_SHARE)]
        return sum(worst) / len(worst) if worst else None

    @property
    def total_s(self) -> float | None:
        return self.at_s[-1] - self.scheduled_s if self.at_s else None

    def gaps_s(self) -> list[float]:
        """The time before each token but the first. Tokens of one response came at one instant: between them is 0.
        Empty if there was one response only."""
        if len(self.at_s) < 2:
            return []
        found: list[float] = []
        before: float | None = None
        for at_s, tokens in zip(self.at_s, self.tokens, strict=True):
            if before is not None:
                found.append(at_s - before)
            found += [0.0] * (tokens - 1)
            before = at_s
        return found


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file of records. `offered_until_s`: requests due later were never offered."""

    trtpd_records: int
    workload: str
    seed: int
    open_loop: bool
    offered_until_s: float
    interrupted: bool
    notes: tuple[str, ...] = ()


FORMAT = 1


def save_records(path: Path, info: RunInfo, records: Iterable[Record]) -> None:
    """JSON lines, compressed; equal runs give equal bytes. Raises InputError if they can't be written."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as packed:
        for line in (info, *records):
            packed.write(msgspec.json.encode(line) + b"\n")
    try:
        path.write_bytes(buffer.getvalue())
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror}); {mend_of(error, ELSEWHERE)}") from error


def load_records(path: Path) -> tuple[RunInfo, list[Record]]:
    """Raises InputError for a file that is none."""
    lines: Sequence[bytes] = read_lines(path)
    try:
        info = msgspec.json.decode(lines[0], type=RunInfo)
        if info.trtpd_records != FORMAT:
            raise InputError(f"{path}: records of format {info.trtpd_records}, this trtpd reads {FORMAT}")
        return info, [msgspec.json.decode(line, type=Record) for line in lines[1:]]
    except (IndexError, msgspec.MsgspecError) as error:
        raise InputError(f"{path}: not a file of records ({error})") from error
