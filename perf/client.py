"""The measuring client: sends a workload's requests when they are due and notes when each token arrives.

Open loop: a request leaves at its instant whether or not former ones have been answered, and its latency counts from
that instant (no coordinated omission). One process, one event loop, thousands of streams.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trtpd.errors import ServeError
from trtpd.perf.client_health import ClientHealth, Monitor
from trtpd.perf.prompt_text import Renderer
from trtpd.perf.records import FORMAT, Record, RunInfo
from trtpd.perf.slo import Slo
from trtpd.perf.transport import Ending, Question, Transport
from trtpd.perf.workload import Ask, Workload

PREPARED_BYTES = 256 << 20
"""Requests are made before the run up to so many bytes in all, further ones when they are due."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """`timeout_s`: a request that takes longer is given up as failed. `targets`: sent along with each request, for
    servers that plan by them."""

    timeout_s: float = 120.0
    targets: Slo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished or interrupted run."""

    info: RunInfo
    records: tuple[Record, ...]
    health: ClientHealth


@dataclass(slots=True, eq=False)
class _Flight:
    """One request under way."""

    number: int
    scheduled_s: float
    sent_s: float | None = None
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


_INTERRUPTED = Ending(state="unmeasured", reason="interrupted")


def no_progress(stage: str, done: int, total: int) -> None:
    """Says nothing."""


