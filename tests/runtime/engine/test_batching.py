from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.errors import EngineError
from trtpd.runtime.engine.batching import PlanState, Prefilling, StepLimits, Waiting, due, plan_step

LIMITS = StepLimits(max_step_tokens=100, chunk_tokens=40, max_batch=8)


def waiting(number: int, prompt_tokens: int, peak_blocks: int = 1, due: int = 0) -> Waiting:
    return Waiting(key=(number, 1), prompt_tokens=prompt_tokens, peak_blocks=peak_blocks, due=due)


def _dues(draw: st.DrawFn, count: int) -> list[int]:
    return sorted(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))


@st.composite
def states(draw) -> tuple[PlanState, StepLimits]:
    """Any state an engine can be in under these limits."""
    small = st.integers(1, 40)
    limits = StepLimits(max_step_tokens=draw(small), chunk_tokens=draw(small), max_batch=draw(st.integers(1, 10)))
    running = draw(st.integers(0, limits.max_running))
    decodes = draw(st.integers(0, running))
    prompts = draw(st.lists(st.tuples(small, small), min_size=running - decodes, max_size=running - decodes))
    queue = draw(st.lists(st.tuples(small, st.integers(1, 9)), max_size=12))
    joining = draw(st.integers(0, 5))
    state = PlanState(
        decoding=[(n, 0) for n in range(decodes)],
        joining=[(n, 1) for n in range(joining)],
        prefilling=[
            Prefilling(key=(n, 2), prompt_tokens=done + left, done_tokens=done, due=due_at)
            for n, ((done, left), due_at) in enumerate(zip(prompts, _dues(draw, len(prompts)), strict=True))
        ],
        waiting=[
            Waiting(key=(n, 3), prompt_tokens=t, peak_blocks=b, due=due_at)
            for n, ((t, b), due_at) in enumerate(zip(queue, _dues(draw, len(queue)), strict=True))
        ],
        available_blocks=draw(st.integers(0, 30)),
    )
    return state, limits


@given(states())
def test_no_limit_is_broken(case):
    state, limits = case
    plan = plan_step(state, limits)
    assert plan.tokens <= limits.max_step_tokens
    assert all(1 <= part.tokens <= limits.chunk_tokens for part in plan.prefills)
    running = len(state.decoding) + len(state.prefilling) + len(plan.joined) + len(plan.admitted)
    assert running <= limits.max_batch
    peaks = {candidate.key: candidate.peak_blocks for candidate in state.waiting}
    assert sum(peaks[key] for key in plan.admitted) <= state.available_blocks


@given(states())
def test_every_running_sequence_decodes_and_work_is_never_left_undone(case):
    state, limits = case
    plan = plan_step(state, limits)
    assert plan.decodes[: len(state.decoding)] == tuple(state.decoding)
    assert plan.decodes[len(state.decoding) :] == plan.joined
    if state.decoding or state.joining or state.prefilling:
        assert plan.tokens > 0
    elif state.waiting and state.waiting[0].peak_blocks <= state.available_blocks:
        assert plan.admitted


@given(states())
def test_each_queue_is_served_from_its_head(case):
    state, limits = case
    plan = plan_step(state, limits)
    assert plan.joined == tuple(state.joining[: len(plan.joined)])
    assert plan.admitted == tuple(candidate.key for candidate in state.waiting[: len(plan.admitted)])
    served = [part.key for part in plan.prefills]
    line = sorted([*state.prefilling, *state.waiting], key=lambda one: one.due)
    order = [one.key for one in line if one.key in plan.admitted or one in state.prefilling]
    assert served == order[: len(served)]


@given(states())
def test_parts_go_on_where_the_last_one_ended(case):
    state, limits = case
    where = {s.key: (s.done_tokens, s.prompt_tokens) for s in state.prefilling}
    where |= {candidate.key: (0, candidate.prompt_tokens) for candidate in state.waiting}
    for part in plan_step(state, limits).prefills:
        done, total = where[part.key]
        assert part.start == done
        assert part.last == (done + part.tokens == total)
        assert done + part.tokens <= total


@given(states())
def test_the_same_state_gives_the_same_plan(case):
    assert plan_step(*case) == plan_step(*case)


def test_decodes_come_before_prompts_in_the_budget():
    state = PlanState(
        decoding=[(n, 1) for n in range(5)],
        prefilling=[Prefilling(key=(9, 1), prompt_tokens=80, done_tokens=10)],
        waiting=[waiting(10, 70), waiting(11, 70)],
        available_blocks=10,
    )
    plan = plan_step(state, LIMITS)
    assert len(plan.decodes) == 5
    assert [(part.key[0], part.start, part.tokens) for part in plan.prefills] == [(9, 10, 40), (10, 0, 40), (11, 0, 15)]


def test_the_first_in_line_that_does_not_fit_stops_those_behind_it():
    state = PlanState(waiting=[waiting(1, 5, 2), waiting(2, 5, 9), waiting(3, 5, 1)], available_blocks=10)
    plan = plan_step(state, LIMITS)
    assert plan.admitted == ((1, 1),)
    assert plan.short_blocks == 9


def test_a_short_prompt_overtakes_a_long_one_until_that_is_due():
    long = Prefilling(key=(1, 1), prompt_tokens=400, done_tokens=40, due=due(0, 400))
    for computed_tokens, first in ((40, 2), (740, 2), (780, 1)):
        short = waiting(2, 20, due=due(computed_tokens, 20))
        plan = plan_step(PlanState(prefilling=[long], waiting=[short], available_blocks=9), LIMITS)
        assert plan.prefills[0].key[0] == first


def test_nobody_is_let_in_for_a_budget_that_another_takes():
    long = Prefilling(key=(1, 1), prompt_tokens=400, done_tokens=40, due=due(0, 400))
    limits = StepLimits(max_step_tokens=40, chunk_tokens=40, max_batch=8)
    state = PlanState(prefilling=[long], waiting=[waiting(2, 20, due=900), waiting(3, 20, due=901)], available_blocks=9)
    assert plan_step(state, limits).admitted == ()
    state = PlanState(prefilling=[long], waiting=[waiting(2, 20, due=50), waiting(3, 30, due=60)], available_blocks=9)
    plan = plan_step(state, limits)
    assert [(part.key[0], part.tokens) for part in plan.prefills] == [(2, 20), (3, 20)]


def test_a_transferred_sequence_joins_before_a_new_prompt_is_admitted():
    limits = StepLimits(max_step_tokens=100, chunk_tokens=40, max_batch=2)
    state = PlanState(decoding=[(1, 1)], joining=[(2, 1)], waiting=[waiting(3, 5)], available_blocks=10)
    plan = plan_step(state, limits)
    assert (plan.joined, plan.admitted, plan.short_blocks) == (((2, 1),), (), 0)


@pytest.mark.parametrize("name", ["max_step_tokens", "chunk_tokens", "max_batch"])
def test_limits_below_one_are_refused(name):
    with pytest.raises(EngineError, match=name):
        StepLimits(**{"max_step_tokens": 1, "chunk_tokens": 1, "max_batch": 1, name: 0})
