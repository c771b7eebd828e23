"""Every attempt under way here, from the command that begins it to the last event of it.

The table takes what the engine and the pulls report of each, moves it from stage to stage, and says what is to be told;
whom, and when, is the leader's. All of it runs in the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, KeysView

from trtpd.errors import CapacityError, EngineError, InputError, InternalError, TransferError, TrtpdError
from trtpd.kv_transfer.base import Key, KVSink, KVSource, PullResult
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import (
    Engine,
    EngineEvent,
    KVArrived,
    PrefillBegan,
    PrefillChunk,
    PrefillDone,
    RequestKind,
)
from trtpd.runtime.worker.intake import Intake, NewWork, key_of
from trtpd.runtime.worker.jobs import DrainingError, Job, Stage, is_last, rejected, transfer_failed
from trtpd.runtime.worker.messages import PullWork
from trtpd.runtime.worker.offers import hand_out
from trtpd.runtime.worker.pulls import Pulls

log = logging.getLogger(__name__)

DEADLINE_GRACE_S = 2.0


class JobTable:
    """`tell` gets every event of every job, exactly one of them its last."""

    def __init__(
        self,
        engine: Engine,
        source: KVSource | None,
        sink: KVSink | None,
        *,
        tell: Callable[[core.InstanceEvent], None],
    ) -> None:
        """Raises EngineError for a sink with an engine that nothing can be pulled into."""
        self._engine = engine
        self._source = source
        self._pulls = Pulls(engine, sink) if sink is not None else None
        self._intake = Intake(engine, source, self._pulls)
        self._tell = tell
        self._jobs: dict[Key, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def keys(self) -> KeysView[Key]:
        return self._jobs.keys()

    @property
    def idle(self) -> bool:
        """Nothing runs, is held, or moves."""
        return not self._jobs and not (self._pulls and self._pulls.busy())

    def check_integrity(self) -> None:
        """Raises InternalError if jobs, holds and pulls don't add up."""
        held = self._source.holds().keys() if self._source is not None else set()
        if astray := held - self._jobs.keys():
            raise InternalError(f"the source holds KV of {sorted(astray)}, which are no jobs here")
        pulling = {key for key, job in self._jobs.items() if job.stage is Stage.PULLING}
        if self._pulls is not None and pulling != self._pulls.keys():
            raise InternalError(f"jobs pulling {sorted(pulling)}, pulls {sorted(self._pulls.keys())}")

    def begin(self, command: NewWork, *, now_s: float, draining: bool) -> None:
        """Begins a job, or tells why it can't; while `draining`, none can."""
        key = key_of(command)
        if key in self._jobs:
            log.error("a %s for %s, which is under way already; ignored", type(command).__name__, key)
            return
        try:
            if draining:
                raise DrainingError("this instance is draining and takes no new work")
            self._jobs[key] = self._intake.begin(command, now_s=now_s)
        except TransferError as error:
            self._tell(transfer_failed(key, error.code, str(error), error.retryable))
        except TrtpdError as error:
            self._tell(rejected(key, error))
        else:
            if isinstance(command, PullWork):
                self._tell(core.TransferBegun(request_id=command.request_id, attempt=command.attempt))
                self.pull_more(command)

    def pull_more(self, command: PullWork) -> None:
        """What is new of a pull under way: chunks, the seal."""
        job = self._jobs.get(key_of(command))
        if job is not None and job.stage is Stage.PULLING and not job.ending and self._pulls is not None:
            self._pulls.more(command)

    def end(self, key: Key, *, withdrawn: bool = False) -> None:
        """Stops a job wherever it is. Exactly one Drained follows, at once for a key that isn't here. `withdrawn`: what
        is held was delivered, or isn't wanted."""
        job = self._jobs.get(key)
        if job is None:
            self._tell(core.Drained(request_id=key[0], attempt=key[1]))
        elif not job.ending:
            job.ending = True
            if job.stage is Stage.PULLING and self._pulls is not None:
                self._pulls.abort(key)
                return
            if self._source is not None:
                self._source.end(key)
            if job.stage is Stage.HELD and (withdrawn or self._engine.capabilities.release):
                self._engine.release(key)
            else:
                self._engine.cancel(key)

    def end_lapsed(self, now_s: float) -> None:
        """Frees what nobody pulled within its lease."""
        if self._source is not None:
            for key in self._source.lapsed(now_s):
                log.warning("the lease of %s lapsed; its KV is freed", key)
                self.end(key)

    def end_overdue(self, now_s: float) -> None:
        """Stops what nobody waits for any more."""
        for job in list(self._jobs.values()):
            if now_s > job.deadline_s + DEADLINE_GRACE_S and not job.ending:
                log.warning("%s is past its deadline and was not cancelled; ending it", job.key)
                self.end(job.key)

    def reject_all(self, error: EngineError) -> None:
        """The engine can't go on: every job ends with its reason."""
        for key in list(self._jobs):
            del self._jobs[key]
            self._tell(rejected(key, error))

    def on_engine(self, event: EngineEvent) -> None:
        """What the engine reports of a job. Raises InternalError for one that is not here."""
        key = (event.request_id, event.attempt)
        job = self._jobs.get(key)
        if job is None:
            raise InternalError(f"the engine reports {type(event).__name__} for {key}, which it was not given")
        last = is_last(event)
        if last:
            del self._jobs[key]
            if self._source is not None:
                self._source.end(key)
        if job.ending:
            if last:
                self._tell(job.last_word())
        elif isinstance(event, KVArrived):
            self._arrived(job, event)
        elif isinstance(event, core.Rejected) and job.stage is Stage.FETCHING:
            self._tell(transfer_failed(key, event.code, event.reason, self._engine.capabilities.repull))
        elif isinstance(event, core.Tokens | core.Preempted | core.Drained | core.Rejected):
            self._tell(event)
        elif job.request.kind is RequestKind.CONTEXT_ONLY:
            self._hand_out(job, event)

    def _arrived(self, job: Job, event: KVArrived) -> None:
        job.stage = Stage.RUNNING
        self._tell(
            core.TransferDone(
                request_id=event.request_id,
                attempt=event.attempt,
                bytes_moved=event.bytes_moved,
                chunks=1,
                seconds=event.seconds,
                exposed_s=event.seconds,
                path="opaque",
            )
        )

    def _hand_out(self, job: Job, event: PrefillBegan | PrefillChunk | PrefillDone) -> None:
        assert self._source is not None
        try:
            self._tell(hand_out(self._source, job, event))
        except (CapacityError, TransferError) as error:
            job.refusal = rejected(job.key, error)
            self.end(job.key)

    def take_pulls(self) -> None:
        """Goes on with, or ends, every job whose pull is over. Raises InternalError for one that is not here."""
        if self._pulls is not None:
            for result in self._pulls.ended():
                job = self._jobs.get(result.key)
                if job is None:
                    raise InternalError(f"the sink reports a pull of {result.key}, which it was not given")
                self._on_pulled(job, result, self._pulls)

    def _on_pulled(self, job: Job, result: PullResult, pulls: Pulls) -> None:
        if job.ending or result.error is not None:
            pulls.drop(job.key)
            del self._jobs[job.key]
            if job.ending:
                self._tell(job.last_word())
            else:
                self._tell(transfer_failed(job.key, result.code, result.error or "", result.retryable))
            return
        try:
            present_tokens = pulls.join(job.key)
        except InputError as error:
            del self._jobs[job.key]
            self._tell(rejected(job.key, error))
            return
        except TransferError as error:
            del self._jobs[job.key]
            self._tell(transfer_failed(job.key, error.code, str(error), error.retryable))
            return
        if self._engine.kv is None:
            job.stage = Stage.FETCHING
            return
        job.stage = Stage.RUNNING
        self._tell(
            core.TransferDone(
                request_id=job.key[0],
                attempt=job.key[1],
                bytes_moved=result.bytes_moved,
                chunks=result.chunks,
                seconds=result.seconds,
                exposed_s=result.exposed_s,
                path=result.path,
                present_tokens=present_tokens,
            )
        )
