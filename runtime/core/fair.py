"""Requests that wait for a place: by priority class, fair between tenants, and who is next.

Within a class start-time fair queueing: each tenant's requests get virtual start times spaced by their cost over the
tenant's weight, and the smallest goes first. So a tenant gets its share however much another one sends, and one that
was silent starts at the present, not with a credit. Classes are served highest first, but for a request that has
waited so long that its class would starve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from trtpd.runtime.core.requests import Request

Tag = tuple[float, int]
"""(virtual start, number): the fair order."""

TENANTS_KEPT = 4096


class PriorityClass:
    """Fresh requests of one priority."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tags: list[Tag] = []
        self._members: list[Request] = []
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._number = 0
        self.shorts = 0
        self.tenants: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    def first(self, most: int) -> list[Request]:
        return self._members[:most]

    def start_of(self, tenant: str) -> float:
        """The virtual start of that tenant's next request."""
        return max(self._virtual, self._finish.get(tenant, 0.0))

    def ahead_of(self, tenant: str) -> Iterator[Request]:
        """Requests that would go before that tenant's next one."""
        end = bisect_left(self._tags, (self.start_of(tenant), self._number + 1))
        return islice(self._members, end)

    def add(self, request: Request, cost: float) -> None:
        tenant = request.arrived.tenant
        start = self.start_of(tenant)
        self._finish[tenant] = start + cost / self._weights.get(tenant, 1.0)
        self._number += 1
        request.tag = (start, self._number)
        index = bisect_left(self._tags, request.tag)
        self._tags.insert(index, request.tag)
        self._members.insert(index, request)
        self.tenants[tenant] += 1
        self.shorts += request.short
        if len(self._finish) > TENANTS_KEPT:
            self._finish = {name: finish for name, finish in self._finish.items() if finish > self._virtual}

    def remove(self, request: Request, *, served: bool) -> None:
        """`served`: it goes to an instance, so virtual time moves on to its start."""
        index = bisect_left(self._tags, request.tag)
        assert self._members[index] is request, "the queue is out of order"
        del self._tags[index], self._members[index]
        if served:
            self._virtual = max(self._virtual, request.tag[0])
        tenant = request.arrived.tenant
        self.shorts -= request.short
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def last_of(self, tenant: str) -> Request | None:
        """The request of that tenant that would be served last."""
        return next((request for request in reversed(self._members) if request.arrived.tenant == tenant), None)


class Queue:
    """Requests of one model: new attempts first, oldest first; then fresh ones by class and fairness."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.again: OrderedDict[int, Request] = OrderedDict()
        self.classes: dict[int, PriorityClass] = {}
        self.tokens = 0
        self._weights = weights

    def __len__(self) -> int:
        return len(self.again) + sum(map(len, self.classes.values()))

    def __iter__(self) -> Iterator[Request]:
        yield from self.again.values()
        yield from self.fresh()

    def fresh(self) -> Iterator[Request]:
        for priority in sorted(self.classes, reverse=True):
            yield from self.classes[priority]

    @property
    def kinds(self) -> set[bool]:
        """Whether the prompts of its fresh requests are short: what there is of both kinds."""
        found = set()
        for members in self.classes.values():
            if members.shorts:
                found.add(True)
            if members.shorts < len(members):
                found.add(False)
        return found

    def of_class(self, priority: int) -> PriorityClass:
        """It stays when it is empty, with what its tenants have had: there are as many as priorities."""
        found = self.classes.get(priority)
        if found is None:
            found = self.classes[priority] = PriorityClass(self._weights)
        return found

    def next(self, most: int, *, starved_before_s: float) -> list[Request]:
        """The next `most` fresh requests. The first of a class goes before higher classes if it came before
        `starved_before_s`."""
        if len(self.classes) == 1:
            return next(iter(self.classes.values())).first(most)
        found: list[Request] = []
        starved: list[Request] = []
        for priority in sorted(self.classes, reverse=True):
            first = self.classes[priority].first(most)
            if first and found and first[0].arrived_s < starved_before_s:
                starved.append(first.pop(0))
            found += first
        return (sorted(starved, key=lambda request: request.arrived_s) + found)[:most]

    def tokens_ahead(self, priority: int, tenant: str, *, most_tokens: int | None = None) -> int:
        """Prompt tokens that would be served before a new request of that class and tenant; only of prompts of at most
        `most_tokens`, if that is given."""
        ahead: list[Iterable[Request]] = [self.again.values()]
        for level, members in self.classes.items():
            if level > priority:
                ahead.append(members)
            elif level == priority:
                ahead.append(members.ahead_of(tenant))
        lengths = (request.prompt_tokens for requests in ahead for request in requests)
        return sum(tokens for tokens in lengths if most_tokens is None or tokens <= most_tokens)


class Backlog:
    """The queues of all models. A request is in it exactly while its state is QUEUED."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.queues: dict[str, Queue] = {}
        self._weights = weights
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for queue in self.queues.values():
            yield from queue

    def add(self, request: Request, cost: float) -> None:
        """`cost`: the work it asks for, in tokens, as far as it counts against its tenant's share."""
        queue = self.queues.get(request.model)
        if queue is None:
            queue = self.queues[request.model] = Queue(self._weights)
        if request.attempts:
            queue.again[request.id] = request
        else:
            queue.of_class(request.arrived.priority).add(request, cost)
        queue.tokens += request.prompt_tokens
        self._length += 1

    def remove(self, request: Request, *, served: bool = False) -> None:
        queue = self.queues[request.model]
        if request.attempts:
            del queue.again[request.id]
        else:
            queue.of_class(request.arrived.priority).remove(request, served=served)
        queue.tokens -= request.prompt_tokens
        self._length -= 1

    def tokens_of(self, model: str) -> int:
        """Prompt tokens that wait."""
        queue = self.queues.get(model)
        return queue.tokens if queue else 0

    def pushed_out_for(self, model: str, priority: int, tenant: str) -> Request | None:
        """Whose place in a full queue a new request of `tenant` takes: the last one of a lower class, or of the
        tenant that holds most by its weight if that is clearly more. None: its own kind fills the queue."""
        queue = self.queues.get(model)
        if queue is None:
            return None
        for level in sorted(queue.classes):
            members = queue.classes[level]
            if level > priority or not members:
                continue
            share = {name: count / self._weights.get(name, 1.0) for name, count in members.tenants.items()}
            heaviest = max(share, key=lambda name: (share[name], name))
            mine = (members.tenants[tenant] + 1) / self._weights.get(tenant, 1.0)
            if level < priority or share[heaviest] > mine:
                return members.last_of(heaviest)
        return None
