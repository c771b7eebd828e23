"""Ledger: what an executor has of ours, and what of its KV is held for others. No executor, no clock.

The executor forgets a context request once it has answered: its KV stays until a peer has fetched it or its own time
limit has passed, and no call tells when. What tells is its count of used blocks: used blocks less those of active
requests are held. As that falls below what we know to be held, holds that were closed are gone, the first closed first.
Where the executor's numbers leave room for doubt the count errs towards held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trtpd.errors import InternalError
from trtpd.runtime.core.events import Load
from trtpd.runtime.engine.base import EngineRequest, Key, RequestKind
from trtpd.runtime.engine.tensorrt_llm.backend import Iteration, Use

SEEN_KEPT = 1 << 16
"""Ids that are remembered to have been in statistics: more than can be under way."""


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One request. `id` is the executor's.

    `blocks` at its longest · `alone`: no hand-off, though it was asked for one · `hand_off` once it is held · `closed`:
    it was cancelled or released, and its last event is due when the executor has let go · `given_up`: its last event
    has been told, and it is kept for the blocks it may still have · `emitted` tokens so far · `arrived`: its KV is here
    · `stats_id` is its number in the executor's statistics, once known · `use` in the last iteration that had it,
    `live` in the last one.
    """

    request: EngineRequest
    id: int
    stats_id: int | None
    blocks: int
    started_s: float
    alone: bool = False
    held: bool = False
    hand_off: bytes = b""
    closed_s: float | None = None
    held_s: float | None = None
    given_up: bool = False
    emitted: int = 0
    arrived: bool = False
    use: Use | None = None
    live: bool = False

    @property
    def key(self) -> Key:
        return self.request.key

    @property
    def closed(self) -> bool:
        return self.closed_s is not None

    @property
    def next_index(self) -> int:
        """Output index of the next token to be told."""
        return self.request.first_index + self.emitted

    @property
    def counted(self) -> bool:
        """Whether the router takes this load report to include it: from the offer, the pull's begin or the first token
        on. Before that the router counts it itself."""
        if self.request.kind is RequestKind.GENERATION_ONLY or self.closed:
            return True
        return self.held if self.request.kind is RequestKind.CONTEXT_ONLY else self.emitted > 0


class Ledger:
    """All entries, by key and by the executor's id."""

    def __init__(self, pool_blocks: int, tokens_per_block: int) -> None:
        self.pool_blocks = pool_blocks
        self._tokens_per_block = tokens_per_block
        self._entries: dict[int, Entry] = {}
        self._ids: dict[Key, int] = {}
        self._last: Iteration | None = None
        self._seen: dict[int, None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._ids

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, entry: Entry) -> None:
        if entry.id in self._entries or entry.key in self._ids:
            raise InternalError(f"the executor's id {entry.id}, or {entry.key}, is in use")
        self._entries[entry.id] = entry
        self._ids[entry.key] = entry.id

    def of(self, key: Key) -> Entry | None:
        found = self._ids.get(key)
        return None if found is None else self._entries[found]

    def by_id(self, request_id: int) -> Entry | None:
        return self._entries.get(request_id)

    def give_up(self, entry: Entry) -> None:
        """Its key is free again; the executor still has it."""
        entry.given_up = True
        del self._ids[entry.key]

    def remove(self, entry: Entry) -> None:
        """The executor has nothing of it."""
        del self._entries[entry.id]
        if self._ids.get(entry.key) == entry.id:
            del self._ids[entry.key]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._tokens_per_block)

    def take(self, iteration: Iteration) -> None:
        """Statistics of the next iteration."""
        self._last = iteration
        if iteration.pool_blocks:
            self.pool_blocks = min(self.pool_blocks, iteration.pool_blocks)
        for request_id in iteration.uses:
            self._seen.pop(request_id, None)
            self._seen[request_id] = None
        while len(self._seen) > SEEN_KEPT:
            del self._seen[next(iter(self._seen))]
        for entry in self._entries.values():
            use = None if entry.stats_id is None else iteration.uses.get(entry.stats_id)
            entry.live = use is not None and use.stage != "complete"
            entry.use = use or entry.use

    def gone(self, *, expired_s: float | None) -> list[Entry]:
        """Held entries that the last iteration shows to be gone, closed ones first. One that isn't closed can only have
        passed the executor's time limit, which those held since before `expired_s` have (None: there is no limit).
        Entries that no iteration has shown yet are not judged."""
        if self._last is None:
            return []
        known = [entry for entry in self._entries.values() if self._is_judged(entry)]
        held_blocks = max(0, self._last.used_blocks - self._active_blocks(self._last.uses.items()))
        freed = sum(entry.blocks for entry in known) - held_blocks
        found = []
        for entry in sorted(known, key=_close_order):
            due = entry.closed or (expired_s is not None and (entry.held_s or 0.0) < expired_s)
            if due and entry.blocks <= freed:
                freed -= entry.blocks
                found.append(entry)
        return found

    def _is_judged(self, entry: Entry) -> bool:
        assert self._last is not None, "asked after an iteration"
        if not entry.held or not entry.blocks or entry.stats_id not in self._seen:
            return False
        use = self._last.uses.get(entry.stats_id)
        return use is None or use.stage == "complete"

    def _active_blocks(self, uses: Iterable[tuple[int, Use]]) -> int:
        """At least so many blocks are those of active requests."""
        return sum(max(use.blocks, self.blocks_for(use.tokens)) for _, use in uses if use.stage == "active")

    def promised_blocks(self) -> int:
        """What can't be given to a new request. The executor may use more than is known here, for a request that was
        not told of yet, or one of its own."""
        counted = sum(entry.blocks for entry in self._entries.values() if entry.counted)
        if self._last is None or not any(entry.live for entry in self._entries.values()):
            return counted
        untold = [
            (entry.id, entry.use) for entry in self._entries.values() if entry.use is not None and not entry.counted
        ]
        return max(counted, self._last.used_blocks - self._active_blocks(untold))

    def load(self) -> Load:
        live = [entry for entry in self._entries.values() if not entry.held]
        running = [entry for entry in live if entry.emitted or (entry.use is not None and entry.use.stage != "queued")]
        last = self._last
        return Load(
            kv_blocks_free=max(0, self.pool_blocks - self.promised_blocks()),
            kv_blocks_held=sum(entry.blocks for entry in self._entries.values() if entry.held),
            running=len(running),
            waiting=len(live) - len(running),
            queued_tokens=sum(map(_uncomputed, live)),
            step_s=0.0 if last is None else last.seconds,
            step_tokens=0 if last is None else last.tokens,
        )

    def check_integrity(self) -> None:
        """Raises InternalError unless keys and ids agree."""
        for key, request_id in self._ids.items():
            entry = self._entries.get(request_id)
            if entry is None or entry.key != key or entry.given_up:
                raise InternalError(f"{key} is listed as the executor's request {request_id}, which is {entry}")
        listed = set(self._ids.values())
        if astray := [entry.id for entry in self._entries.values() if not entry.given_up and entry.id not in listed]:
            raise InternalError(f"the executor's requests {astray} have no key")


def _close_order(entry: Entry) -> tuple[bool, float]:
    return (not entry.closed, entry.closed_s if entry.closed_s is not None else entry.held_s or 0.0)


def _uncomputed(entry: Entry) -> int:
    """Prompt tokens still to be computed."""
    if entry.request.kind is RequestKind.GENERATION_ONLY or entry.emitted:
        return 0
    done = 0 if entry.use is None else entry.use.context_tokens
    return max(0, len(entry.request.prompt_ids) - done)
