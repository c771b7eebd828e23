"""Lets waiting requests go: offers without a sink first, then new attempts, then arrivals."""

from __future__ import annotations

from collections import OrderedDict

from trtpd.runtime.core import place
from trtpd.runtime.core.books import Books
from trtpd.runtime.core.events import Submit, WorkKind
from trtpd.runtime.core.lifecycle import AttemptRecord, Instant, State
from trtpd.runtime.core.recovery import Recovery
from trtpd.runtime.core.requests import Attempt, Request, nth


class Dispatch:
    """Runs after each event, and does nothing unless room has changed since the last time."""

    def __init__(self, books: Books, recovery: Recovery) -> None:
        self._books = books
        self._recovery = recovery

    def run(self) -> None:
        books = self._books
        while books.room_changed:
            books.room_changed = False
            self._deliver()
            for model in list(books.backlog.queues):
                queue = books.backlog.queues[model]
                if not queue.again or self._place_from(queue.again, self._paced_places(model)):
                    self._place_from(queue.fresh, None)

    def _deliver(self) -> None:
        """Offers hold prefill's blocks while they wait, so they go first."""
        waiting = 0
        while waiting <= self._books.policy.overtake:
            request = nth(self._books.undelivered, waiting)
            if request is None:
                return
            if not self._recovery.deliver(request):
                waiting += 1
            else:
                assert request.id not in self._books.undelivered, "delivered, and still waiting for a sink"

    def _paced_places(self, model: str) -> int:
        """How many new attempts may enter prefill now: a lost decode instance must not flood the prefill
        pool."""
        books = self._books
        instances = books.cluster.usable_prefillers(model, books.now_s)
        return books.policy.reprefills_per_instance * len(instances) - books.reprefills

    def _place_from(self, queue: OrderedDict[int, Request], places: int | None) -> bool:
        """Places from the front; a few may overtake one that doesn't fit, until it has waited long. False if
        the front waits for room so long that nobody else may take any."""
        books = self._books
        skipped = 0
        while places is None or places > 0:
            request = nth(queue, skipped)
            if request is None:
                return True
            found = self._choose(request)
            if isinstance(found, place.Choice):
                self._submit(request, found)
                places = None if places is None else places - 1
                continue
            if found is place.Wait.NO_INSTANCE and skipped == 0:
                return True
            if found is place.Wait.NO_ROOM and self._must_not_overtake(request):
                return False
            skipped += 1
            if skipped > books.policy.overtake:
                return True
        return True

    def _must_not_overtake(self, request: Request) -> bool:
        now_s, policy = self._books.now_s, self._books.policy
        if request.blocked_since_s is None:
            request.blocked_since_s = now_s
        return now_s - request.blocked_since_s >= policy.overtake_s

    def _choose(self, request: Request) -> place.Choice | place.Wait:
        books = self._books
        return place.choose(
            request,
            books.cluster,
            weights=books.policy.weights,
            placed_per_batch=books.policy.placed_per_batch,
            now_s=books.now_s,
            rng=books.rng,
        )

    def _submit(self, request: Request, choice: place.Choice) -> None:
        books = self._books
        books.backlog.remove(request)
        attempt = self._new_attempt(request, choice)
        source, sink = choice.prefill, choice.decode
        tokens, total = request.prompt_tokens, request.total_tokens
        if sink is None:
            attempt.prefill = books.reserve(request, source, "local", tokens=total, pending_tokens=tokens)
        else:
            attempt.prefill = books.reserve(request, source, "prefill", tokens=tokens, pending_tokens=tokens)
            attempt.decode = books.reserve(request, sink, "decode", tokens=total)
        attempt.prefill.sent = True
        books.send(
            Submit(
                instance=source.name,
                request_id=request.id,
                attempt=attempt.number,
                kind=attempt.kind,
                journal=tuple(request.journal),
            )
        )

    def _new_attempt(self, request: Request, choice: place.Choice) -> Attempt:
        """Makes it the running one; all but the first are paced."""
        books = self._books
        request.attempts += 1
        kind: WorkKind = "context_and_generation" if choice.decode is None else "context_only"
        record = AttemptRecord(
            number=request.attempts,
            kind=kind,
            prefill=choice.prefill.name,
            decode=None if choice.decode is None else choice.decode.name,
            why=choice.why,
        )
        attempt = Attempt(
            number=request.attempts,
            kind=kind,
            base=len(request.journal),
            prompt_tokens=request.prompt_tokens,
            record=record,
            paced=request.attempts > 1,
        )
        books.reprefills += attempt.paced
        request.attempt, request.state = attempt, State.PREFILLING
        request.blocked_since_s = None
        request.timeline.attempts.append(record)
        request.timeline.mark(Instant.PLACED, books.now_s)
        return attempt
