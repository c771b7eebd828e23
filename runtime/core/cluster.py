"""All instances: who there is, in which group and role, and every reservation made on them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

from trtpd.errors import InternalError
from trtpd.runtime.core.cost import Costs, StepWork
from trtpd.runtime.core.events import Hello, Load, Role
from trtpd.runtime.core.instance import GroupKey, Hold, Instance, group_key
from trtpd.runtime.core.prefix import Prefixes
from trtpd.runtime.core.ranks import REPORTS_PER_REFRESH, Limits, Table

JITTER_S = 1e-9

FACTOR_LEAST, FACTOR_MOST = 0.5, 16.0
FACTOR_RATE = 0.15
"""Share of the way an instance's factor goes to what one step says, of those looked at: see Cluster.looks_at."""

STEPS_PER_LOOK = 4


class Group:
    """Instances of one build that can exchange KV, by role."""

    __slots__ = ("decode", "mixed", "prefill")

    def __init__(self, costs: Costs, limits: Limits) -> None:
        self.prefill = Table("prefill", costs, limits)
        self.decode = Table("decode", costs, limits)
        self.mixed = Table("mixed", costs, limits)

    @property
    def tables(self) -> tuple[Table, Table, Table]:
        return (self.prefill, self.decode, self.mixed)

    def of(self, role: Role) -> Table:
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}[role]


