"""What is looked at now and then rather than at every event: the ladder, held KV, moves, elasticity, empty pools."""

from __future__ import annotations

from trtpd.runtime.core import admit, forecast
from trtpd.runtime.core.books import Books
from trtpd.runtime.core.degrade import Pressure, Rung
from trtpd.runtime.core.events import Arrived, SwitchRole
from trtpd.runtime.core.instance import Instance
from trtpd.runtime.core.lifecycle import State
from trtpd.runtime.core.moves import Moves
from trtpd.runtime.core.ranks import CAUTION, Table
from trtpd.runtime.core.rebalance import Pools, Proposal, Rebalancer
from trtpd.runtime.core.recovery import Recovery
from trtpd.runtime.core.score import TPOT_USUAL_S

LOOK_S = 0.25

TARGET_RATE = 0.1
"""Share of the way the usual target goes to that of one request."""


class _Usual:
    """What requests of one model usually ask for; None while none has."""

    __slots__ = ("tpot_s", "ttft_s")

    def __init__(self) -> None:
        self.ttft_s: float | None = None
        self.tpot_s: float | None = None

    def note(self, event: Arrived) -> None:
        self.ttft_s = _towards(self.ttft_s, event.ttft_s)
        self.tpot_s = _towards(self.tpot_s, event.tpot_s)


def _towards(usual_s: float | None, one_s: float | None) -> float | None:
    if usual_s is None or one_s is None:
        return usual_s if one_s is None else one_s
    return usual_s + TARGET_RATE * (one_s - usual_s)