class Client:
    """One run of one workload. `interrupt` (from the loop's thread) ends it early: what is under way becomes
    unmeasured, what was not yet due was never offered."""

    def __init__(
        self,
        workload: Workload,
        transport: Transport,
        options: ClientOptions | None = None,
        *,
        progress: Progress = no_progress,
    ) -> None:
        self._workload = workload
        self._transport = transport
        self._options = options or ClientOptions()
        self._progress = progress
        self._renderer = Renderer()
        self._turns = workload.turns()
        self._prepared: dict[int, bytes] = {}
        self._records: list[Record] = []
        self._tasks: dict[asyncio.Task[None], _Flight] = {}
        self._fault: BaseException | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._interrupted_s: float | None = None
        self._begin_s: float | None = None
        self._opening: asyncio.Task[None] | None = None
        self._idle: asyncio.Event = asyncio.Event()
        self._users: deque[int] = deque(n for n, ask in enumerate(workload.asks) if ask.after is None)

    async def run(self) -> Run:
        """Raises ServeError if the server can't be reached, or went before it answered anything."""
        monitor = Monitor()
        try:
            await self._get_ready()
            gc.collect()
            gc.freeze()  # what exists now is not looked through again in the middle of the run
            if self._interrupted_s is None:
                monitor.start()
                self._begin_s = asyncio.get_running_loop().time()
                self._start()
                await self._idle.wait()
                await monitor.stop()
            if self._fault is not None:
                raise self._fault
        finally:
            self._cancel()
            gc.unfreeze()
            await self._transport.close()
        return self._result(monitor)

    async def _get_ready(self) -> None:
        """Connects and makes the requests, or is interrupted."""
        self._opening = asyncio.get_running_loop().create_task(self._transport.open())
        try:
            await self._opening
        except asyncio.CancelledError:
            if self._interrupted_s is None:
                raise
        await self._prepare()

    @property
    def began_s(self) -> float:
        """When the run began, by the loop's clock: what records count from. 0 until then."""
        return self._begin_s or 0.0

    def interrupt(self) -> None:
        """Idempotent. Before the run has begun, nothing is offered at all."""
        if self._interrupted_s is not None or self._idle.is_set():
            return
        if self._begin_s is None:
            self._interrupted_s = 0.0
            if self._opening is not None:
                self._opening.cancel()
            return
        self._interrupted_s = self._now_s()
        self._cancel()
        self._look_idle()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.began_s

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._workload.concurrency is not None:
            for _ in range(min(self._workload.concurrency, len(self._users))):
                self._launch(self._users.popleft(), 0.0)
        else:
            for number, ask in enumerate(self._workload.asks):
                if ask.at_s is not None:
                    self._timers[number] = loop.call_at(self.began_s + ask.at_s, self._due, number, ask.at_s)
        self._look_idle()

    def _due(self, number: int, at_s: float) -> None:
        del self._timers[number]
        self._launch(number, at_s)

    def _launch(self, number: int, scheduled_s: float) -> None:
        flight = _Flight(number, scheduled_s)
        task = asyncio.get_running_loop().create_task(self._one(flight))
        self._tasks[task] = flight
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        flight = self._tasks.pop(task)
        if task.cancelled():  # before it began: it was due, so it was offered
            self._note(flight, self._workload.asks[flight.number], _INTERRUPTED)
        elif (error := task.exception()) is not None:
            self._fault = error
            self._idle.set()
        self._look_idle()

    async def _one(self, flight: _Flight) -> None:
        ask = self._workload.asks[flight.number]
        try:
            ending = await self._ask(flight, ask)
        except asyncio.CancelledError:
            ending = _INTERRUPTED
        except Exception as error:  # noqa: BLE001 what went wrong with one request must not cost the others' records
            message = f"unexpected: {type(error).__name__}: {error}"
            ending = Ending(state="failed", reason=type(error).__name__, message=message)
        self._note(flight, ask, ending)
        if self._interrupted_s is None:
            self._next(flight.number)

    async def _ask(self, flight: _Flight, ask: Ask) -> Ending:
        request = self._prepared.pop(flight.number, None) or self._bytes_of(ask)
        loop, begin_s = asyncio.get_running_loop(), self.began_s

        def arrived(tokens: int) -> None:
            flight.at_s.append(loop.time() - begin_s)
            flight.tokens.append(tokens)

        flight.sent_s = self._now_s()
        patience = asyncio.timeout(self._options.timeout_s)
        try:
            async with patience:
                return await self._transport.send(request, arrived)
        except TimeoutError:
            if not patience.expired():
                raise
            message = f"no end within {self._options.timeout_s:g} s"
            return Ending(state="failed", reason="client_timeout", message=message)

    def _next(self, number: int) -> None:
        """The session's next turns; in a closed loop, the user's next session once this one is over."""
        followers = self._turns.get(number, [])
        for follower in followers:
            at_s = self._now_s() + self._workload.asks[follower].think_s
            loop = asyncio.get_running_loop()
            self._timers[follower] = loop.call_at(self.began_s + at_s, self._due, follower, at_s)
        if self._workload.concurrency is not None and not followers and self._users:
            self._launch(self._users.popleft(), self._now_s())

    def _note(self, flight: _Flight, ask: Ask, ending: Ending) -> None:
        ending = _checked(ending, flight)
        self._records.append(
            Record(
                number=flight.number,
                kind=ask.kind,
                scheduled_s=flight.scheduled_s,
                sent_s=flight.sent_s,
                ended_s=self._now_s(),
                prompt_tokens=ask.prompt_tokens,
                max_tokens=ask.max_tokens,
                state=ending.state,
                reason=ending.reason,
                message=ending.message[:300],
                at_s=tuple(flight.at_s),
                tokens=_true_counts(flight.tokens, ending.output_tokens),
                served_prompt_tokens=ending.prompt_tokens,
                tokens_guessed=ending.state == "finished" and ending.output_tokens is None,
                server=ending.server,
            )
        )
        self._progress("requests", len(self._records), len(self._workload.asks))

    def _look_idle(self) -> None:
        if not self._tasks and not self._timers:
            self._idle.set()

    def _cancel(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._tasks:
            task.cancel()

    async def _prepare(self) -> None:
        """In between it lets an interrupt through."""
        budget = PREPARED_BYTES
        for number, ask in enumerate(self._workload.asks):
            await asyncio.sleep(0)
            if self._interrupted_s is not None:
                return
            self._prepared[number] = self._bytes_of(ask)
            self._progress("prompts", number + 1, len(self._workload.asks))
            budget -= len(self._prepared[number])
            if budget < 0:
                return

    def _bytes_of(self, ask: Ask) -> bytes:
        targets = self._options.targets
        return self._transport.prepare(
            Question(
                prompt=self._renderer.text(ask.segments),
                kv_tokens=ask.prompt_tokens,
                max_tokens=ask.max_tokens,
                timeout_s=self._options.timeout_s,
                ttft_s=None if targets is None else targets.ttft_for(ask.prompt_tokens),
                tpot_s=None if targets is None else targets.tpot_s,
            )
        )

    def _result(self, monitor: Monitor) -> Run:
        records = tuple(sorted(self._records, key=lambda record: record.number))
        if records and all(record.reason == "grpc_unavailable" for record in records):
            raise ServeError(f"no request was answered: {records[0].message}")
        ended = [record.ended_s for record in records if record.ended_s is not None]
        due = [record.scheduled_s for record in records]
        until_s = max(due if self._workload.open_loop else ended, default=0.0)
        if self._interrupted_s is not None:
            until_s = self._interrupted_s
        info = RunInfo(
            trtpd_records=FORMAT,
            workload=self._workload.name,
            seed=self._workload.seed,
            open_loop=self._workload.open_loop,
            offered_until_s=until_s,
            interrupted=self._interrupted_s is not None,
            notes=self._workload.notes,
        )
        lateness = [record.lateness_s for record in records if record.lateness_s is not None]
        return Run(
            info=info,
            records=records,
            health=monitor.health(lateness, sum(len(record.at_s) for record in records)),
        )


def _checked(ending: Ending, flight: _Flight) -> Ending:
    """An answer whose tokens did not all arrive is unmeasured, not fast."""
    if ending.state == "finished" and not flight.at_s:
        return Ending(state="unmeasured", reason="no_token", message="it finished, and no token of it was seen")
    return ending


def _true_counts(tokens: list[int], counted: int | None) -> tuple[int, ...]:
    """Where the server counted more tokens than responses showed (several in an event, or some without text), the
    rest is spread evenly, what is left over from the end."""
    seen = sum(tokens)
    if counted is None or counted <= seen or not tokens:
        return tuple(tokens)
    each, odd = divmod(counted - seen, len(tokens))
    first_odd = len(tokens) - odd
    return tuple(count + each + (1 if index >= first_odd else 0) for index, count in enumerate(tokens))
