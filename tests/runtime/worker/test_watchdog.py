"""When a group must end, and what its board tells."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtpd.kv_transfer.pool_file import start_ticks
from trtpd.runtime.worker.board import TOKEN_LIMIT_S, Board, RankState
from trtpd.runtime.worker.watchdog import LOOK_EVERY_S, TURN_S, Judge

SILENT_S = 5.0
IDLE = RankState(
    rank=0, pid=100, start_ticks=1, beats=0, meetings=7, step_began_ns=None, step_limit_s=60.0, serving=True
)


class Looks:
    """A judge that looks as often as a watchdog does; `beating` ranks beat each time."""

    def __init__(self, rank: int, states: list[RankState]) -> None:
        self.now_s = 1000.0
        self.states = states
        self.judge = Judge(rank, silent_s=SILENT_S, now_s=self.now_s)

    def until_s(self, seconds: float, *beating: int, gap_s: float = LOOK_EVERY_S) -> str | None:
        """The first verdict within `seconds`."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += gap_s
            self.states = [replace(state, beats=state.beats + (state.rank in beating)) for state in self.states]
            reason = self.judge.look(self.states, self.now_s)
            if reason is not None:
                return reason
        return None


def group(size: int = 3, **changes: Any) -> list[RankState]:
    return [replace(IDLE, rank=rank, pid=100 + rank, **changes) for rank in range(size)]


def test_ranks_that_run_are_left_alone_for_ever():
    assert Looks(0, group()).until_s(1000.0, 0, 1, 2) is None


def test_a_rank_that_no_longer_runs_is_named():
    looks = Looks(0, group())
    assert looks.until_s(SILENT_S - 1, 0, 1) is None
    reason = looks.until_s(2.0, 0, 1)
    assert reason is not None
    assert "rank 2 (pid 102) has not run for 5." in reason


def test_the_next_rank_ends_the_group_only_if_the_one_before_it_does_not():
    assert Looks(1, group()).until_s(SILENT_S + TURN_S - 0.1, 0, 1) is None
    assert Looks(1, group()).until_s(SILENT_S + TURN_S + 1.0, 0, 1) is not None


def test_a_watcher_that_was_stopped_itself_blames_nobody():
    looks = Looks(0, group())
    assert looks.until_s(100.0, 0, gap_s=20.0) is None
    assert looks.until_s(100.0, 0, 1, 2) is None


def test_ranks_that_load_or_leave_are_not_missed():
    looks = Looks(0, group(serving=False))
    assert looks.until_s(100.0, 0) is None
    looks.states = [replace(state, serving=True) for state in looks.states]
    assert looks.until_s(SILENT_S - 1, 0) is None


def test_a_step_beyond_its_limit_names_the_rank_that_is_behind():
    states = group(step_began_ns=5)
    states[1] = replace(states[1], meetings=6)
    looks = Looks(0, states)
    assert looks.until_s(59.0, 0, 1, 2) is None
    reason = looks.until_s(2.0, 0, 1, 2)
    assert reason is not None
    assert reason.endswith("more than the 60 s it may: rank 1 (pid 101) hung")


def test_a_step_in_which_all_wait_names_none():
    reason = Looks(0, group(step_began_ns=5)).until_s(61.0, 0, 1, 2)
    assert reason is not None
    assert reason.endswith("no rank here is behind the others")


def test_ranks_of_other_hosts_are_not_said_to_be_behind():
    states = group(step_began_ns=5)
    states[2] = replace(states[2], pid=0, meetings=0, serving=False)
    reason = Looks(0, states).until_s(61.0, 0, 1)
    assert reason is not None
    assert reason.endswith("no rank here is behind the others")


def test_each_step_has_its_own_time():
    looks = Looks(0, group(step_began_ns=1))
    for number in range(2, 6):
        assert looks.until_s(59.0, 0, 1, 2) is None
        looks.states = [replace(state, step_began_ns=number) for state in looks.states]


def test_a_board_shows_every_rank_what_each_has_written(tmp_path: Path):
    board = Board.make(tmp_path / "board", 2)
    assert [state.pid for state in board.states()] == [0, 0]
    row = Board(tmp_path / "board").join(1, step_limit_s=2.0)
    row.beat()
    row.serve(True)
    row.began(30)
    row.met()
    row.met()
    state = board.states()[1]
    assert (state.pid, state.start_ticks) == (os.getpid(), start_ticks(os.getpid()))
    assert (state.beats, state.meetings, state.serving) == (1, 2, True)
    assert state.step_began_ns is not None
    assert state.step_limit_s == pytest.approx(2.0 + 30 * TOKEN_LIMIT_S)
    row.ended()
    assert board.states()[1].step_began_ns is None
    assert board.states()[0].pid == 0
