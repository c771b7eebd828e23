"""What is known of each instance: health, load counted at dispatch, KV promised now and at its predicted
peak."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trtpd.errors import InternalError
from trtpd.runtime.core.events import Hello, Load, Role
from trtpd.runtime.core.timers import Timer

Side = Literal["prefill", "decode", "local"]
GroupKey = tuple[str, str, str, bool]
"""(model, fingerprint, pairing_key, whether its engine moves its KV itself): pairs are made within one group only."""

OPAQUE = "opaque"
"""The transport of engines that move their KV themselves: they exchange it with their like alone."""

HoldKey = tuple[int, int]
"""(request_id, attempt)."""


def blocks_for(tokens: int, tokens_per_block: int) -> int:
    return -(-tokens // tokens_per_block)


@dataclass(slots=True, eq=False)
class Hold:
    """What one attempt may have of one instance, from its placement until the instance's last answer.

    `blocks` is its predicted peak. `sent`: the instance was told (before that it is a credit, given back
    without a word). `seen`: the instance's own reports include it. `closing`: it was cancelled or withdrawn;
    `reminder` asks again if no answer comes.
    """

    instance: str
    request_id: int
    attempt: int
    side: Side
    blocks: int
    pending_tokens: int = 0
    sent: bool = False
    seen: bool = False
    closing: bool = False
    reminder: Timer | None = None

    @property
    def key(self) -> HoldKey:
        return (self.request_id, self.attempt)


class Instance:
    """One prefill, decode or mixed instance, with what was placed on it. Changed only by Cluster."""

    __slots__ = (
        "capacity_tokens",
        "draining",
        "ghosts",
        "healthy",
        "hello",
        "holds",
        "load",
        "losses_s",
        "peak_blocks",
        "pending_tokens",
        "quarantined_until_s",
        "quarantines",
        "unseen_blocks",
    )

    def __init__(self, hello: Hello) -> None:
        self.take_hello(hello)
        self.healthy = True
        self.draining = False
        self.load = Load(kv_blocks_free=hello.kv_blocks)
        self.holds: dict[HoldKey, Hold] = {}
        self.ghosts: list[Hold] = []
        self.peak_blocks = 0
        self.unseen_blocks = 0
        self.pending_tokens = 0
        self.losses_s: deque[float] = deque()
        self.quarantined_until_s = 0.0
        self.quarantines = 0

    def take_hello(self, hello: Hello) -> None:
        """`capacity_tokens`: the longest sequence it could ever hold, prompt and output together."""
        self.hello = hello
        self.capacity_tokens = min(hello.max_seq_tokens, hello.kv_blocks * hello.tokens_per_block)

    @property
    def name(self) -> str:
        return self.hello.instance

    @property
    def group_key(self) -> GroupKey:
        hello = self.hello
        return (hello.model, hello.fingerprint, hello.pairing_key, OPAQUE in hello.transports)

    @property
    def placed(self) -> int:
        return len(self.holds)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute: those sent from here, or what it reports if others send it work
        too."""
        return max(self.pending_tokens, self.load.queued_tokens)

    @property
    def committed_blocks(self) -> int:
        """Blocks that can't be promised again: what was placed, at its peak, or what is used and on its
        way."""
        used = self.hello.kv_blocks - self.load.kv_blocks_free + self.unseen_blocks
        return max(self.peak_blocks, used)

    def usable(self, now_s: float) -> bool:
        return self.healthy and not self.draining and now_s >= self.quarantined_until_s

    def has_room(self, blocks: int) -> bool:
        return self.committed_blocks + blocks <= self.hello.kv_blocks

    def blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self.hello.tokens_per_block)

    def state(self, now_s: float) -> str:
        """One word for status."""
        if not self.healthy:
            return "lost"
        if now_s < self.quarantined_until_s:
            return "quarantined"
        return "draining" if self.draining else "ready"


class Group:
    """Instances of one build that can exchange KV, by role."""

    __slots__ = ("decode", "mixed", "prefill")

    def __init__(self) -> None:
        self.prefill: dict[str, Instance] = {}
        self.decode: dict[str, Instance] = {}
        self.mixed: dict[str, Instance] = {}

    def of(self, role: Role) -> dict[str, Instance]:
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}[role]


