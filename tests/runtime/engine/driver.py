"""Driver: runs an engine through the seam and holds it to its promises at every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from trtpd.kv_transfer.ranks import RankPools
from trtpd.runtime.core.events import Drained, Rejected, Tokens
from trtpd.runtime.engine.base import (
    Engine,
    EngineEvent,
    EngineRequest,
    Key,
    PagedKV,
    PrefillBegan,
    PrefillDone,
    RequestKind,
    Sampling,
    SelfMovingEngine,
    StepReport,
)

Event = TypeVar("Event", bound=EngineEvent)
GREEDY = Sampling()
SEEDED = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=1234)
CONTEXT_ONLY, GENERATION_ONLY, WHOLE = (
    RequestKind.CONTEXT_ONLY,
    RequestKind.GENERATION_ONLY,
    RequestKind.CONTEXT_AND_GENERATION,
)


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(f"{seed} {tokens}").choices(range(199), k=tokens))


def request(
    number: int,
    ids: tuple[int, ...],
    *,
    kind: RequestKind = WHOLE,
    max_tokens: int = 12,
    sampling: Sampling = GREEDY,
    first_index: int = 0,
    first_token: int | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=number,
        attempt=1,
        kind=kind,
        prompt_ids=ids,
        max_tokens=max_tokens,
        sampling=sampling,
        first_index=first_index,
        first_token=first_token,
    )


def ends(event: EngineEvent) -> bool:
    return isinstance(event, Rejected | Drained) or (isinstance(event, Tokens) and event.finish is not None)


@dataclass
class Driver:
    """Polls an engine, checks it after every step and that events keep to the life of their key."""

    engine: Engine
    events: dict[Key, list[EngineEvent]] = field(default_factory=dict)
    ended: set[Key] = field(default_factory=set)

    @property
    def kv(self) -> PagedKV:
        assert self.engine.kv is not None
        return self.engine.kv

    def reserve(self, key: Key, tokens: int, *, peak_tokens: int | None = None) -> int | None:
        """How many blocks were reserved, None if there was no room."""
        blocks = self.kv.reserve(key, tokens, peak_tokens=peak_tokens)
        return None if blocks is None else len(blocks)

    def submit(self, what: EngineRequest) -> Key:
        self.engine.submit(what)
        self.events[what.key] = []
        return what.key

    def step(self) -> StepReport:
        """One poll; an engine that steps in threads of its own is given a little time."""
        report = self.engine.poll(0.0 if self.engine.kv is not None else 0.05)
        self.engine.check_integrity()
        for event in report.events:
            key = (event.request_id, event.attempt)
            assert key not in self.ended, f"{event} after the last event of its key"
            self.events[key].append(event)
            if ends(event):
                self.ended.add(key)
        return report

    def until(self, done: Callable[[], bool], *, steps: int = 400) -> None:
        for _ in range(steps):
            if done():
                return
            self.step()
        raise AssertionError(f"not done after {steps} steps: {self.events}")

    def finish(self, *keys: Key) -> None:
        self.until(lambda: self.ended.issuperset(keys or self.events))

    def of(self, key: Key, kind: type[Event]) -> list[Event]:
        return [event for event in self.events[key] if isinstance(event, kind)]

    def output(self, key: Key) -> list[int]:
        """Tokens of the key's Tokens events, which must follow each other without a gap."""
        found: list[int] = []
        first: int | None = None
        for event in self.of(key, Tokens):
            first = event.first_index if first is None else first
            assert event.first_index == first + len(found)
            found.extend(event.ids)
        return found

    def run(self, what: EngineRequest) -> list[int]:
        key = self.submit(what)
        self.finish(key)
        return self.output(key)

    def prefill(self, what: EngineRequest) -> PrefillDone:
        """Runs a context_only request until it is held."""
        key = self.submit(what)
        self.until(lambda: bool(self.of(key, PrefillDone)))
        return self.of(key, PrefillDone)[0]


def blocks_of(driver: Driver, key: Key) -> list[int]:
    return list(driver.of(key, PrefillBegan)[0].blocks)


def copy_blocks(source: Driver, blocks: list[int], sink: Driver, into: list[int]) -> None:
    """On every rank."""
    groups = [RankPools.of_group(driver.kv.pool, driver.kv.others) for driver in (source, sink)]
    for theirs, ours in zip(*groups, strict=True):
        ours.grid[:, into] = theirs.grid[:, blocks]
    for group in groups:
        group.close_attached()


def hand_over(source: Driver, sink: Driver, what: EngineRequest) -> list[int]:
    """Prefill on one engine, the rest on another; the whole output. Where engines don't move their KV themselves its
    blocks are copied by hand."""
    done = source.prefill(replace(what, kind=CONTEXT_ONLY))
    if done.finish is not None:
        return [done.token]
    rest = replace(what, kind=GENERATION_ONLY, first_token=done.token)
    if isinstance(source.engine, SelfMovingEngine):
        output = sink.run(replace(rest, hand_off=source.engine.hand_off_of(what.key)))
        source.engine.release(what.key)
        source.finish(what.key)
        return [done.token, *output]
    reserved = sink.kv.reserve(what.key, len(what.prompt_ids), peak_tokens=len(what.prompt_ids) + what.max_tokens)
    assert reserved is not None
    theirs = blocks_of(source, what.key)
    copy_blocks(source, theirs, sink, list(reserved[: len(theirs)]))
    source.engine.release(what.key)
    source.finish(what.key)
    return [done.token, *sink.run(rest)]
