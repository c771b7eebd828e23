"""The leader: drives one engine and both sides of its hand-offs, and speaks for them to the router.

`Leader.turn` is the loop: take commands, run one engine step, see to transfers and leases, send ONE message.
All of it runs in the engine thread. One rank or a whole tensor-parallel group is behind the Engine, KVSource
and KVSink alike; nothing here counts ranks. What becomes of each attempt is job_table.py's.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from trtpd.errors import EngineError, ServeError
from trtpd.kv_transfer.base import Key, KVSink, KVSource, Visits
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import Engine
from trtpd.runtime.worker.garbage import Collector
from trtpd.runtime.worker.intake import NewWork
from trtpd.runtime.worker.job_table import JobTable
from trtpd.runtime.worker.jobs import latest_chunks
from trtpd.runtime.worker.leader_link import Dismissed, InboxItem, Registered, SessionEnded
from trtpd.runtime.worker.local import LOCAL_IDS, LocalDesk, Snapshot
from trtpd.runtime.worker.messages import (
    CancelWork,
    DrainWork,
    PullWork,
    StepMessage,
    SubmitWork,
    SwitchWork,
    WithdrawWork,
    Work,
    step_message,
)
from trtpd.runtime.worker.roles import RoleSwitch

log = logging.getLogger(__name__)

IDLE_S = 0.1
REPORT_EVERY_S = 0.5
SWEEP_EVERY_S = 0.25
ABANDON_S = 5.0
NO_VISITS = Visits()


class Link(Protocol):
    """What the leader needs of its LeaderLink."""

    busy_since_s: float | None

    def send(self, message: StepMessage, generation: str) -> None: ...

    def drain(self) -> Iterator[InboxItem]: ...

    def check(self) -> None: ...


class Leader:
    """One engine's leader. `source` is there where others pull KV from it, `sink` where it pulls.

    The sink and the link must call `engine.wake` when they have something.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        source: KVSource | None,
        sink: KVSink | None,
        link: Link,
        local: LocalDesk | None = None,
        role_switch: RoleSwitch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises EngineError for a sink with an engine that nothing can be pulled into."""
        self.draining = False
        self._engine = engine
        self._source = source
        self._jobs = JobTable(engine, source, sink, tell=self._emit)
        self._link = link
        self._local = local
        self._role_switch = role_switch
        self._clock = clock
        self._session: str | None = None
        self._former: set[Key] = set()
        self._outbox: list[core.InstanceEvent] = []
        self._load: core.Load | None = None
        self._report_s = 0.0
        self._sweep_s = 0.0
        self._stop_s: float | None = None
        self._collector = Collector()

    def run(self) -> None:
        """Turns until `request_stop` and then until idle or out of grace.

        Raises EngineError when the engine can't go on, ServeError when the router refuses this leader; the
        router has been told of every job lost.
        """
        try:
            while self._stop_s is None or (not self.idle and self._clock() < self._stop_s):
                self.turn()
            self._abandon()
        except EngineError as error:
            self._give_up(error)
            raise

    def turn(self, timeout_s: float = IDLE_S) -> None:
        """One engine step and all around it; waits up to `timeout_s` when there is nothing to do."""
        self._take_commands()
        if self._local is not None and self._local.snapshot is not None:
            # Who gets an answer of this turn's step finds its job counted.
            self._local.snapshot = replace(self._local.snapshot, jobs=len(self._jobs))
        load = self._step_engine(timeout_s)
        self._jobs.take_pulls()
        self._end_overdue()
        self._report(load)
        if self.draining and self._role_switch is not None:
            self._role_switch.look(self._clock(), idle=self.idle)

    def request_stop(self, grace_s: float) -> None:
        """Takes nothing new and ends `run` when idle, or after `grace_s`. May be called in a signal
        handler."""
        self.draining = True
        stop_s = self._clock() + grace_s
        self._stop_s = stop_s if self._stop_s is None else min(self._stop_s, stop_s)

    @property
    def idle(self) -> bool:
        """Nothing runs, is held, or moves."""
        return self._jobs.idle

    def check_integrity(self) -> None:
        """Raises InternalError if jobs, holds, pulls and the engine's blocks don't add up."""
        self._engine.check_integrity()
        self._jobs.check_integrity()

    def _take_commands(self) -> None:
        self._link.check()
        if self._local is not None:
            for command in self._local.commands():
                self.apply(command)
        if self._awaits_former():
            return
        for item in self._link.drain():
            self._take(item)
            if self._awaits_former():
                return

    def _awaits_former(self) -> bool:
        """Whether work of a session that is over is still here. Nothing new is taken up before it is gone, since the
        next router may use the same ids."""
        self._former &= self._jobs.keys()
        return bool(self._former)

    def _take(self, item: InboxItem) -> None:
        if isinstance(item, Registered):
            log.info("registered with the router of epoch %s as generation %s", item.epoch, item.generation)
            self._session, self._load = item.generation, None
        elif isinstance(item, SessionEnded):
            self._leave_session(item.reason)
        elif isinstance(item, Dismissed):
            raise ServeError(f"the router refuses this worker: {item.reason}")
        elif _request_id(item) >= LOCAL_IDS:
            log.error("the router sent a %s with an id reserved for local requests", type(item).__name__)
        else:
            self.apply(item)

    def _leave_session(self, reason: str) -> None:
        """Ends all of the session's work, silently."""
        log.warning("session over: %s; dropping its %d jobs", reason, len(self._jobs))
        self._session = None
        self._former = {key for key in list(self._jobs.keys()) if key[0] < LOCAL_IDS}
        for key in list(self._former):
            self._jobs.end(key)

    def _step_engine(self, timeout_s: float) -> core.Load:
        if self._outbox or (self._local is not None and self._local.pending):
            timeout_s = 0.0
        self._link.busy_since_s = self._clock() if self._jobs else None
        report = self._engine.poll(timeout_s)
        self._link.busy_since_s = None
        for event in latest_chunks(report.events):
            self._jobs.on_engine(event)
        return self._with_visits(report.load)

    def _with_visits(self, load: core.Load) -> core.Load:
        visits = self._source.visits() if self._source is not None else NO_VISITS
        return load if visits == NO_VISITS else dataclasses.replace(load, **dataclasses.asdict(visits))

    def _report(self, load: core.Load) -> None:
        """Sends the step's one message, if there is anything to tell or it is time to repeat the load."""
        now_s = self._clock()
        if self.draining:
            load = replace(load, draining=True)
        if self._local is not None:
            self._local.snapshot = Snapshot(
                load=load, jobs=len(self._jobs), draining=self.draining, registered=self._session is not None
            )
        events, self._outbox = self._outbox, []
        if self._session is None or not (events or load != self._load or now_s >= self._report_s):
            return
        self._load, self._report_s = load, now_s + REPORT_EVERY_S
        self._link.send(step_message(events, load), self._session)

    def apply(self, command: NewWork | WithdrawWork | CancelWork | DrainWork | SwitchWork) -> None:
        """Carries out one command. What it brings about goes out with the step's message."""
        if isinstance(command, DrainWork):
            self.draining = True
        elif isinstance(command, SwitchWork):
            self._switch(command)
        elif isinstance(command, WithdrawWork | CancelWork):
            self._jobs.end((command.request_id, command.attempt), withdrawn=isinstance(command, WithdrawWork))
        elif isinstance(command, PullWork) and command.offer is None:
            self._jobs.pull_more(command)
        else:
            self._jobs.begin(command, now_s=self._clock(), draining=self.draining)

    def _switch(self, command: SwitchWork) -> None:
        if self._role_switch is None:
            log.error("told to become a %s instance, which nobody can start here; ignored", command.role)
            return
        self.draining = True
        self._role_switch.begin(command.role, self._clock())

    def _end_overdue(self) -> None:
        """Frees what nobody pulled within its lease, and now and then stops what nobody waits for any more."""
        now_s = self._clock()
        self._jobs.end_lapsed(now_s)
        if now_s >= self._sweep_s:
            self._sweep_s = now_s + SWEEP_EVERY_S
            self._collector.look(now_s)
            self._jobs.end_overdue(now_s)

    def _abandon(self) -> None:
        """Ends what is left after the grace, so that nothing is copied out of or into memory that goes
        away."""
        for key in list(self._jobs.keys()):
            self._jobs.end(key)
        give_up_s = self._clock() + ABANDON_S
        while not self.idle and self._clock() < give_up_s:
            self.turn()

    def _give_up(self, error: EngineError) -> None:
        self._jobs.reject_all(error)
        if self._session is not None and self._load is not None:
            self._link.send(step_message(self._outbox, self._load), self._session)
        self._outbox = []

    def _emit(self, event: core.InstanceEvent) -> None:
        if event.request_id >= LOCAL_IDS:
            if self._local is not None:
                self._local.on_event(event)
        elif self._session is not None:
            self._outbox.append(event)


def _request_id(command: Work) -> int:
    if isinstance(command, DrainWork | SwitchWork):
        return 0
    return command.request.request_id if isinstance(command, SubmitWork) else command.request_id