class Watch:
    """Looks every LOOK_S while there is anything to look at; sleeps otherwise."""

    def __init__(self, books: Books, recovery: Recovery) -> None:
        self._books = books
        self._recovery = recovery
        self._moves = Moves(books)
        self._armed = False
        self._usual: dict[str, _Usual] = {}
        self.rebalancers: dict[str, Rebalancer] = {}

    def arrived(self, event: Arrived, model: str, *, admitted: bool) -> None:
        """Every arrival that is well-formed, admitted or not."""
        books, policy = self._books, self._books.policy
        self._usual_of(model).note(event)
        rebalancer = self.rebalancers.get(model)
        if rebalancer is None:
            rebalancer = Rebalancer(after_s=policy.rebalance_s, gain=policy.rebalance_gain)
            self.rebalancers[model] = rebalancer
        expected = books.lengths_of(model).left(0, event.max_tokens)
        rebalancer.offered.note(books.now_s, event.prompt_tokens, expected, in_time=admitted)
        self.arm()

    def _usual_of(self, model: str) -> _Usual:
        found = self._usual.get(model)
        if found is None:
            found = self._usual[model] = _Usual()
        return found

    def arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._books.timers.at(self._books.now_s + LOOK_S, self._look)

    def _look(self) -> None:
        books = self._books
        self._armed = False
        books.settle()
        self._ladder()
        self._held_kv()
        self._unserved()
        books.settle()
        self._moves.look()
        for model, rebalancer in self.rebalancers.items():
            self._rebalance(model, rebalancer)
        if books.requests or books.ladder.rung > Rung.NORMAL:
            self.arm()

    def _ladder(self) -> None:
        books = self._books
        models = list(books.cluster.groups)
        worst = max((self._pressure(model) for model in models), key=lambda p: p.value, default=None)
        change = books.ladder.look(books.now_s, worst or Pressure(value=0.0, reason=""))
        if change is None:
            return
        text = f"rung {change.former.name} to {change.rung.name}: {change.reason} (pressure {change.pressure:.2f})"
        books.tally.event(books.now_s, "ladder", text)
        books.tally.rungs[f"{change.rung.name.lower()}:{change.reason}"] += 1
        books.room_changed = True
        if change.rung >= Rung.SHED_LOW:
            for request in [r for r in books.backlog if r.arrived.priority < 0 and not r.attempts]:
                admit.give_way(books, request, f"requests of priority {request.arrived.priority} are shed", "rung_shed")

    def _pressure(self, model: str) -> Pressure:
        """The worst that bears on `model` now."""
        books = self._books
        target_s = self._usual_of(model).ttft_s or books.policy.patience_s
        queue = books.backlog.queues.get(model)
        waiting = len(queue) if queue is not None else 0
        found = [Pressure(value=forecast.backlog_s(books, model) / target_s, reason="prefill_backlog")]
        if waiting:
            found.append(Pressure(value=forecast.place_wait_s(books, model, waiting) / target_s, reason="decode_full"))
        for group in books.cluster.groups[model].values():
            if len(group.prefill) and len(group.decode):
                if not (group.prefill.open and group.decode.open):
                    found.append(Pressure(value=0.5, reason="pool_gone"))
                held = max(map(self._held_part, group.prefill.instances), default=0.0)
                found.append(Pressure(value=min(held / books.policy.held_watermark, 0.99), reason="held_kv"))
        return max(found, key=lambda pressure: pressure.value)

    def _held_part(self, instance: Instance) -> float:
        """The part of its KV that offers without a sink hold."""
        books = self._books
        if not books.undelivered or not instance.healthy:
            return 0.0
        blocks = sum(
            hold.blocks
            for hold in instance.holds.values()
            if hold.side == "prefill" and hold.request_id in books.undelivered and not hold.closing
        )
        return blocks / instance.hello.kv_blocks

    def _held_kv(self) -> None:
        """Past the watermark the oldest offer without a sink gives its blocks back and queues again."""
        books = self._books
        if not books.undelivered:
            return
        for instance in list(books.cluster.instances.values()):
            if self._held_part(instance) > books.policy.held_watermark:
                oldest = next(
                    request
                    for request in books.undelivered.values()
                    if request.running().prefill is not None and request.running().record.prefill == instance.name
                )
                text = f"{instance.name} holds KV of too many offers without a sink"
                self._recovery.retry(oldest, "held_kv", "saturated", text, costs=False)

    def _unserved(self) -> None:
        """With nothing left that serves a model, what waits for it is told so soon, not at its deadline."""
        books = self._books
        for model, queue in list(books.backlog.queues.items()):
            if not len(queue) or books.cluster.servable(model):
                continue
            last_s = books.cluster.last_usable_s(model)
            gone_s = books.now_s - (last_s if last_s is not None else 0.0)
            if last_s is None or gone_s > books.policy.no_instance_grace_s:
                for request in list(queue):
                    books.end(request, State.FAILED, "no_instance", admit.nobody_for(model, gone_s))

    def _rebalance(self, model: str, rebalancer: Rebalancer) -> None:
        books = self._books
        for group in books.cluster.groups.get(model, {}).values():
            if not (group.prefill.open and group.decode.open):
                continue
            rates = group.prefill.rate[group.prefill.rate > 0.0]
            pools = Pools(
                prefill=group.prefill.open,
                decode=group.decode.open,
                prefill_tokens_per_s=float(rates.mean()),
                decode_tokens_per_s=mean_decode_rate(group.decode, self._usual_of(model).tpot_s),
            )
            found = rebalancer.propose(books.now_s, pools, backlog_tokens=books.backlog.tokens_of(model))
            if found is not None:
                self._propose(found, group.decode.instances if found.role == "prefill" else group.prefill.instances)
            return

    def _propose(self, found: Proposal, candidates: list[Instance]) -> None:
        """Says it; with `elastic`, asks the instance with the least to lose to switch."""
        books = self._books
        books.tally.event(books.now_s, "rebalance", f"{found.kind} for {found.role}: {found.why}")
        books.tally.counts[f"proposed_{found.kind}_{found.role}"] += 1
        if not books.policy.elastic or found.kind != "switch":
            return
        usable = [instance for instance in candidates if instance.usable(books.now_s)]
        if len(usable) > 1:
            chosen = min(usable, key=lambda instance: (instance.left_tokens + instance.pending_tokens, instance.name))
            books.say(SwitchRole(instance=chosen.name, role=found.role))


def mean_decode_rate(table: Table, tpot_s: float | None) -> float:
    """Of the instances that serve: one at least must. See decode_rate."""
    rates = [decode_rate(one, tpot_s) for one in table.instances if table.capacity[one.row] >= 0.0]
    return sum(rates) / len(rates)


def decode_rate(instance: Instance, tpot_s: float | None) -> float:
    """Tokens a second of the largest batch that keeps the TPOT target, by as much as admission wants it kept (CAUTION);
    without a target, TPOT_USUAL_S or twice the step of one sequence, whichever is more."""
    table, row, most = instance.table, instance.row, instance.hello.max_batch
    one_s, each_s = float(table.one_s[row]), float(table.each_s[row])
    target_s = max(TPOT_USUAL_S, 2.0 * one_s) if tpot_s is None else tpot_s / CAUTION
    batch = most if each_s <= 0.0 else min(float(most), max(1.0, 1.0 + (target_s - one_s) / each_s))
    return batch / (one_s + each_s * (batch - 1.0))
