"""A workload: which requests, of which lengths, when. A value that can be saved and replayed byte for byte.

The file is JSON lines (compressed if its name ends in .gz): a header, then one line per request. A header's
`prompts` names the bytes of all prompts, so that a replay with other text is refused and not merely different.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trtpd.build.files import mend_of, write_whole
from trtpd.errors import InputError
from trtpd.perf.prompt_text import Segment, digest

FORMAT = 1
MOST_TOKENS = 10_000_000
"""Of one request: what is beyond is a slip, and its prompt would take for ever to write."""
MOST_S = 1e9


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Its instant is `at_s` after the start; or `think_s` after the end of request `after` (a session's
    next turn, whose prompt repeats the former ones); or, with neither, when a user of a closed loop is free.

    `kind` says what it stands for (chat, rag, ...), so that figures can be shown for each.
    """

    segments: tuple[Segment, ...]
    max_tokens: int
    kind: str
    at_s: float | None = None
    after: int | None = None
    think_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file. `concurrency`: users of a closed loop, None for an open one."""

    trtpd_workload: int
    name: str
    seed: int
    concurrency: int | None
    notes: tuple[str, ...]
    requests: int
    prompts: str


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order of their numbers. `notes` say what was done to lengths and times, for the report."""

    name: str
    seed: int
    asks: tuple[Ask, ...]
    concurrency: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises InputError for a request that could never start."""
        check_seed(self.seed)
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"workload {self.name}: a closed loop of {self.concurrency} users; it must be at least 1")
        for number, ask in enumerate(self.asks):
            where = f"workload {self.name}, request {number}"
            if ask.after is not None and not 0 <= ask.after < number:
                raise InputError(f"{where}: follows request {ask.after}; it must follow one of 0 to {number - 1}")
            if ask.after is None and ask.at_s is None and self.concurrency is None:
                raise InputError(f"{where}: has no instant; give at_s, or a concurrency for a closed loop")
            if ask.max_tokens < 1 or ask.prompt_tokens < 1:
                lengths = f"{ask.prompt_tokens} prompt tokens and {ask.max_tokens} to answer"
                raise InputError(f"{where}: {lengths}; both must be at least 1")
            if ask.total_tokens > MOST_TOKENS or any(segment.tokens < 0 for segment in ask.segments):
                raise InputError(f"{where}: its lengths are out of range (at most {MOST_TOKENS:,} tokens)")
            if not all(0.0 <= value <= MOST_S for value in (ask.at_s or 0.0, ask.think_s)):
                raise InputError(f"{where}: at_s and think_s must lie between 0 and {MOST_S:g} s")

    @property
    def open_loop(self) -> bool:
        return self.concurrency is None

    @property
    def duration_s(self) -> float:
        """The last instant that is known beforehand; 0 in a closed loop."""
        return max((ask.at_s for ask in self.asks if ask.at_s is not None), default=0.0)

    def turns(self) -> dict[int, list[int]]:
        """For each request that others follow: those."""
        found: dict[int, list[int]] = {}
        for number, ask in enumerate(self.asks):
            if ask.after is not None:
                found.setdefault(ask.after, []).append(number)
        return found


def check_seed(seed: int) -> None:
    """Raises InputError for a seed that random state can't be made of."""
    if not 0 <= seed < 1 << 63:
        raise InputError(f"the seed is {seed}; it must lie between 0 and {(1 << 63) - 1}")


def is_saved(name: str) -> bool:
    """Whether a workload of that name is a file that `save` wrote."""
    return name.endswith((".jsonl", ".jsonl.gz")) and not name.startswith("trace:")


def save(workload: Workload, path: Path) -> None:
    """Equal workloads give equal bytes. Raises InputError if it can't be written, or would not be known as a workload
    by its name."""
    if not is_saved(str(path)):
        raise InputError(f"{path}: a saved workload is known by its name; end it in .jsonl or .jsonl.gz")
    encode = msgspec.json.encode
    header = Header(
        trtpd_workload=FORMAT,
        name=workload.name,
        seed=workload.seed,
        concurrency=workload.concurrency,
        notes=workload.notes,
        requests=len(workload.asks),
        prompts=digest(ask.segments for ask in workload.asks),
    )
    lines = b"".join(encode(line) + b"\n" for line in (header, *workload.asks))
    try:
        if path.suffix == ".gz":
            buffer = io.BytesIO()
            with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as packed:
                packed.write(lines)
            lines = buffer.getvalue()
        write_whole(path, lines)
    except OSError as error:
        raise InputError(
            f"{path}: can't be written ({error.strerror}); {mend_of(error, 'name another file')}"
        ) from error


def load(path: Path) -> Workload:
    """Raises InputError for a file that is no workload, is cut short, or whose prompts this version would write
    otherwise."""
    lines = numbered_lines(path)
    if not lines:
        raise InputError(f"{path}: not a saved workload (it is empty); make one with `trtpd bench --save`")
    try:
        header = msgspec.json.decode(lines[0][1], type=Header)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{path}: not a saved workload (line {lines[0][0]}: {error}); make one with `trtpd bench --save`"
        ) from error
    if header.trtpd_workload != FORMAT:
        raise InputError(f"{path}: workload format {header.trtpd_workload}, this trtpd reads {FORMAT}; make it again")
    asks: list[Ask] = []
    for number, line in lines[1:]:
        try:
            asks.append(msgspec.json.decode(line, type=Ask))
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}: line {number} is not a request ({error})") from error
    if len(asks) != header.requests:
        raise InputError(f"{path}: holds {len(asks)} requests of {header.requests}; it was cut short, make it again")
    workload = Workload(
        name=header.name, seed=header.seed, asks=tuple(asks), concurrency=header.concurrency, notes=header.notes
    )
    if digest(ask.segments for ask in asks) != header.prompts:
        raise InputError(f"{path}: this trtpd would write other prompts than the one that saved it; make it again")
    return workload


def read_lines(path: Path) -> list[bytes]:
    """All lines that are not empty, unpacked if the name ends in .gz. Raises InputError."""
    return [line for _, line in numbered_lines(path)]


def numbered_lines(path: Path) -> list[tuple[int, bytes]]:
    """Those lines and their places in the file, from 1 on."""
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: can't be read ({reason})") from error
    return [(number, line) for number, line in enumerate(raw.splitlines(), start=1) if line.strip()]


def closed_loop(asks: Sequence[Ask]) -> tuple[Ask, ...]:
    """The same requests without instants of their own."""
    return tuple(msgspec.structs.replace(ask, at_s=None) for ask in asks)
