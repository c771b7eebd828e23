"""Where an offer goes that exists already: the decode instance that pulls it. Pure."""

from __future__ import annotations

import numpy as np

from trtpd.runtime.core import score
from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.instance import Instance
from trtpd.runtime.core.place import Rules
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.score import Work


def has_sink(request: Request, source: Instance, cluster: Cluster) -> bool:
    """Whether a decode instance serves now that could ever take what `source` offers, whether or not it has
    room."""
    cluster.settle()
    return cluster.groups[request.model][source.group_key].decode.can_hold(request.total_tokens)


def choose_sink(
    request: Request, source: Instance, cluster: Cluster, *, work: Work, rules: Rules, not_again: str | None
) -> Instance | None:
    """The best decode instance to pull an offer that exists already; None if none has room now.

    `not_again` is taken only if there is no other.
    """
    cluster.settle()
    attempt = request.running()
    table = cluster.groups[request.model][source.group_key].decode
    if not table.open:
        return None
    # An offer holds prefill's blocks, so it may take a place in the queue of a full batch.
    scores = score.decode(table, work)
    scores[table.room < request.total_tokens] = np.inf
    if source.hello.gpus:
        for row in np.flatnonzero(scores < np.inf).tolist():
            known_s = rules.links.known_s(source, table.instances[row], work.prompt_tokens)
            scores[row] += rules.weights.transfer_s * (known_s or 0.0)
    last: Instance | None = None
    for row in np.argsort(scores, kind="stable").tolist():
        sink: Instance = table.instances[row]
        if scores[row] == np.inf:
            break
        barred = sink.name in attempt.shunned or request.avoids(sink.name, cluster.now_s)
        if barred or (request.id, attempt.number) in sink.holds or not cluster.link_up(source.name, sink.name):
            continue
        if sink.name != not_again:
            return sink
        last = sink
    return last
