"""The router's whole state and the few moves that change it: every part of RouterCore works through these."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

from trtpd.errors import InternalError
from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.cost import Costs, StepWork
from trtpd.runtime.core.degrade import Ladder, Rung
from trtpd.runtime.core.events import (
    Cancel,
    Command,
    Emit,
    Finish,
    Pull,
    Quarantine,
    Refuse,
    Submit,
    SwitchRole,
    Tokens,
    TopLogProbs,
    WakeAt,
    Withdraw,
)
from trtpd.runtime.core.fair import Backlog
from trtpd.runtime.core.instance import Hold, Instance, Side
from trtpd.runtime.core.lengths import Lengths
from trtpd.runtime.core.lifecycle import State
from trtpd.runtime.core.links import Links
from trtpd.runtime.core.place import Rules
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.tally import Tally
from trtpd.runtime.core.timers import Timers


class Books:
    """State, and moves that keep it consistent.

    `undelivered` are requests whose offer waits for a sink. `reprefills` counts new attempts in prefill.
    `room_changed`: something happened since the last look that may let a waiting request go. `step_work`: what the
    answers of the message at hand say was computed.
    """

    def __init__(self, policy: Policy, seed: int, costs: Costs, near_bytes_per_s: float | None = None) -> None:
        self.policy = policy
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.cluster = Cluster(costs, policy.limits, self.rng)
        self.links = Links(policy.handoff_s, near_bytes_per_s)
        self.ladder = Ladder(dwell_up_s=policy.dwell_up_s, dwell_down_s=policy.dwell_down_s)
        self.lengths: dict[str, Lengths] = {}
        self.step_work = StepWork()
        self.rules: dict[Rung, Rules] = {}
        self.requests: dict[int, Request] = {}
        self.backlog = Backlog(policy.tenant_weights)
        self.undelivered: OrderedDict[int, Request] = OrderedDict()
        self.reprefills = 0
        self.room_changed = False
        self.timers = Timers()
        self.tally = Tally(policy)
        self._out: list[Command] = []

    def send(self, command: Submit | Pull | Withdraw | Cancel) -> None:
        """Tells an instance something. It must be up: nothing is sent to one known to be lost."""
        if not self.cluster.instances[command.instance].healthy:
            raise InternalError(f"{command} would go to an instance that is lost")
        self._out.append(command)

    def say(self, command: Emit | Finish | Quarantine | SwitchRole | WakeAt) -> None:
        """Tells the driver something."""
        self._out.append(command)

    def refuse(self, refuse: Refuse) -> None:
        """A new request is not taken in; nothing of it is kept."""
        self.tally.counts["refused"] += 1
        self.tally.refused[refuse.code] += 1
        self._out.append(refuse)

    def take_out(self) -> list[Command]:
        out, self._out = self._out, []
        return out

    def settle(self) -> None:
        """Before anything is placed or forecast: what placement sees is brought up to date."""
        self.cluster.settle()
        if self.cluster.opened:
            self.cluster.opened = False
            self.room_changed = True

    def wake_for_room(self, at_s: float) -> None:
        """At that instant something opens up that was closed."""
        self.timers.at(at_s, self._room)

    def _room(self) -> None:
        self.room_changed = True

    def expected_left(self, request: Request) -> float:
        """How many more tokens to expect of its answer."""
        return self.lengths_of(request.model).left(len(request.journal), request.arrived.max_tokens)

    def lengths_of(self, model: str) -> Lengths:
        found = self.lengths.get(model)
        if found is None:
            found = self.lengths[model] = Lengths()
        return found

    def reserve(
        self, request: Request, instance: Instance, side: Side, *, tokens: int, pending_tokens: int = 0
    ) -> Hold:
        """Counts `tokens` at their peak, and what is to be computed, on an instance; from now on, before it
        knows."""
        decodes = side != "prefill"
        hold = Hold(
            instance=instance.name,
            request_id=request.id,
            attempt=request.attempts,
            side=side,
            blocks=instance.blocks_for(tokens),
            pending_tokens=pending_tokens,
            short=self.policy.is_short(request.prompt_tokens),
            context_tokens=request.prompt_tokens if decodes else 0,
            left_tokens=request.left_tokens if decodes else 0.0,
        )
        self.cluster.reserve(instance, hold)
        return hold

    def release(self, hold: Hold) -> None:
        """The instance has nothing of it any more, or never heard of it."""
        self.cluster.release(hold)
        self.room_changed = True
        if hold.reminder is not None:
            self.timers.cancel(hold.reminder)

    def close(self, hold: Hold, *, withdraw: bool = False) -> None:
        """Ends a hold from our side. What the instance knows of stays counted until it answers."""
        if not hold.sent:
            self.release(hold)
        elif not hold.closing:
            self.cluster.close(hold)
            self.room_changed = True
            self._ask_back(hold, withdraw=withdraw, reminders=self.policy.drain_reminders)

    def _ask_back(self, hold: Hold, *, withdraw: bool, reminders: int) -> None:
        kind = Withdraw if withdraw else Cancel
        self.send(kind(instance=hold.instance, request_id=hold.request_id, attempt=hold.attempt))
        patience_s = self.policy.drain_patience_s
        hold.reminder = self.timers.at(self.now_s + patience_s, lambda: self._overdue(hold, withdraw, reminders))

    def _overdue(self, hold: Hold, withdraw: bool, reminders: int) -> None:
        """No answer. Asked often enough, the instance's own report of its free blocks is believed instead."""
        instance = self.cluster.instances[hold.instance]
        if instance.holds.get(hold.key) is not hold:
            return
        if reminders > 0:
            self._ask_back(hold, withdraw=withdraw, reminders=reminders - 1)
            return
        text = f"{hold.instance} never gave back request {hold.request_id}, attempt {hold.attempt}"
        self.tally.fault(self.now_s, "drain_overdue", text)
        self.release(hold)

    def open(self, request: Request, on_deadline: Callable[[Request], None]) -> None:
        """Takes a new request in; `on_deadline` ends it if nothing else has by then."""
        self.requests[request.id] = request
        request.deadline = self.timers.at(request.arrived.deadline_s, lambda: on_deadline(request))
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """It waits for a place. Against its tenant's share count its prompt and the answer to expect."""
        request.left_tokens = self.expected_left(request)
        self.backlog.add(request, request.prompt_tokens + request.left_tokens)
        self.room_changed = True

    def accept(
        self,
        request: Request,
        first_index: int,
        ids: tuple[int, ...],
        log_probs: tuple[float, ...],
        top_log_probs: tuple[TopLogProbs, ...] = (),
    ) -> int:
        """Puts new tokens in the journal and hands them out; returns how many of `ids` lie past `max_tokens`.

        Indexes that are in the journal already are dropped. `first_index` must not leave a gap.
        """
        known = len(request.journal)
        if first_index > known:
            raise InternalError(f"request {request.id} has {known} tokens and is given number {first_index}")
        start, stop = known - first_index, request.arrived.max_tokens - first_index
        new = ids[start:stop]
        if new:
            request.journal.extend(new)
            self._out.append(
                Emit(
                    request_id=request.id,
                    first_index=known,
                    ids=new,
                    log_probs=log_probs[start:stop],
                    top_log_probs=top_log_probs[start:stop],
                )
            )
            request.timeline.mark_tokens(len(new), self.now_s)
            self.tally.output_tokens += len(new)
        return max(0, len(ids) - stop)

    def append(self, request: Request, event: Tokens) -> bool:
        """`accept` for the usual case: the next tokens, and more are to come. False, with nothing done, if that is
        not the case."""
        journal, ids, arrived = request.journal, event.ids, request.arrived
        known = len(journal)
        if event.first_index != known or not ids or known + len(ids) >= arrived.max_tokens:
            return False
        journal += ids
        self._out.append(
            Emit(
                request_id=arrived.request_id,
                first_index=known,
                ids=ids,
                log_probs=event.log_probs,
                top_log_probs=event.top_log_probs,
            )
        )
        request.timeline.mark_tokens(len(ids), self.now_s)
        self.tally.output_tokens += len(ids)
        return True

    def _note_length(self, request: Request) -> None:
        lengths = self.lengths_of(request.model)
        if lengths.note(max(1, request.timeline.output_tokens)):
            for table in self.cluster.tables(request.model):
                table.usual_tokens = lengths.usual()

    def wrote(self, request: Request, hold: Hold, tokens: int) -> None:
        """A sequence grew where it decodes. When it outgrows what was expected of it, more is expected."""
        left = hold.left_tokens - tokens
        if left < 1.0:
            left = self.expected_left(request)
        self.cluster.wrote(self.cluster.instances[hold.instance], hold, tokens, left)

    def end_prefill(self, request: Request) -> None:
        """The attempt's prompt is computed, or given up: its place among the paced ones is free."""
        attempt = request.running()
        if attempt.prefill is not None:
            self.cluster.progress(attempt.prefill, 0)
        if attempt.paced:
            attempt.paced = False
            self.reprefills -= 1
            self.room_changed = True

    def drop_attempt(self, request: Request, outcome: str) -> None:
        """Ends the running attempt, if any, and tells everyone in it at once."""
        attempt = request.attempt
        if attempt is None:
            return
        self.end_prefill(request)
        attempt.record.outcome = outcome
        for timer in (attempt.lead, attempt.stall):
            if timer is not None:
                self.timers.cancel(timer)
        if attempt.decode is not None:
            self.close(attempt.decode)
        if attempt.prefill is not None:
            self.close(attempt.prefill, withdraw=attempt.seal is not None)
        self.undelivered.pop(request.id, None)
        request.attempt = None

    def await_sink(self, request: Request) -> None:
        """Its offer can be pulled and nobody can pull it now. The dispatch looks at it at once, and again when room
        has changed."""
        if request.id not in self.undelivered:
            self.undelivered[request.id] = request
            self.room_changed = True

    def requeue(self, request: Request) -> None:
        """Back to the queue, ahead of what has not been placed before."""
        request.state = State.QUEUED
        request.blocked_since_s = None
        self.enqueue(request)

    def end(
        self,
        request: Request,
        state: State,
        reason: str,
        message: str = "",
        *,
        retry_after_s: float | None = None,
    ) -> None:
        """The one way out: everything it had is asked back, and the client is told."""
        if request.state is State.QUEUED:
            self.backlog.remove(request)
        self.drop_attempt(request, "delivered" if state is State.FINISHED else reason)
        for timer in (request.deadline, request.patience):
            if timer is not None:
                self.timers.cancel(timer)
        del self.requests[request.id]
        request.state = state
        self.tally.keep(request.timeline)
        self.tally.counts[state.value] += 1
        if state is State.FINISHED:
            self.tally.finished[reason] += 1
            self._note_length(request)
        elif state is State.REFUSED:
            self.tally.refused[reason] += 1
        elif state is State.FAILED:
            self.tally.failed[reason] += 1
        self.say(
            Finish(
                request_id=request.id,
                state=state.value,
                reason=reason,
                message=message,
                timeline=request.timeline,
                retry_after_s=retry_after_s,
            )
        )
