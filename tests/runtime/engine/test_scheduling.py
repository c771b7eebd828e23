"""An engine under any order of submits, steps, cancels and reservations: nothing is lost, doubled or wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from tests.runtime.engine import tiny
from tests.runtime.engine.driver import CONTEXT_ONLY, GREEDY, SEEDED, WHOLE, Driver, prompt, request

from trtpd.runtime.engine.base import PrefillDone

BEGINNINGS = [prompt(48, seed) for seed in range(2)]
BLOCKS = 9
CONFIG = tiny.config(tiny.architecture(), engine="emulated", tokens_per_block=8)


class Traffic(RuleBasedStateMachine):
    """An emulated engine with few blocks beside one that computes each request alone and shares nothing."""

    @initialize(growth_kept=st.sampled_from([0.0, 0.3, 1.0]), keep=st.sampled_from([None, 0, 3]))
    def start(self, growth_kept: float, keep: int | None) -> None:
        self.number = 0
        self.requests: dict[tuple[int, int], list[int]] = {}
        self.cancelled: set[tuple[int, int]] = set()
        self.reserved: list[tuple[int, int]] = []
        profile = replace(
            tiny.PROFILE, kv_blocks=BLOCKS, growth_kept=growth_kept, prefix_cache=True, prefix_cache_blocks=keep
        )
        self.tight = Driver(tiny.load_emulated(replace(CONFIG, profile=profile)))
        self.plain = Driver(tiny.load_emulated(replace(CONFIG, profile=replace(tiny.PROFILE, kv_blocks=32))))

    @rule(
        common=st.integers(0, 48),
        beginning=st.sampled_from(BEGINNINGS),
        own=st.integers(1, 12),
        tokens=st.integers(1, 12),
        sampling=st.sampled_from([GREEDY, SEEDED]),
        held=st.booleans(),
        priority=st.integers(0, 1),
    )
    def submit(self, common, beginning, own, tokens, sampling, held, priority) -> None:
        self.number += 1
        ids = (*beginning[:common], *prompt(own, self.number))
        what = request(self.number, ids, max_tokens=tokens, sampling=sampling)
        self.requests[what.key] = self.plain.run(what)
        self.tight.submit(replace(what, kind=CONTEXT_ONLY if held else WHOLE, priority=priority))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.tight.step()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        alive = sorted(self.tight.events.keys() - self.tight.ended)
        if alive:
            key = data.draw(st.sampled_from(alive))
            self.tight.engine.cancel(key)
            self.cancelled.add(key)

    @rule(tokens=st.integers(1, 40), beginning=st.sampled_from(BEGINNINGS))
    def reserve(self, tokens: int, beginning: tuple[int, ...]) -> None:
        self.number += 1
        key = (self.number, 2)
        ids = beginning[:tokens]
        blocks = self.tight.kv.reserve(key, len(ids), peak_tokens=len(ids) + 4, prompt_ids=ids)
        if blocks is not None:
            assert self.tight.kv.present_blocks(key) * 8 <= len(ids)
            self.reserved.append(key)

    @rule()
    def give_back(self) -> None:
        if self.reserved:
            self.tight.kv.free(self.reserved.pop(0))

    @rule()
    def release(self) -> None:
        for key in self.tight.events.keys() - self.tight.ended:
            if self.tight.of(key, PrefillDone):
                self.tight.engine.release(key)

    @invariant()
    def adds_up_and_is_right_so_far(self) -> None:
        if not hasattr(self, "tight"):
            return
        self.tight.engine.check_integrity()
        for key, expected in self.requests.items():
            if done := self.tight.of(key, PrefillDone):
                assert done[0].token == expected[0]
            else:
                output = self.tight.output(key)
                assert output == expected[: len(output)]

    def teardown(self) -> None:
        if not hasattr(self, "tight"):
            return
        while self.reserved:
            self.give_back()
        for _ in range(600):
            self.release()
            if self.tight.ended.issuperset(self.tight.events):
                break
            self.tight.step()
        for key, expected in self.requests.items():
            assert key in self.tight.ended, "a request never ended"
            if not self.tight.of(key, PrefillDone) and key not in self.cancelled:
                assert self.tight.output(key) == expected
        assert self.tight.step().load.kv_blocks_free == BLOCKS
        for driver in (self.tight, self.plain):
            driver.engine.shutdown()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestLongTraffic(Traffic.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
