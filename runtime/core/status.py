"""The router's state as plain data, for `trtpd status` and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trtpd.runtime.core.books import Books
from trtpd.runtime.core.instance import Instance
from trtpd.runtime.core.rebalance import Rebalancer
from trtpd.runtime.core.tally import Note


def snapshot(books: Books, rebalancers: Mapping[str, Rebalancer]) -> dict[str, Any]:
    """Walks all instances and requests; everything in it is str, int, float, bool, None, list or dict."""
    states = Counter(request.state.value for request in books.requests.values())
    tally = books.tally
    return {
        "now_s": books.now_s,
        "instances": [instance_view(instance, books.now_s) for instance in books.cluster.instances.values()],
        "requests": dict(states),
        "queued": len(books.backlog),
        "queues": queue_views(books),
        "ladder": ladder_view(books),
        "undelivered": len(books.undelivered),
        "reprefills": books.reprefills,
        "links_down": [
            {"source": source, "sink": sink, "for_s": until_s - books.now_s}
            for (source, sink), until_s in books.cluster.links_down.items()
            if until_s > books.now_s
        ],
        "offered": {model: offered_view(books, found) for model, found in rebalancers.items()},
        "counters": {**tally.counts, "output_tokens": tally.output_tokens},
        "finished": dict(tally.finished),
        "failed": dict(tally.failed),
        "refused": dict(tally.refused),
        "retries": dict(tally.retries),
        "placed": dict(tally.placed),
        "shed": dict(tally.shed),
        "moves": dict(tally.moves),
        "rungs": dict(tally.rungs),
        "faults": note_views(tally.faults),
        "events": note_views(tally.events),
    }


def note_views(notes: Iterable[Note]) -> list[dict[str, Any]]:
    return [{"at_s": note.at_s, "code": note.code, "text": note.text} for note in notes]


def ladder_view(books: Books) -> dict[str, Any]:
    ladder = books.ladder
    return {
        "rung": int(ladder.rung),
        "name": ladder.rung.name.lower(),
        "reason": ladder.reason,
        "for_s": 0.0 if ladder.since_s is None else books.now_s - ladder.since_s,
        "pressure": ladder.pressure.value,
        "pressure_reason": ladder.pressure.reason,
        "ups": ladder.ups,
        "downs": ladder.downs,
    }


def queue_views(books: Books) -> list[dict[str, Any]]:
    """One per model that has had one: how many wait, by class and tenant, and how long the oldest has."""
    return [
        {
            "model": model,
            "again": len(queue.again),
            "tokens": queue.tokens,
            "by_priority": {str(priority): len(members) for priority, members in queue.classes.items()},
            "by_tenant": dict(sum((members.tenants for members in queue.classes.values()), Counter())),
            "oldest_s": max((books.now_s - request.arrived_s for request in queue), default=0.0),
        }
        for model, queue in books.backlog.queues.items()
    ]


def offered_view(books: Books, found: Rebalancer) -> dict[str, Any]:
    found.offered.decay(books.now_s)
    proposal = found.last
    return {
        "prompt_tokens_per_s": found.offered.prompt_tokens_per_s,
        "output_tokens_per_s": found.offered.output_tokens_per_s,
        "attained": found.offered.attained,
        "proposal": None if proposal is None else f"{proposal.kind} {proposal.role}: {proposal.why}",
    }


def instance_view(instance: Instance, now_s: float) -> dict[str, Any]:
    hello, load = instance.hello, instance.load
    closing = sum(hold.closing for hold in instance.holds.values())
    return {
        "name": hello.instance,
        "role": hello.role,
        "state": instance.state(now_s),
        "quarantined_for_s": max(0.0, instance.quarantined_until_s - now_s),
        "model": hello.model,
        "fingerprint": hello.fingerprint,
        "host": hello.host,
        "generation": hello.generation,
        "in_flight": len(instance.holds) - closing,
        "closing": closing,
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": instance.queued_tokens,
        "step_s": load.step_s,
        "step_tokens": load.step_tokens,
        "slowness": instance.factor,
        "sequences": instance.sequences,
        "context_tokens": instance.context_tokens,
        "left_tokens": instance.left_tokens,
        "flows": instance.flows,
        "kv_blocks": hello.kv_blocks,
        "kv_blocks_free": load.kv_blocks_free,
        "kv_blocks_held": load.kv_blocks_held,
        "kv_blocks_cached": load.cached_blocks,
        "preemptions": load.preemptions,
        "kv_blocks_promised": instance.committed_blocks,
        "strangers": load.strangers,
        "stalled": load.stalled,
        "refused": load.refused,
        "losses": len(instance.losses_s),
        "transports": list(hello.transports),
    }
