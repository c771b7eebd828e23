"""What happens when something breaks: losses, rejects, failed transfers, lapsed leases, links, flapping
instances."""

from __future__ import annotations

from dataclasses import replace

from trtpd.runtime.core import sinks
from trtpd.runtime.core.books import Books
from trtpd.runtime.core.delivery import Delivery
from trtpd.runtime.core.events import Drained, Hello, LinkDown, Lost, Quarantine, Rejected, TransferFailed
from trtpd.runtime.core.instance import Hold, Instance
from trtpd.runtime.core.lifecycle import State
from trtpd.runtime.core.requests import Attempt, Request

COSTLY_REJECTS = frozenset({"engine_failed", "internal"})
"""Codes of work that began and failed: doing it again elsewhere costs a retry, so that a request which breaks
every engine it meets ends. Other rejects mean "not here, not now" and are free."""


_COUNTS = ("kv_blocks", "tokens_per_block", "max_seq_tokens", "max_batch", "prefill_tokens_per_s")
_IDENTITY = ("role", "model", "fingerprint", "pairing_key", "kv_blocks", "tokens_per_block")


def _faults_of(hello: Hello, old: Instance | None) -> list[str]:
    """What is wrong with it: numbers that can't be, or another identity in the same generation."""
    wrong = [f"{name} {getattr(hello, name)}" for name in _COUNTS if not getattr(hello, name) > 0]
    if old is not None and old.hello.generation == hello.generation:
        for name in _IDENTITY:
            was, now = getattr(old.hello, name), getattr(hello, name)
            if was != now:
                wrong.append(f"{name} {now} where its generation had {was}")
    return wrong