class Cluster:
    """All instances ever seen, indexed by model and group; every reservation goes through here."""

    def __init__(
        self, costs: Costs | None = None, limits: Limits | None = None, rng: random.Random | None = None
    ) -> None:
        """`rng` decides between equals."""
        self.now_s = 0.0
        self._rng = rng or random.Random(0)
        self.instances: dict[str, Instance] = {}
        self.groups: dict[str, dict[GroupKey, Group]] = {}
        self.links_down: dict[tuple[str, str], float] = {}
        self.costs = costs or Costs()
        self.prefixes = Prefixes()
        self._limits = limits or Limits()
        self._hosts: dict[str, int] = {}
        self._stale: list[Instance] = []
        self.opened = False
        self._last_usable_s: dict[str, float] = {}
        self._largest: dict[str, Instance] = {}

    def register(self, hello: Hello) -> Instance:
        """Takes in an instance, or takes it back. A new generation starts empty; its losses stay on record.

        One that was lost and comes back with the same generation may still run what was placed on it: those
        holds are in its `ghosts`, for the caller to close.
        """
        old = self.instances.get(hello.instance)
        if old is not None:
            self._unlist(old)
        key = group_key(hello)
        groups = self.groups.setdefault(hello.model, {})
        if key not in groups:
            groups[key] = Group(self.costs, self._limits)
        table = groups[key].of(hello.role)
        if old is not None and old.hello.generation == hello.generation:
            instance = old
            instance.take_hello(hello)
            instance.table = table
            instance.healthy = True
        else:
            host = self._hosts.setdefault(hello.host, len(self._hosts))
            instance = Instance(hello, table, host=host, jitter=self._rng.random() * JITTER_S)
            self.prefixes.forget(hello.instance)
        if old is not None and instance is not old:
            if old.holds:
                raise InternalError(f"{hello.instance} registers anew with {len(old.holds)} holds of its past")
            instance.losses_s, instance.quarantines = old.losses_s, old.quarantines
            instance.quarantined_until_s = old.quarantined_until_s
            instance.factor = old.factor
        self.instances[hello.instance] = instance
        table.add(instance, self.now_s)
        self._largest.clear()
        return instance

    def _unlist(self, instance: Instance) -> None:
        groups = self.groups[instance.hello.model]
        self.note_usable(instance.hello.model)
        instance.table.remove(instance)
        if not any(groups[instance.group_key].tables):
            del groups[instance.group_key]
            if not groups:
                del self.groups[instance.hello.model]

    def current(self, name: str, generation: str) -> Instance | None:
        """The instance, if this is its living generation."""
        instance = self.instances.get(name)
        if instance is None or not instance.healthy or instance.hello.generation != generation:
            return None
        return instance

    def lose(self, instance: Instance) -> list[Hold]:
        """Marks it lost and returns what was placed on it, which is placed there no more."""
        self.note_usable(instance.hello.model)
        instance.healthy = False
        holds = list(instance.holds.values())
        for hold in holds:
            self.release(hold)
        instance.ghosts = [hold for hold in holds if hold.sent]
        instance.load = Load(kv_blocks_free=instance.hello.kv_blocks)
        self.prefixes.forget(instance.name)
        self.refresh(instance)
        return holds

    def report(self, instance: Instance, load: Load) -> bool:
        """Takes in the instance's own report; True if it has more room than before."""
        before = instance.load
        instance.load = load
        instance.reports += 1
        if load.evicted:
            self.prefixes.evicted(instance.name, load.evicted)
        freed = load.kv_blocks_free - before.kv_blocks_free
        if instance.reports % REPORTS_PER_REFRESH == 0:
            self.refresh(instance)
        elif freed or load.queued_tokens != before.queued_tokens:
            used = instance.used_blocks
            most_used, most_queued = max(used, used + freed), max(before.queued_tokens, load.queued_tokens)
            if most_used > instance.peak_blocks or most_queued > instance.pending_tokens:
                self.refresh(instance)
        return freed > 0

    @staticmethod
    def looks_at(instance: Instance) -> bool:
        """Whether the step that it is about to report is one to observe. Prompts are few and each is told from the
        next; of decode steps one in STEPS_PER_LOOK is enough. Every second of those is one after which its row is
        brought up to date anyway."""
        return instance.hello.role == "prefill" or (instance.reports + 1) % STEPS_PER_LOOK == 0

    def observe(self, instance: Instance, work: StepWork, step_s: float) -> None:
        """A step of it took so long: what is predicted of it follows, slowly and within bounds, and what placement
        sees of it. If it changes what is known of its like, so does what placement sees of the idle ones: they report
        nothing that would bring it up to date."""
        hello, role = instance.hello, instance.hello.role
        seen, renewed = self.costs.observe(hello, role, work, instance.context_tokens, step_s, factor=instance.factor)
        if seen != instance.factor:
            factor = instance.factor * math.exp(FACTOR_RATE * math.log(seen / instance.factor))
            instance.factor = min(max(factor, FACTOR_LEAST), FACTOR_MOST)
            self.refresh(instance)
        if renewed:
            for table in self.tables(hello.model):
                for row in table.idle() if table.role == role else ():
                    self.refresh(table.instances[row])

    def drain(self, instance: Instance) -> None:
        self.note_usable(instance.hello.model)
        instance.draining = True
        self.refresh(instance)

    def quarantine(self, instance: Instance, until_s: float) -> None:
        """For an instance that was just lost."""
        instance.quarantines += 1
        instance.losses_s.clear()
        self.bar(instance, until_s)

    def bar(self, instance: Instance, until_s: float) -> None:
        """No new work for it until then, which may be now. To be refreshed at that instant."""
        self.note_usable(instance.hello.model)
        instance.quarantined_until_s = until_s
        self.refresh(instance)

    def refresh(self, instance: Instance) -> None:
        """What placement sees of it is to be brought up to date before it is looked at again."""
        if not instance.stale:
            instance.stale = True
            self._stale.append(instance)

    def settle(self) -> None:
        """Brings what placement sees up to date; `opened` if an instance can be given prompts again that could not
        before."""
        if not self._stale:
            return
        stale, self._stale = self._stale, []
        for instance in stale:
            instance.stale = False
            if self.instances.get(instance.name) is instance:
                self.opened |= instance.table.refresh(instance, self.now_s)

    def note_usable(self, model: str) -> None:
        """Remembers that `model` could be served until now, if it could. To be called before that may end."""
        if self.servable(model):
            self._last_usable_s[model] = self.now_s

    @property
    def hosts(self) -> int:
        """How many hosts instances have come from."""
        return len(self._hosts)

    def servable(self, model: str) -> bool:
        """Whether anything serves `model` now."""
        self.settle()
        return any(table.open for table in self.tables(model))

    def last_usable_s(self, model: str) -> float | None:
        """When `model` was last servable; None if never."""
        self.note_usable(model)
        return self._last_usable_s.get(model)

    def tables(self, model: str) -> Iterator[Table]:
        for group in self.groups.get(model, {}).values():
            yield from group.tables

    def of_model(self, model: str) -> Iterable[Instance]:
        for table in self.tables(model):
            yield from table.instances

    def largest(self, model: str) -> Instance | None:
        """The instance that could hold the longest sequence, whether or not it is up."""
        found = self._largest.get(model)
        if found is None:
            found = max(self.of_model(model), key=lambda instance: instance.capacity_tokens, default=None)
            if found is not None:
                self._largest[model] = found
        return found

    def prefillers(self, model: str) -> list[Table]:
        """Those that would prefill a new request: prefill and mixed instances that serve, or whatever does
        without them."""
        tables = [table for table in self.tables(model) if table.open]
        return [table for table in tables if table.role != "decode"] or tables

    def link_up(self, source: str, sink: str) -> bool:
        if not self.links_down:
            return True
        until_s = self.links_down.get((source, sink))
        if until_s is None:
            return True
        if self.now_s >= until_s:
            del self.links_down[(source, sink)]
            return True
        return False

    def reserve(self, instance: Instance, hold: Hold) -> None:
        if hold.key in instance.holds:
            raise InternalError(f"{instance.name} already holds attempt {hold.attempt} of request {hold.request_id}")
        instance.holds[hold.key] = hold
        instance.peak_blocks += hold.blocks
        if not hold.seen:
            instance.unseen_blocks += hold.blocks
        self._count_sequence(instance, hold, 1)
        self._count_prompt(instance, hold, 1)
        self.refresh(instance)

    def release(self, hold: Hold) -> None:
        instance = self.instances[hold.instance]
        if instance.holds.pop(hold.key, None) is not hold:
            raise InternalError(f"{hold.instance} doesn't hold attempt {hold.attempt} of request {hold.request_id}")
        instance.peak_blocks -= hold.blocks
        if not hold.seen:
            instance.unseen_blocks -= hold.blocks
        self._count_sequence(instance, hold, -1)
        instance.flows -= hold.moving
        hold.moving = False
        self._count_prompt(instance, hold, -1)
        self.refresh(instance)

    def close(self, hold: Hold) -> None:
        """It is asked back: nothing more is computed for it, its blocks stay counted until it answers."""
        instance = self.instances[hold.instance]
        self._count_sequence(instance, hold, -1)
        hold.closing = True
        self.progress(hold, 0)
        self.refresh(instance)

    def _count_sequence(self, instance: Instance, hold: Hold, sign: int) -> None:
        if hold.decodes:
            instance.sequences += sign
            instance.context_tokens += sign * hold.context_tokens
            instance.left_tokens = instance.left_tokens + sign * hold.left_tokens if instance.sequences else 0.0

    @staticmethod
    def _count_prompt(instance: Instance, hold: Hold, sign: int) -> None:
        instance.pending_tokens += sign * hold.pending_tokens
        instance.prefilling += sign * (hold.pending_tokens > 0)
        if hold.short:
            instance.short_tokens += sign * hold.pending_tokens
            instance.short_prefilling += sign * (hold.pending_tokens > 0)

    def seen(self, hold: Hold) -> None:
        """The instance has the blocks now: its own report counts them."""
        if not hold.seen:
            hold.seen = True
            instance = self.instances[hold.instance]
            instance.unseen_blocks -= hold.blocks
            if instance.peak_blocks < instance.used_blocks + hold.blocks:
                self.refresh(instance)

    def moving(self, hold: Hold, moves: bool) -> None:
        """KV of it begins to move, or has."""
        if hold.moving != moves:
            hold.moving = moves
            instance = self.instances[hold.instance]
            instance.flows += 1 if moves else -1
            instance.table.flows[instance.row] = instance.flows

    def progress(self, hold: Hold, pending_tokens: int) -> None:
        """So many prompt tokens of this hold are still to compute."""
        if pending_tokens != hold.pending_tokens:
            instance = self.instances[hold.instance]
            self._count_prompt(instance, hold, -1)
            hold.pending_tokens = pending_tokens
            self._count_prompt(instance, hold, 1)
            self.refresh(instance)

    @staticmethod
    def wrote(instance: Instance, hold: Hold, tokens: int, left_tokens: float) -> None:
        """A sequence grew there by so many tokens and is expected to grow by `left_tokens` more."""
        instance.context_tokens += tokens
        instance.left_tokens += left_tokens - hold.left_tokens
        hold.context_tokens += tokens
        hold.left_tokens = left_tokens