class Cluster:
    """All instances ever seen, indexed by model and group; every reservation goes through here."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.groups: dict[str, dict[GroupKey, Group]] = {}
        self.links_down: dict[tuple[str, str], float] = {}
        self._last_usable_s: dict[str, float] = {}
        self._largest: dict[str, Instance] = {}

    def register(self, hello: Hello) -> Instance:
        """Takes in an instance, or takes it back. A new generation starts empty; its losses stay on record.

        One that was lost and comes back with the same generation may still run what was placed on it: those
        holds are in its `ghosts`, for the caller to close.
        """
        old = self.instances.get(hello.instance)
        if old is None:
            instance = Instance(hello)
        else:
            self._unlist(old)
            if old.hello.generation == hello.generation:
                instance = old
                instance.take_hello(hello)
                instance.healthy = True
            else:
                if old.holds:
                    raise InternalError(f"{hello.instance} registers anew with {len(old.holds)} holds of its past")
                instance = Instance(hello)
                instance.losses_s, instance.quarantines = old.losses_s, old.quarantines
                instance.quarantined_until_s = old.quarantined_until_s
        self.instances[hello.instance] = instance
        group = self.groups.setdefault(hello.model, {}).setdefault(instance.group_key, Group())
        group.of(hello.role)[hello.instance] = instance
        self._largest.clear()
        return instance

    def _unlist(self, instance: Instance) -> None:
        groups = self.groups[instance.hello.model]
        group = groups[instance.group_key]
        del group.of(instance.hello.role)[instance.name]
        if not (group.prefill or group.decode or group.mixed):
            del groups[instance.group_key]
            if not groups:
                del self.groups[instance.hello.model]

    def current(self, name: str, generation: str) -> Instance | None:
        """The instance, if this is its living generation."""
        instance = self.instances.get(name)
        if instance is None or not instance.healthy or instance.hello.generation != generation:
            return None
        return instance

    def lose(self, instance: Instance, now_s: float) -> list[Hold]:
        """Marks it lost and returns what was placed on it, which is placed there no more."""
        self.note_usable(instance.hello.model, now_s)
        instance.healthy = False
        holds = list(instance.holds.values())
        for hold in holds:
            self.release(hold)
        instance.ghosts = [hold for hold in holds if hold.sent]
        instance.load = Load(kv_blocks_free=instance.hello.kv_blocks)
        return holds

    def report(self, instance: Instance, load: Load) -> bool:
        """Takes in the instance's own report; True if it has more room than before."""
        more = load.kv_blocks_free > instance.load.kv_blocks_free
        instance.load = load
        return more

    def drain(self, instance: Instance, now_s: float) -> None:
        self.note_usable(instance.hello.model, now_s)
        instance.draining = True

    def quarantine(self, instance: Instance, until_s: float) -> None:
        """For an instance that was just lost."""
        instance.quarantines += 1
        instance.quarantined_until_s = until_s
        instance.losses_s.clear()

    def note_usable(self, model: str, now_s: float) -> None:
        """Remembers that `model` could be served until now, if it could. To be called before that may end."""
        if any(instance.usable(now_s) for instance in self.of_model(model)):
            self._last_usable_s[model] = now_s

    def last_usable_s(self, model: str, now_s: float) -> float | None:
        """When `model` was last servable; None if never."""
        self.note_usable(model, now_s)
        return self._last_usable_s.get(model)

    def of_model(self, model: str) -> Iterable[Instance]:
        for group in self.groups.get(model, {}).values():
            yield from group.prefill.values()
            yield from group.decode.values()
            yield from group.mixed.values()

    def largest(self, model: str) -> Instance | None:
        """The instance that could hold the longest sequence, whether or not it is up."""
        found = self._largest.get(model)
        if found is None:
            found = max(self.of_model(model), key=lambda instance: instance.capacity_tokens, default=None)
            if found is not None:
                self._largest[model] = found
        return found

    def usable_prefillers(self, model: str, now_s: float) -> list[Instance]:
        """Those that would prefill a new request: prefill and mixed instances, or whatever there is without
        them."""
        usable = [instance for instance in self.of_model(model) if instance.usable(now_s)]
        return [instance for instance in usable if instance.hello.role != "decode"] or usable

    def link_up(self, source: str, sink: str, now_s: float) -> bool:
        until_s = self.links_down.get((source, sink))
        if until_s is None:
            return True
        if now_s >= until_s:
            del self.links_down[(source, sink)]
            return True
        return False

    def reserve(self, instance: Instance, hold: Hold) -> None:
        if hold.key in instance.holds:
            raise InternalError(f"{instance.name} already holds attempt {hold.attempt} of request {hold.request_id}")
        instance.holds[hold.key] = hold
        instance.peak_blocks += hold.blocks
        instance.pending_tokens += hold.pending_tokens
        if not hold.seen:
            instance.unseen_blocks += hold.blocks

    def release(self, hold: Hold) -> None:
        instance = self.instances[hold.instance]
        if instance.holds.pop(hold.key, None) is not hold:
            raise InternalError(f"{hold.instance} doesn't hold attempt {hold.attempt} of request {hold.request_id}")
        instance.peak_blocks -= hold.blocks
        instance.pending_tokens -= hold.pending_tokens
        if not hold.seen:
            instance.unseen_blocks -= hold.blocks

    def seen(self, hold: Hold) -> None:
        """The instance has the blocks now: its own report counts them."""
        if not hold.seen:
            hold.seen = True
            self.instances[hold.instance].unseen_blocks -= hold.blocks

    def progress(self, hold: Hold, pending_tokens: int) -> None:
        """So many prompt tokens of this hold are still to compute."""
        self.instances[hold.instance].pending_tokens += pending_tokens - hold.pending_tokens
        hold.pending_tokens = pending_tokens

    def check_integrity(self) -> None:
        """Raises InternalError if the sums don't match the holds."""
        for name, instance in self.instances.items():
            holds = instance.holds.values()
            found = (instance.peak_blocks, instance.pending_tokens, instance.unseen_blocks)
            expected = (
                sum(hold.blocks for hold in holds),
                sum(hold.pending_tokens for hold in holds),
                sum(hold.blocks for hold in holds if not hold.seen),
            )
            if found != expected:
                raise InternalError(f"{name} counts (peak, pending, unseen) {found}, its holds say {expected}")
            if holds and not instance.healthy:
                raise InternalError(f"{name} is lost and still holds {list(instance.holds)}")
            if any(hold.instance != name or hold.key != key for key, hold in instance.holds.items()):
                raise InternalError(f"{name} lists holds that are not its own")
