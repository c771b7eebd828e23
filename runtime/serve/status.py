"""What `trtpd status` shows: the router's snapshot in a stable shape, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

INSTANCE_FIELDS = (
    "role",
    "state",
    "running",
    "waiting",
    "queued_tokens",
    "kv_blocks",
    "kv_blocks_free",
    "kv_blocks_held",
    "kv_blocks_cached",
    "preemptions",
    "kv_blocks_promised",
    "strangers",
    "stalled",
    "refused",
    "losses",
    "host",
    "generation",
    "transports",
    "step_s",
    "step_tokens",
    "slowness",
    "quarantined_for_s",
    "sequences",
    "left_tokens",
)


def status_of(
    router: Mapping[str, Any], *, busy_s: Mapping[str, float], becoming: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`router` is RouterCore.snapshot(); `busy_s` says for each registered instance how long its step has run;
    `becoming` the role of each that is on its way into another.

    `requests` of an instance are those it holds something of, ended ones that it has not let go of included. `faults`
    went wrong and were dealt with; `events` are what the router did by design: rungs of the ladder, proposals.
    """
    counters = dict(router["counters"])
    for outcome in ("finished", "failed", "refused", "retries", "placed", "shed", "moves"):
        counters |= {f"{outcome}_{reason}": number for reason, number in router[outcome].items()}
    return {
        "requests_in_flight": sum(router["requests"].values()),
        "requests": dict(router["requests"]),
        "queued": router["queued"],
        "queues": list(router["queues"]),
        "ladder": dict(router["ladder"]),
        "offered": dict(router["offered"]),
        "undelivered": router["undelivered"],
        "instances": {
            view["name"]: {name: view[name] for name in INSTANCE_FIELDS}
            | {"requests": view["in_flight"] + view["closing"], "busy_s": busy_s.get(view["name"])}
            | {"becoming": (becoming or {}).get(view["name"])}
            for view in router["instances"]
        },
        "links_down": list(router["links_down"]),
        "counters": counters,
        "faults": _notes(router["faults"], router["now_s"]),
        "events": _notes(router["events"], router["now_s"]),
    }


def _notes(notes: Iterable[Mapping[str, Any]], now_s: float) -> list[dict[str, Any]]:
    return [{"ago_s": round(now_s - note["at_s"], 1), "code": note["code"], "what": note["text"]} for note in notes]
