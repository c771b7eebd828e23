"""One instance as the router knows it: health, what was placed on it, what it reports, what it costs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trtpd.runtime.core.events import Hello, Load
from trtpd.runtime.core.timers import Timer

if TYPE_CHECKING:
    from trtpd.runtime.core.ranks import Table

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

    `blocks` is its predicted peak. `context_tokens` and `left_tokens` are of a sequence that decodes here or
    will: what its KV holds, and how many tokens it is expected to write yet. `sent`: the instance was told
    (before that it is a credit, given back without a word). `seen`: the instance's own reports include it.
    `closing`: it was cancelled or withdrawn; `reminder` asks again if no answer comes. `moving`: KV of it is
    on its way. `writes`: its tokens come, one message like the other. `short`: its prompt is, so that it doesn't wait
    for long ones (see Capabilities.shorter_first).
    """

    instance: str
    request_id: int
    attempt: int
    side: Side
    blocks: int
    pending_tokens: int = 0
    context_tokens: int = 0
    left_tokens: float = 0.0
    sent: bool = False
    seen: bool = False
    closing: bool = False
    moving: bool = False
    writes: bool = False
    short: bool = False
    reminder: Timer | None = None

    @property
    def key(self) -> HoldKey:
        return (self.request_id, self.attempt)

    @property
    def decodes(self) -> bool:
        """It is one of the sequences that its instance decodes, or will."""
        return self.side != "prefill" and not self.closing


def group_key(hello: Hello) -> GroupKey:
    return (hello.model, hello.fingerprint, hello.pairing_key, OPAQUE in hello.transports)


class Instance:
    """One prefill, decode or mixed instance, with what was placed on it. Changed only by Cluster.

    `sequences`, `context_tokens` and `left_tokens` sum up those that decode here or will; `prefilling` are
    holds with prompt tokens to compute, `short_prefilling` those of short prompts, which have `short_tokens` of the
    `pending_tokens`; `flows` are transfers into or out of it. `factor` is how many times
    longer its steps take than predicted. `moves_out`: it drains, and what runs there is to go elsewhere.
    `host` is a number for its host; `jitter` decides between equals.
    """

    __slots__ = (
        "capacity_tokens",
        "context_tokens",
        "draining",
        "factor",
        "flows",
        "ghosts",
        "healthy",
        "hello",
        "holds",
        "host",
        "jitter",
        "left_tokens",
        "load",
        "losses_s",
        "moves_out",
        "peak_blocks",
        "pending_tokens",
        "prefilling",
        "quarantined_until_s",
        "quarantines",
        "reports",
        "row",
        "sequences",
        "short_prefilling",
        "short_tokens",
        "stale",
        "table",
        "unseen_blocks",
    )

    def __init__(self, hello: Hello, table: Table, *, host: int = 0, jitter: float = 0.0) -> None:
        self.host = host
        self.jitter = jitter
        self.table = table
        self.row = 0
        self.take_hello(hello)
        self.healthy = True
        self.draining = False
        self.moves_out = False
        self.load = Load(kv_blocks_free=hello.kv_blocks)
        self.holds: dict[HoldKey, Hold] = {}
        self.ghosts: list[Hold] = []
        self.peak_blocks = 0
        self.unseen_blocks = 0
        self.pending_tokens = 0
        self.prefilling = 0
        self.short_tokens = 0
        self.short_prefilling = 0
        self.sequences = 0
        self.context_tokens = 0
        self.left_tokens = 0.0
        self.flows = 0
        self.factor = 1.0
        self.reports = 0
        self.stale = False
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
        return group_key(self.hello)

    @property
    def placed(self) -> int:
        return len(self.holds)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute: those sent from here, or what it reports if others send it work
        too."""
        return max(self.pending_tokens, self.load.queued_tokens)

    @property
    def used_blocks(self) -> int:
        """Blocks in use by its own report, and those on their way to it."""
        return self.hello.kv_blocks - self.load.kv_blocks_free + self.unseen_blocks

    @property
    def committed_blocks(self) -> int:
        """Blocks that can't be promised again: what was placed, at its peak, or what is used and on its
        way."""
        return max(self.peak_blocks, self.used_blocks)

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
