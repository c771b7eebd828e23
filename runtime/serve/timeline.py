"""A request's timeline as clients see it: the core's record turned into durations, as JSON and for people."""

from __future__ import annotations

import msgspec

from trtpd.errors import ServeError
from trtpd.runtime.core.lifecycle import AttemptRecord, Instant, Timeline


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One placement. `outcome` is "delivered", or why it was given up."""

    prefill: str
    decode: str | None
    why: str
    outcome: str


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """`ms` is the time of the copying itself. `exposed_ms` is how long the client waited for the KV once the prefill
    was done: for what was still to be copied, and for its turn behind other transfers, so it may be more than `ms`.
    KV of `present_tokens` tokens was at its destination already and did not move."""

    bytes: int
    chunks: int
    ms: float
    exposed_ms: float
    path: str
    present_tokens: int = 0


class TimelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in ms, None where the request never came so far.

    `ttft_ms` runs from arrival to the first token; `prefill_ms` is the part of it in which the prompt was
    computed; `second_token_ms` is the gap behind the first token, which carries the hand-off; `tpot_ms` is
    the mean of all gaps. KV of `cached_tokens` of the prompt was found in a prefix cache, so that it was not computed.
    `preemptions`: how often the answer gave its KV blocks to others and was computed anew.
    """

    finish: str
    prompt_tokens: int
    output_tokens: int
    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    second_token_ms: float | None
    tpot_ms: float | None
    total_ms: float | None
    transfer: Transfer | None
    attempts: tuple[Attempt, ...]
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def retries(self) -> int:
        return max(0, len(self.attempts) - 1)


def report(record: Timeline, *, finish: str, second_token_s: float | None) -> TimelineReport:
    """`second_token_s` is the instant at which the token at output index 1 went out."""
    at = record.instants
    first_s, last_s = at.get(Instant.FIRST_TOKEN), at.get(Instant.LAST_TOKEN)
    arrived_s = at.get(Instant.ARRIVED)
    gaps = record.output_tokens - 1
    whole_ms = _ms(first_s, last_s)
    return TimelineReport(
        finish=finish,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        queue_ms=_ms(arrived_s, at.get(Instant.PREFILL_BEGIN, at.get(Instant.PLACED))),
        prefill_ms=_ms(at.get(Instant.PREFILL_BEGIN), first_s),
        ttft_ms=_ms(arrived_s, first_s),
        second_token_ms=_ms(first_s, second_token_s),
        tpot_ms=whole_ms / gaps if whole_ms is not None and gaps > 0 else None,
        total_ms=_ms(arrived_s, last_s),
        transfer=_transfer(record.attempts),
        attempts=tuple(
            Attempt(prefill=a.prefill, decode=a.decode, why=a.why, outcome=a.outcome) for a in record.attempts
        ),
        cached_tokens=_cached_tokens(record),
        preemptions=sum(attempt.preemptions for attempt in record.attempts),
    )


def to_json(timeline: TimelineReport) -> str:
    return msgspec.json.encode(timeline).decode()


def from_json(text: str) -> TimelineReport:
    """Raises ServeError for a text that is no timeline of this version."""
    try:
        return msgspec.json.decode(text, type=TimelineReport)
    except msgspec.MsgspecError as error:
        raise ServeError(f"the server's timeline can't be read ({error}); is it another version?") from error


def render(timeline: TimelineReport) -> str:
    """A few lines for people."""
    who = timeline.attempts[-1] if timeline.attempts else None
    lines = [
        f"{timeline.prompt_tokens} prompt tokens, {timeline.output_tokens} answer tokens, ended by {timeline.finish}",
        f"  queue        {_text(timeline.queue_ms)}",
        f"  prefill      {_text(timeline.prefill_ms)}"
        + (f"   on {who.prefill}" if who else "")
        + (f", {timeline.cached_tokens} tokens from its prefix cache" if timeline.cached_tokens else ""),
    ]
    if timeline.transfer is not None:
        t = timeline.transfer
        lines.append(
            f"  transfer     {_text(t.ms)}   {t.bytes / 1e6:.2f} MB in {t.chunks} chunks over {t.path}; "
            f"waited for {t.exposed_ms:.1f} ms after the prefill"
        )
    lines += [
        f"  first token  {_text(timeline.ttft_ms)}   after arrival",
        f"  second token {_text(timeline.second_token_ms)}   after the first",
        f"  later tokens {_text(timeline.tpot_ms)}   each" + (f", on {who.decode or who.prefill}" if who else ""),
    ]
    if timeline.preemptions:
        lines.append(f"  preempted    {timeline.preemptions:6d} times")
    lines += [f"  given up     {a.prefill} → {a.decode or a.prefill}: {a.outcome}" for a in timeline.attempts[:-1]]
    return "\n".join(lines)


def _cached_tokens(record: Timeline) -> int:
    """Of the user's prompt. A later attempt finds tokens of the answer as well, which are part of its own prompt."""
    found = record.attempts[-1].cached_tokens if record.attempts else 0
    return min(found, max(0, record.prompt_tokens - 1))


def _transfer(attempts: list[AttemptRecord]) -> Transfer | None:
    moved = [attempt for attempt in attempts if attempt.bytes_moved or attempt.present_tokens]
    if not moved:
        return None
    last = moved[-1]
    return Transfer(
        bytes=last.bytes_moved,
        chunks=last.chunks,
        ms=last.transfer_s * 1e3,
        exposed_ms=last.exposed_s * 1e3,
        path=last.path,
        present_tokens=last.present_tokens,
    )


def _ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else (end_s - start_s) * 1e3


def _text(ms: float | None) -> str:
    return "        –" if ms is None else f"{ms:6.1f} ms"
