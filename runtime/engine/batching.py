"""What one engine step computes: continuous batching with chunked prefill, as a pure function.

Engines and simulated workers plan with the same function; only what executes the plan differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtpd.errors import EngineError
from trtpd.runtime.engine.base import Key

OVERTAKEN = 2
"""A prompt may be overtaken by shorter ones until so many times its own tokens were computed since it came."""


def due(computed_tokens: int, prompt_tokens: int) -> int:
    """A prompt's place in the line, the smallest first, of one that comes when the engine has computed so many prompt
    tokens in all: a deadline in proportion to its length. One that comes later goes first only if it is shorter by more
    than 1 / OVERTAKEN of what has been computed since; nothing that comes once OVERTAKEN times its own length was
    computed does."""
    return computed_tokens + OVERTAKEN * prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """`max_step_tokens` in one step, `chunk_tokens` of one prompt in one step, `max_batch` sequences at
    once."""

    max_step_tokens: int
    chunk_tokens: int
    max_batch: int

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "chunk_tokens", "max_batch"):
            if getattr(self, name) < 1:
                raise EngineError(f"step limits: {name} is {getattr(self, name)}; it must be at least 1. Build again")

    @property
    def max_running(self) -> int:
        """Sequences that may run at once: with more than `max_step_tokens` some would get no token in a
        step."""
        return min(self.max_batch, self.max_step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling:
    """An admitted sequence: KV of `done_tokens` of its `prompt_tokens` is there. `due`: see there."""

    key: Key
    prompt_tokens: int
    done_tokens: int
    due: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A sequence not admitted yet. `peak_blocks` is the most it can ever need. `due`: see there."""

    key: Key
    prompt_tokens: int
    peak_blocks: int
    due: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """What the planner sees, all in the order of arrival; of those that wait at least the ones due first.

    `joining` have their KV (it came by transfer) and wait only for a place. `available_blocks` are neither
    held nor promised to a running sequence's growth.
    """

    decoding: Sequence[Key] = ()
    joining: Sequence[Key] = ()
    prefilling: Sequence[Prefilling] = ()
    waiting: Sequence[Waiting] = ()
    available_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPart:
    """`tokens` prompt tokens of one sequence from position `start` on; `last` ends the prompt."""

    key: Key
    start: int
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """`decodes` compute one token each. `joined` and `admitted` are those that start with this step; their
    first work is among `decodes` and `prefills`. `short_blocks` is what the first in line needs at its peak
    when blocks are what it waits for, else 0: nobody who came later should take them."""

    decodes: tuple[Key, ...] = ()
    prefills: tuple[PrefillPart, ...] = ()
    joined: tuple[Key, ...] = ()
    admitted: tuple[Key, ...] = ()
    short_blocks: int = 0

    @property
    def tokens(self) -> int:
        decodes = len(self.decodes)
        return decodes + sum(part.tokens for part in self.prefills) if self.prefills else decodes


def plan_step(state: PlanState, limits: StepLimits) -> StepPlan:
    """Decodes first, then prompts in the order in which they are due, those under way before new ones.

    A sequence is admitted only with room for its peak, so that a running one never dies for lack of blocks.
    The first in line that does not fit stops the new ones behind it.
    """
    places = limits.max_running - len(state.decoding) - len(state.prefilling)
    joined = tuple(state.joining[: max(places, 0)])
    places -= len(joined)
    decodes = (*state.decoding, *joined)
    budget = limits.max_step_tokens - len(decodes)
    prefills: list[PrefillPart] = []
    admitted: list[Key] = []
    blocks, short_blocks, stopped = state.available_blocks, 0, False
    line: list[Prefilling | Waiting] = [*state.prefilling, *state.waiting]
    for sequence in sorted(line, key=lambda one: one.due):
        if isinstance(sequence, Prefilling):
            done_tokens = sequence.done_tokens
        elif stopped:
            continue
        elif sequence.peak_blocks > blocks:
            short_blocks, stopped = sequence.peak_blocks, True
            continue
        elif places <= 0 or budget <= 0:
            stopped = True
            continue
        else:
            admitted.append(sequence.key)
            done_tokens, places, blocks = 0, places - 1, blocks - sequence.peak_blocks
        if budget > 0:
            prefills.append(_part(sequence.key, done_tokens, sequence.prompt_tokens, budget, limits))
            budget -= prefills[-1].tokens
    return StepPlan(
        decodes=decodes,
        prefills=tuple(prefills),
        joined=joined,
        admitted=tuple(admitted),
        short_blocks=short_blocks,
    )


def _part(key: Key, done_tokens: int, prompt_tokens: int, budget: int, limits: StepLimits) -> PrefillPart:
    left = prompt_tokens - done_tokens
    tokens = min(left, budget, limits.chunk_tokens)
    return PrefillPart(key=key, start=done_tokens, tokens=tokens, last=tokens == left)
