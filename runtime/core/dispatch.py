"""Lets waiting requests go: offers without a sink first, then new attempts, then arrivals in their fair order."""

from __future__ import annotations

from itertools import islice

from trtpd.runtime.core import place
from trtpd.runtime.core.books import Books
from trtpd.runtime.core.events import Submit, WorkKind
from trtpd.runtime.core.fair import Queue
from trtpd.runtime.core.lifecycle import AttemptRecord, Instant, State
from trtpd.runtime.core.recovery import Recovery
from trtpd.runtime.core.requests import Attempt, Request
from trtpd.runtime.core.score import TURN_S
from trtpd.runtime.core.view import rules_of, work_of

SETTLED_LATE = 32
"""Up to so many instances, what placement sees of them is brought up to date when it is looked at. With more that
would be a long wait for the one that looks."""


SEEN_AT_ONCE = 64
"""Of those that wait, so many are looked at after a change before any more are."""


class Dispatch:
    """Runs after each event, and does nothing unless room has changed since the last time."""

    def __init__(self, books: Books, recovery: Recovery, choose: place.Chooser) -> None:
        self._books = books
        self._recovery = recovery
        self._choose = choose
        self._looks_again = False

    def run(self) -> None:
        books = self._books
        waiting = len(books.backlog) or books.undelivered
        if waiting or len(books.cluster.instances) > SETTLED_LATE:
            books.settle()
        if not waiting:
            books.room_changed = False
        while books.room_changed:
            books.room_changed = False
            if books.undelivered:
                self._deliver()
            for model, queue in books.backlog.queues.items():
                if not queue.again or self._place_again(model, queue):
                    self._place_fresh(queue)

    def _deliver(self) -> None:
        """Offers hold prefill's blocks while they wait, so they go first."""
        for request in list(islice(self._books.undelivered.values(), self._books.policy.overtake + 1)):
            if request.id in self._books.undelivered:
                self._recovery.deliver(request)

    def _place_again(self, model: str, queue: Queue) -> bool:
        """New attempts, paced: a lost decode instance must not flood the prefill pool. False if the first waits for
        room so long that nobody else may take any."""
        books = self._books
        prefillers = sum(table.open for table in books.cluster.prefillers(model))
        places = books.policy.reprefills_per_instance * prefillers - books.reprefills
        skipped = 0
        while places > 0 and skipped <= books.policy.overtake:
            request = next(islice(queue.again.values(), skipped, None), None)
            if request is None:
                return True
            wait = self._place(request)
            if wait is None:
                places -= 1
            elif self._blocks_others(request, wait):
                return False
            else:
                skipped += 1
        return True

    def _place_fresh(self, queue: Queue) -> None:
        """From the front; where prompts of a kind wait only for those of their kind before them, the other kind is
        looked for further back."""
        most = SEEN_AT_ONCE
        while True:
            front = queue.next(most, starved_before_s=self._books.now_s - self._books.policy.starve_s)
            placed, goes_on = self._place_front(front, queue)
            if not goes_on or len(front) < most:
                return
            most = SEEN_AT_ONCE if placed else 8 * most

    def _place_front(self, front: list[Request], queue: Queue) -> tuple[int, bool]:
        """How many of these were placed, and whether others further back may still be. A few may overtake one that
        doesn't fit, until it has waited long; long ones that leave the way to others keep nobody back."""
        placed, skipped, aside = 0, 0, False
        in_line: set[bool] = set()
        for request in front:
            if request.short in in_line or (aside and self._aside(request)):
                continue
            wait = self._place(request)
            if wait is None:
                placed += 1
            elif wait is place.Wait.LINE:
                in_line.add(request.short)
                if queue.kinds <= in_line:
                    return placed, False
            elif wait is place.Wait.PAUSED and self._aside(request):
                aside = True
            elif self._blocks_others(request, wait) or skipped == self._books.policy.overtake:
                return placed, False
            else:
                skipped += 1
        return placed, True

    def _aside(self, request: Request) -> bool:
        return rules_of(self._books, request).leaves_way(request.prompt_tokens)

    def _blocks_others(self, request: Request, wait: place.Wait) -> bool:
        """One that waits for its turn does from the start: the others would take just that turn. It comes nearer by
        itself, so it is looked at again soon."""
        books = self._books
        if wait is place.Wait.TURN and not self._looks_again:
            self._looks_again = True
            books.timers.at(books.now_s + TURN_S / 2.0, self._look_again)
        return wait is place.Wait.TURN or request.blocks_others(books.now_s, books.policy.overtake_s)

    def _look_again(self) -> None:
        self._looks_again = False
        self._books.room_changed = True

    def _place(self, request: Request) -> place.Wait | None:
        """Submits it if there is a place; else says why not, and notes it if it waits for room."""
        books = self._books
        work, rules = work_of(books, request), rules_of(books, request)
        found = self._choose(request, books.cluster, work=work, rules=rules)
        if isinstance(found, place.Choice):
            self._submit(request, found, place.why(found, work))
            return None
        if found is place.Wait.NO_ROOM and request.blocked_since_s is None:
            request.blocked_since_s = books.now_s
        elif found is not place.Wait.NO_ROOM:
            request.blocked_since_s = None
        return found

    def _submit(self, request: Request, choice: place.Choice, why: str) -> None:
        books = self._books
        books.backlog.remove(request, served=True)
        attempt = self._new_attempt(request, choice, why)
        books.tally.placed[choice.reason] += 1
        source, sink = choice.prefill, choice.decode
        tokens, total = request.prompt_tokens, request.total_tokens
        if sink is None:
            attempt.prefill = books.reserve(request, source, "local", tokens=total, pending_tokens=tokens)
        else:
            attempt.prefill = books.reserve(request, source, "prefill", tokens=tokens, pending_tokens=tokens)
            attempt.decode = books.reserve(request, sink, "decode", tokens=total)
        if request.arrived.block_hashes:
            most = source.hello.kv_blocks
            books.cluster.prefixes.sent(source.name, request.arrived.block_hashes, most_blocks=most)
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

    def _new_attempt(self, request: Request, choice: place.Choice, why: str) -> Attempt:
        """Makes it the running one; all but the first are paced."""
        books = self._books
        request.attempts += 1
        if request.patience is not None:
            books.timers.cancel(request.patience)
        kind: WorkKind = "context_and_generation" if choice.decode is None else "context_only"
        record = AttemptRecord(
            number=request.attempts,
            kind=kind,
            prefill=choice.prefill.name,
            decode=None if choice.decode is None else choice.decode.name,
            why=why,
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
