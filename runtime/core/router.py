"""RouterCore: decides where each request runs and what is done when something breaks. No I/O, no clock, no
tensors.

The live router, the simulator and the property tests drive this same object: events in, commands out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trtpd.errors import InternalError
from trtpd.runtime.core import admit, integrity, place, status
from trtpd.runtime.core.books import Books
from trtpd.runtime.core.cost import Costs, StepTimeModel, StepWork
from trtpd.runtime.core.delivery import Delivery
from trtpd.runtime.core.dispatch import Dispatch
from trtpd.runtime.core.events import (
    Arrived,
    Cancel,
    ChunkReady,
    ClientGone,
    Command,
    Drain,
    Drained,
    Event,
    Hello,
    InstanceEvent,
    LinkDown,
    Load,
    Lost,
    Offered,
    Preempted,
    Refuse,
    Rejected,
    Role,
    Sealed,
    Step,
    TextStopped,
    Tick,
    Tokens,
    TransferBegun,
    TransferDone,
    TransferFailed,
    WakeAt,
)
from trtpd.runtime.core.instance import Hold, Instance, Side
from trtpd.runtime.core.lifecycle import Instant, State, Timeline
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.recovery import Recovery
from trtpd.runtime.core.requests import Attempt, Request
from trtpd.runtime.core.watch import Watch


def _is_last(answer: InstanceEvent) -> bool:
    """Whether the instance has nothing of this attempt any more."""
    return isinstance(answer, Drained | Rejected | TransferFailed) or (
        isinstance(answer, Tokens) and answer.finish is not None
    )


class RouterCore:
    """One object per deployment, one thread. `handle` never blocks, and raises InternalError only for bugs of
    ours or of the driver (a request id used twice).

    `step_times` are measured costs of each role's engine, from a profile, and `near_bytes_per_s` of a transfer within a
    host; with `fingerprint` they are of that build's instances only. Without them the router learns as it goes.
    `choose` may be another way to place, to compare with.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        seed: int = 0,
        step_times: Mapping[Role, StepTimeModel] | None = None,
        fingerprint: str | None = None,
        near_bytes_per_s: float | None = None,
        choose: place.Chooser = place.choose,
    ) -> None:
        self._books = Books(policy or Policy(), seed, Costs(step_times, fingerprint=fingerprint), near_bytes_per_s)
        self._delivery = Delivery(self._books, on_stall=self._stalled)
        self._recovery = Recovery(self._books, self._delivery)
        self._dispatch = Dispatch(self._books, self._recovery, choose)
        self._watch = Watch(self._books, self._recovery)
        self._events: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrived,
            Hello: self._recovery.hello,
            Step: self._step,
            Lost: self._recovery.lost,
            LinkDown: self._recovery.link_down,
            TextStopped: self._text_stopped,
            ClientGone: self._client_gone,
            Drain: self._drain,
            Tick: lambda _event: None,
        }
        # The key ties each handler to the event's type, which the checker can't see: hence Any.
        self._answers: dict[Side, dict[type, Callable[[Request, Hold, Any], None]]] = {
            "prefill": {
                Offered: self._delivery.offered,
                ChunkReady: self._delivery.chunk_ready,
                Sealed: self._sealed,
            },
            "decode": {
                TransferBegun: self._delivery.begun,
                TransferDone: self._delivery.done,
                TransferFailed: self._recovery.transfer_failed,
                Tokens: self._tokens,
                Preempted: self._preempted,
            },
            "local": {
                Offered: self._delivery.offered,
                ChunkReady: self._delivery.chunk_ready,
                Tokens: self._tokens,
                Preempted: self._preempted,
            },
        }
        for handlers in self._answers.values():
            handlers[Rejected] = self._recovery.rejected
            handlers[Drained] = self._recovery.drained

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Takes one event at `now_s` and says what is to be done, in this order. A clock that runs backwards
        is taken to stand still."""
        books = self._books
        books.now_s = books.cluster.now_s = max(now_s, books.now_s)
        books.timers.fire(books.now_s)
        self._events[type(event)](event)
        self._dispatch.run()
        wake_s = books.timers.wake_s(books.now_s, ticked=type(event) is Tick)
        if wake_s is not None:
            books.say(WakeAt(at_s=wake_s))
        return books.take_out()

    def snapshot(self) -> dict[str, Any]:
        """What `trtpd status` shows, as plain data: instances, requests by state, counters, recent faults."""
        return status.snapshot(self._books, self._watch.rebalancers)

    def timeline(self, request_id: int) -> Timeline | None:
        """The record of a request in flight, or of one of those that ended last; it also comes with
        Finish."""
        request = self._books.requests.get(request_id)
        return self._books.tally.ended(request_id) if request is None else request.timeline

    def check_integrity(self) -> None:
        """Raises InternalError if an invariant does not hold. Walks everything: for tests and after
        doubts."""
        integrity.check(self._books)

    def _arrived(self, event: Arrived) -> None:
        books = self._books
        if event.request_id in books.requests:
            raise InternalError(f"request id {event.request_id} arrives while it is in flight")
        books.tally.counts["arrived"] += 1
        model = admit.model_of(event, books.cluster)
        if isinstance(model, Refuse):
            books.refuse(model)
            return
        refuse = admit.refusal(event, model, books)
        if refuse is None or refuse.code == "saturated":
            self._watch.arrived(event, model, admitted=refuse is None)
        if refuse is not None:
            books.refuse(refuse)
            return
        request = Request(event, model, books.now_s, short=books.policy.is_short(event.prompt_tokens))
        books.open(request, self._deadline)
        request.patience = books.timers.at(books.now_s + books.policy.queue_s, lambda: self._impatient(request))
        if event.deadline_s <= books.now_s:
            self._deadline(request)

    def _impatient(self, request: Request) -> None:
        seconds = self._books.policy.queue_s
        admit.give_way(self._books, request, f"it found no place within {seconds:g} s", "queue_time")

    def _step(self, event: Step) -> None:
        books = self._books
        instance = books.cluster.current(event.instance, event.generation)
        if instance is None:
            books.tally.counts["stale_answers"] += max(1, len(event.events))
            return
        if event.events:
            books.step_work = StepWork()
            for answer in event.events:
                if type(answer) is not Tokens or not self._writes_on(instance, answer):
                    self._answer(instance, answer)
            if event.load.step_tokens and books.cluster.looks_at(instance):
                self._observe(instance, books.step_work, event.load)
        if books.cluster.report(instance, event.load):
            books.room_changed = True
        if event.load.draining and not instance.draining:
            self._drain(Drain(instance=instance.name, move=True))

    def _writes_on(self, instance: Instance, event: Tokens) -> bool:
        """What nearly every answer is: the next tokens of a sequence that writes, and not its last. False, with
        nothing done, if this one is anything else."""
        hold = instance.holds.get((event.request_id, event.attempt))
        if hold is None or not hold.writes or hold.closing or event.finish is not None:
            return False
        books = self._books
        request = books.requests[event.request_id]
        if not books.append(request, event):
            return False
        written = len(event.ids)
        books.step_work.n_decode += written
        left = hold.left_tokens - written
        books.cluster.wrote(instance, hold, written, left if left >= 1.0 else books.expected_left(request))
        return True

    def _observe(self, instance: Instance, work: StepWork, load: Load) -> None:
        """Without chunk events prompt tokens show in the count of the step alone; a step that holds what no answer
        speaks of says nothing."""
        rest = load.step_tokens - work.n_decode - work.prefill_tokens
        if rest and not instance.hello.capabilities.chunk_events:
            work.chunk(0, rest)
            rest = 0
        if rest == 0 and instance.healthy:
            self._books.cluster.observe(instance, work, load.step_s)

    def _answer(self, instance: Instance, answer: InstanceEvent) -> None:
        """One answer, fenced: only the living attempt of the living generation is listened to."""
        books = self._books
        hold = instance.holds.get((answer.request_id, answer.attempt))
        if hold is None or not hold.sent:
            books.tally.counts["stale_answers"] += 1
            if hold is None and not _is_last(answer):
                self._stop_orphan(instance, answer)
        elif hold.closing:
            if _is_last(answer):
                books.release(hold)
        else:
            handler = self._answers[hold.side].get(type(answer))
            if handler is None:
                text = f"{instance.name} ({hold.side}) answered {type(answer).__name__}, which it can't; ignored"
                books.tally.fault(books.now_s, "protocol", text)
            else:
                handler(books.requests[hold.request_id], hold, answer)

    def _stop_orphan(self, instance: Instance, answer: InstanceEvent) -> None:
        """Work that nobody waits for any more is stopped; it changes nothing here."""
        self._books.tally.counts["orphans"] += 1
        self._books.send(Cancel(instance=instance.name, request_id=answer.request_id, attempt=answer.attempt))

    def _text_stopped(self, event: TextStopped) -> None:
        request = self._books.requests.get(event.request_id)
        if request is not None:
            request.timeline.output_tokens = min(request.timeline.output_tokens, event.index + 1)
            self._books.end(request, State.FINISHED, "stop")

    def _client_gone(self, event: ClientGone) -> None:
        request = self._books.requests.get(event.request_id)
        if request is not None:
            self._books.end(request, State.CANCELLED, "cancelled")

    def _drain(self, event: Drain) -> None:
        instance = self._books.cluster.instances.get(event.instance)
        if instance is not None:
            instance.moves_out = event.move
            self._books.cluster.drain(instance)
            self._books.room_changed = True

    def _sealed(self, request: Request, hold: Hold, event: Sealed) -> None:
        """The first token goes out at once; then the rest moves, unless the answer ends here."""
        if request.running().seal is not None:
            return
        if event.first_index != len(request.journal):
            self._recovery.gap(request, hold.instance, event.first_index)
            return
        self._books.cluster.seen(hold)
        log_probs = () if event.log_prob is None else (event.log_prob,)
        top_log_probs = (event.top_log_probs,) if event.top_log_probs else ()
        self._books.accept(request, event.first_index, (event.token,), log_probs, top_log_probs)
        if event.finish is not None or len(request.journal) >= request.arrived.max_tokens:
            request.running().seal = event.seal
            self._books.end(request, State.FINISHED, event.finish or "length")
        else:
            self._delivery.sealed(request, event.seal)

    def _tokens(self, request: Request, hold: Hold, event: Tokens) -> None:
        books, attempt = self._books, request.running()
        if hold.side == "decode" and not attempt.joined:
            self._delivery.join(request, hold)
        elif hold.side == "local" and request.state is not State.DECODING:
            books.end_prefill(request)
            request.state = State.DECODING
            books.cluster.seen(hold)
        else:
            books.step_work.n_decode += len(event.ids)
        if event.finish is not None:
            books.release(hold)
            attempt.decode, attempt.prefill = None, None
        if event.first_index > len(request.journal):
            self._recovery.gap(request, hold.instance, event.first_index)
            return
        if Instant.DECODE_BEGIN not in attempt.record.instants:
            request.timeline.mark(Instant.DECODE_BEGIN, books.now_s)
        if event.cached_tokens is not None:
            attempt.record.cached_tokens = event.cached_tokens
        surplus = books.accept(request, event.first_index, event.ids, event.log_probs, event.top_log_probs)
        if event.finish is None:
            hold.writes = True
            books.wrote(request, hold, len(event.ids))
        if event.finish is not None and not surplus:
            books.end(request, State.FINISHED, event.finish)
        elif len(request.journal) >= request.arrived.max_tokens:
            books.end(request, State.FINISHED, "length")

    def _preempted(self, request: Request, hold: Hold, _event: Preempted) -> None:
        """It goes on by itself. Its instance has taken on more than it had blocks for."""
        request.running().record.preemptions += 1
        self._books.tally.counts["preemptions"] += 1
        self._books.cluster.seen(hold)

    def _deadline(self, request: Request) -> None:
        books = self._books
        arrived_s = request.timeline.instants[Instant.ARRIVED]
        message = (
            f"not done {books.now_s - arrived_s:.1f} s after it arrived ({request.state}, "
            f"{len(request.journal)} of {request.arrived.max_tokens} tokens); "
            f"allow more time or ask for fewer tokens"
        )
        books.end(request, State.FAILED, "deadline", message)

    def _stalled(self, request: Request, attempt: Attempt) -> None:
        self._recovery.stalled(request, attempt)
