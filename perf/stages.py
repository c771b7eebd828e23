"""Where requests spend their time, each part a mean over the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtpd.perf.records import Record, ServerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Parts of the mean time to the first token (ms), as the client saw it: their sum is that mean."""

    requests: int
    parts_ms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """What was waited for behind the prefills: mean over all `requests`, over those that were `moved` (None without
    any), and as a share of the moved ones' prefills."""

    requests: int
    moved: int
    mean_ms: float
    moved_ms: float | None
    share_of_prefill: float | None


def first_token(records: Sequence[Record]) -> FirstToken | None:
    """None where the server told nothing. Requests it told nothing of are left out of all parts alike."""
    told = [(record.ttft_s, record.server) for record in records if record.server is not None and record.ttft_s]
    if not told:
        return None
    count = len(told)
    ttft_ms = 1e3 * sum(ttft_s for ttft_s, _ in told) / count
    queue_ms = 1e3 * sum(times.queue_s or 0.0 for _, times in told) / count
    prefill_ms = 1e3 * sum(_prefill_s(times) for _, times in told) / count
    rest_ms = max(0.0, ttft_ms - queue_ms - prefill_ms)
    return FirstToken(requests=count, parts_ms={"queue": queue_ms, "prefill": prefill_ms, "front and client": rest_ms})


def _prefill_s(times: ServerTimes) -> float:
    """Where nothing is handed off the server tells no prefill of its own: all but the queue is it."""
    if times.prefill_s is not None:
        return times.prefill_s
    return max(0.0, (times.ttft_s or 0.0) - (times.queue_s or 0.0))


def handed_off(records: Sequence[Record]) -> HandOff:
    """Of the requests whose times the server told."""
    told = [record.server for record in records if record.server is not None]
    moved = [times for times in told if times.transfer_bytes]
    waited_s = sum(times.exposed_s or 0.0 for times in moved)
    prefill_s = sum(times.prefill_s or 0.0 for times in moved)
    return HandOff(
        requests=len(told),
        moved=len(moved),
        mean_ms=1e3 * waited_s / len(told) if told else 0.0,
        moved_ms=1e3 * waited_s / len(moved) if moved else None,
        share_of_prefill=waited_s / prefill_s if prefill_s > 0.0 else None,
    )
