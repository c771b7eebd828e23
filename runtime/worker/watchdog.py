"""A group whose ranks don't all go on is ended: by whichever rank notices first that another is stopped, or that a
step takes longer than any can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from trtpd.runtime.worker.board import Board, RankRow, RankState

LOOK_EVERY_S = 0.25
SILENT_S = 5.0
TURN_S = 0.5
"""How much longer than the rank before it a rank waits before it ends the group, so that one of them does."""


class Judge:
    """Decides, from what the board says at each look, whether the group must end. No clock, no board.

    Only time in which this process looked counts against the others: if it was stopped itself, they weren't silent.
    """

    def __init__(self, rank: int, *, silent_s: float, now_s: float) -> None:
        self._rank = rank
        self._silent_s = silent_s
        self._last_s = now_s
        self._awake_s = 0.0
        self._beats: dict[int, tuple[int, float]] = {}
        self._step: tuple[int, float] | None = None

    def look(self, states: Sequence[RankState], now_s: float) -> str | None:
        """Why the group must end, or None."""
        self._awake_s += min(now_s - self._last_s, 2 * LOOK_EVERY_S)
        self._last_s = now_s
        return self._silent(states) or self._overdue(states)

    def _silent(self, states: Sequence[RankState]) -> str | None:
        allowed_s = self._silent_s + TURN_S * self._rank
        for state in states:
            former = self._beats.get(state.rank)
            if former is None or former[0] != state.beats or not state.serving:
                self._beats[state.rank] = former = (state.beats, self._awake_s)
            silent_s = self._awake_s - former[1]
            if silent_s > allowed_s and state.rank != self._rank:
                return f"rank {state.rank} (pid {state.pid}) has not run for {silent_s:.1f} s: it is stopped or starved"
        return None

    def _overdue(self, states: Sequence[RankState]) -> str | None:
        own = states[self._rank]
        if own.step_began_ns is None:
            self._step = None
            return None
        if self._step is None or self._step[0] != own.step_began_ns:
            self._step = (own.step_began_ns, self._awake_s)
        taken_s = self._awake_s - self._step[1]
        if taken_s <= own.step_limit_s + TURN_S * self._rank:
            return None
        here = [state for state in states if state.pid]
        behind = min(state.meetings for state in here)
        late = [f"rank {state.rank} (pid {state.pid})" for state in here if state.meetings == behind]
        who = f"{' and '.join(late)} hung" if len(late) < len(here) else "no rank here is behind the others"
        return f"a step has taken {taken_s:.0f} s, more than the {own.step_limit_s:.0f} s it may: {who}"


class Watchdog:
    """A thread that beats for its rank and looks after the others. `end(reason)` is called in it, at most once, and
    must not return."""

    def __init__(
        self,
        board: Board,
        row: RankRow,
        rank: int,
        end: Callable[[str], object],
        *,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._row = row
        self._end = end
        self._clock = clock
        self._judge = Judge(rank, silent_s=silent_s, now_s=clock())
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._row.beat()
            reason = self._judge.look(self._board.states(), self._clock())
            if reason is not None:
                self._end(reason)
            time.sleep(LOOK_EVERY_S)
