"""Who may go before whom: what a placement must not have done to those that still wait."""

from __future__ import annotations

from collections.abc import Sequence

from trtpd.runtime.core.books import Books
from trtpd.runtime.core.events import Command, Submit
from trtpd.runtime.core.requests import Request


def check_order(books: Books, commands: Sequence[Command]) -> None:
    """Of requests placed for the first time: each has passed no more than may be overtaken, and nobody who has waited
    for room so long that nobody may."""
    first = [c for c in commands if isinstance(c, Submit) and c.attempt == 1 and c.request_id in books.requests]
    for submit in first:
        placed = books.requests[submit.request_id]
        queue = books.backlog.queues[placed.model]
        same = queue.classes[placed.arrived.priority]
        passed = [one for one in same if one.tag < placed.tag]
        assert len(passed) <= books.policy.overtake, f"{placed.id} has passed {len(passed)} of its class"
        if len(first) == 1 and books.now_s - placed.arrived_s <= books.policy.starve_s:
            lower = (queue.classes[level].first(1) for level in queue.classes if level < placed.arrived.priority)
            passed += [one for firsts in lower for one in firsts if _starves(books, one)]
        for one in passed:
            late = one.blocks_others(books.now_s, books.policy.overtake_s)
            assert not late, f"{placed.id} has passed {one.id}, which waits since {one.blocked_since_s} s"


def _starves(books: Books, request: Request) -> bool:
    return request.arrived_s < books.now_s - books.policy.starve_s
