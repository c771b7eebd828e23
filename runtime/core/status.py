"""The router's state as plain data, for `trtpd status` and metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trtpd.runtime.core.books import Books
from trtpd.runtime.core.cluster import Instance


def snapshot(books: Books) -> dict[str, Any]:
    """Walks all instances and requests; everything in it is str, int, float, bool, None, list or dict."""
    states = Counter(request.state.value for request in books.requests.values())
    tally = books.tally
    return {
        "now_s": books.now_s,
        "instances": [instance_view(instance, books.now_s) for instance in books.cluster.instances.values()],
        "requests": dict(states),
        "queued": len(books.backlog),
        "undelivered": len(books.undelivered),
        "reprefills": books.reprefills,
        "links_down": [
            {"source": source, "sink": sink, "for_s": until_s - books.now_s}
            for (source, sink), until_s in books.cluster.links_down.items()
            if until_s > books.now_s
        ],
        "counters": dict(tally.counts),
        "finished": dict(tally.finished),
        "failed": dict(tally.failed),
        "refused": dict(tally.refused),
        "retries": dict(tally.retries),
        "faults": [{"at_s": fault.at_s, "code": fault.code, "text": fault.text} for fault in tally.faults],
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
        "kv_blocks": hello.kv_blocks,
        "kv_blocks_free": load.kv_blocks_free,
        "kv_blocks_held": load.kv_blocks_held,
        "kv_blocks_promised": instance.committed_blocks,
        "strangers": load.strangers,
        "stalled": load.stalled,
        "refused": load.refused,
        "losses": len(instance.losses_s),
        "transports": list(hello.transports),
    }