class Recovery:
    """Every way back from a failure ends in one of three: pull again, a new attempt, or a clear end."""

    def __init__(self, books: Books, delivery: Delivery) -> None:
        self._books = books
        self._delivery = delivery

    def hello(self, event: Hello) -> None:
        """An instance registers. With a new generation, all that its former one held is gone."""
        books = self._books
        old = books.cluster.instances.get(event.instance)
        wrong = _faults_of(event, old)
        if wrong:
            text = f"{event.instance} registers with {', '.join(wrong)}; ignored"
            books.tally.fault(books.now_s, "bad_hello", text)
            return
        if old is not None and old.healthy and old.hello.generation != event.generation:
            self._lose(old, "it restarted")
        instance = books.cluster.register(event)
        books.ladder.begin(books.now_s)
        ghosts, instance.ghosts = instance.ghosts, []
        for ghost in ghosts:
            hold = replace(ghost, closing=False, seen=False)
            books.cluster.reserve(instance, hold)
            books.close(hold)
        self._spare_the_last(instance)
        books.room_changed = True

    def lost(self, event: Lost) -> None:
        instance = self._books.cluster.current(event.instance, event.generation)
        if instance is not None:
            self._lose(instance, event.reason)

    def _lose(self, instance: Instance, reason: str) -> None:
        books = self._books
        books.tally.fault(books.now_s, "instance_lost", f"{instance.name} was lost: {reason}")
        books.tally.counts["losses"] += 1
        planned = instance.draining
        holds = books.cluster.lose(instance)
        books.room_changed = True
        for hold in holds:
            if not hold.closing:
                self._hold_lost(books.requests[hold.request_id], hold)
        if not planned:
            self._count_loss(instance)
        self._spare_the_last(instance)

    def _hold_lost(self, request: Request, hold: Hold) -> None:
        """One placement died with its instance. The other side, if any, is told at once."""
        attempt = request.running()
        text = f"{hold.instance} was lost"
        if hold.side != "decode":
            attempt.prefill = None
            begun = hold.side == "local" or attempt.offer is not None
            self.retry(request, f"{hold.side}_lost", "engine_failed", text, costs=begun, loss=True)
            return
        attempt.decode = None
        if attempt.joined:
            self.retry(request, "decode_lost", "engine_failed", text, loss=True)
        elif hold.sent:
            self._pull_again(request, "decode_lost", "engine_failed", text)

    def _count_loss(self, instance: Instance) -> None:
        """An instance that is lost again and again gets no work for a while, longer each time."""
        books, policy = self._books, self._books.policy
        losses = instance.losses_s
        losses.append(books.now_s)
        while losses[0] < books.now_s - policy.flap_window_s:
            losses.popleft()
        if len(losses) < policy.flap_losses:
            return
        pause_s = min(policy.quarantine_s * 2**instance.quarantines, policy.quarantine_max_s)
        reason = f"lost {len(losses)} times within {policy.flap_window_s:g} s"
        until_s = books.now_s + pause_s
        books.cluster.quarantine(instance, until_s)
        books.tally.counts["quarantines"] += 1
        books.tally.fault(books.now_s, "quarantine", f"{instance.name}: {reason}; no work for {pause_s:g} s")
        books.say(Quarantine(instance=instance.name, until_s=until_s, reason=reason))
        books.timers.at(until_s, lambda: self._quarantine_over(instance))

    def _quarantine_over(self, instance: Instance) -> None:
        present = self._books.cluster.instances.get(instance.name)
        if present is not None:
            self._books.cluster.refresh(present)
            self._books.room_changed = True

    def _spare_the_last(self, like: Instance) -> None:
        """A quarantine must not take away the last instance of a role: a flapping one is better than none."""
        books = self._books
        alike = [
            instance
            for instance in books.cluster.of_model(like.hello.model)
            if instance.hello.role == like.hello.role and instance.healthy and not instance.draining
        ]
        if alike and not any(instance.usable(books.now_s) for instance in alike):
            for instance in alike:
                books.cluster.bar(instance, books.now_s)
                books.tally.fault(
                    books.now_s, "quarantine", f"{instance.name}: back, nothing else is {like.hello.role}"
                )

    def link_down(self, event: LinkDown) -> None:
        books = self._books
        until_s = books.now_s + books.policy.link_avoid_s
        books.cluster.links_down[(event.source, event.sink)] = until_s
        books.tally.fault(books.now_s, "link_down", f"{event.source} can't reach {event.sink}")
        books.wake_for_room(until_s)

    def rejected(self, request: Request, hold: Hold, event: Rejected) -> None:
        """Not taken, or given up. The instance has the last word; the request looks elsewhere, or here
        later."""
        books, attempt = self._books, request.running()
        books.release(hold)
        if hold.side == "decode":
            attempt.decode = None
        else:
            attempt.prefill = None
        text = f"{hold.instance} rejected it ({event.code}): {event.reason}"
        if event.permanent:
            books.end(request, State.FAILED, event.code, text)
            return
        self._pause(request, hold.instance)
        costs = event.code in COSTLY_REJECTS
        if hold.side == "decode" and not attempt.joined:
            self._pull_again(request, "rejected", event.code, text, counts=costs)
        else:
            self.retry(request, "rejected", event.code, text, costs=costs)

    def _pause(self, request: Request, instance: str) -> None:
        books, policy = self._books, self._books.policy
        pause_s = min(policy.reject_pause_s * 2**request.rejects, policy.reject_pause_max_s)
        request.rejects = min(request.rejects + 1, 16)
        request.avoid[instance] = books.now_s + pause_s
        books.wake_for_room(books.now_s + pause_s)

    def transfer_failed(self, request: Request, hold: Hold, event: TransferFailed) -> None:
        books, attempt = self._books, request.running()
        if attempt.joined:
            books.tally.fault(books.now_s, "protocol", f"{hold.instance}: TransferFailed after TransferDone, ignored")
            return
        books.release(hold)
        attempt.decode = None
        self._transfer_lost(request, hold.instance, event.code, event.reason, retryable=event.retryable)

    def stalled(self, request: Request, attempt: Attempt) -> None:
        """The transfer's time is up and its sink has not said anything: it is stopped from here."""
        if request.attempt is not attempt or not attempt.pulling or attempt.decode is None:
            return
        sink, attempt.decode = attempt.decode, None
        attempt.shunned.add(sink.instance)
        self._books.close(sink)
        self._transfer_lost(request, sink.instance, "transfer_failed", "it stalled", retryable=True)

    def _transfer_lost(self, request: Request, sink: str, code: str, reason: str, *, retryable: bool) -> None:
        books = self._books
        source = request.running().record.prefill
        text = f"transfer {source}→{sink} failed ({code}): {reason}"
        books.tally.fault(books.now_s, code, f"request {request.id}: {text}")
        books.tally.counts["transfer_failures"] += 1
        request.transfer_failures += 1
        if retryable:
            self._pull_again(request, "transfer_failed", code, text)
        else:
            self.retry(request, "transfer_failed", code, text)

    def drained(self, request: Request, hold: Hold, _event: Drained) -> None:
        """Given back without being asked to: a lapsed lease of prefill, or an instance that let go of its
        work."""
        books, attempt = self._books, request.running()
        text = f"{hold.instance} gave it up"
        if hold.side == "prefill":
            books.end_prefill(request)
            books.release(hold)
            attempt.prefill = None
            if attempt.seal_sent and attempt.pulling:
                return  # the sink may have it all: its word counts, and the stall timer if it has none
            self.retry(request, "lease_lost", "lease_lost", f"the lease on {hold.instance} ended before its pull")
            return
        books.release(hold)
        if hold.side == "local":
            attempt.prefill = None
        else:
            attempt.decode = None
        if hold.side == "decode" and not attempt.joined:
            self._pull_again(request, "given_up", "engine_failed", text)
        else:
            self.retry(request, "given_up", "engine_failed", text)

    def gap(self, request: Request, instance: str, first_index: int) -> None:
        """A token never arrived. The attempt can't be trusted; another continues from the journal."""
        text = f"{instance} sent token {first_index} where {len(request.journal)} was due"
        self._books.tally.fault(self._books.now_s, "token_gap", f"request {request.id}: {text}")
        self.retry(request, "token_gap", "internal", text)

    def _pull_again(self, request: Request, reason: str, code: str, text: str, *, counts: bool = True) -> None:
        """The offer stands, its sink is gone: another pull of it if the source's engine can, else a new
        attempt.

        `counts`: as one of the pulls an offer may cost.
        """
        books, attempt = self._books, request.running()
        source = attempt.prefill
        spent = counts and attempt.repulls >= books.policy.repulls
        if source is None or attempt.offer is None or spent or not self._can_repull(attempt, source):
            self.retry(request, reason, code, text, costs=counts)
            return
        attempt.repulls += 1 if counts else 0
        attempt.chunks_sent, attempt.seal_sent, attempt.begun = 0, False, False
        if attempt.stall is not None:
            books.timers.cancel(attempt.stall)
        books.tally.retries[f"repull_{reason}"] += 1
        self.deliver(request)

    def _can_repull(self, attempt: Attempt, source: Hold) -> bool:
        instance = self._books.cluster.instances[source.instance]
        return instance.hello.capabilities.repull or not attempt.begun

    def deliver(self, request: Request) -> bool:
        """Finds a sink for an offer that has none. Where no decode instance is left to wait for, the request
        starts again, which places it on one instance. False if it has to wait for room."""
        books, attempt = self._books, request.running()
        if self._delivery.advance(request):
            return True
        assert attempt.prefill is not None
        source = books.cluster.instances[attempt.prefill.instance]
        if sinks.has_sink(request, source, books.cluster):
            return False
        self.retry(request, "no_decode", "no_instance", "no decode instance is left for it")
        return True

    def retry(
        self, request: Request, reason: str, code: str, text: str, *, costs: bool = True, loss: bool = False
    ) -> None:
        """Gives the running attempt up for a new one; ends the request when it has cost too many attempts or, with
        `loss`, instances."""
        books = self._books
        books.drop_attempt(request, reason)
        if costs:
            spent, budget = (
                (request.losses, books.policy.loss_budget) if loss else (request.failures, books.policy.retry_budget)
            )
            spent.append(text)
            if len(spent) > budget:
                message = f"gave up after {request.attempts} attempts: {'; '.join(spent)}"
                books.end(request, State.FAILED, code, message)
                return
        books.tally.retries[reason] += 1
        books.requeue(request)
