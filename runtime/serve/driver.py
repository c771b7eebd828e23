"""RouterCore live: an asyncio loop in its own thread, between the leaders' link and the clients' emitter.

Events go into the core one at a time and its commands are carried out before the next; the core decides, this
file only carries. Whatever breaks the loop is fatal to the router (its state can't be trusted): every client
gets an error, and the process ends so that a fresh router can learn everything anew from the leaders.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trtpd.errors import NoInstanceError, ServeError, TrtpdError
from trtpd.runtime.core import events as core
from trtpd.runtime.serve.answer import Answer, failure_of
from trtpd.runtime.serve.discount import Discount
from trtpd.runtime.serve.emitter import SHUTTING_DOWN, Emitter, End, Failure, Piece, Sink
from trtpd.runtime.serve.guarded_loop import GuardedLoop
from trtpd.runtime.serve.metrics import Metrics
from trtpd.runtime.serve.orders import Order, Prepared, beginning_of, ending_of
from trtpd.runtime.serve.status import status_of
from trtpd.runtime.serve.switches import Switches
from trtpd.runtime.serve.text import TextLayer
from trtpd.runtime.worker.garbage import Collector
from trtpd.runtime.worker.link import PeerStatus
from trtpd.runtime.worker.messages import SwitchWork, WireError, Work

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.25


class Core(Protocol):
    """RouterCore, as far as the driver knows it."""

    def handle(self, now_s: float, event: core.Event) -> list[core.Command]: ...

    def snapshot(self) -> dict[str, Any]: ...


class Link(Protocol):
    """RouterLink, as far as the driver knows it."""

    epoch: str

    def start(self) -> None: ...

    def drain(self) -> Iterator[core.Event]: ...

    def send(self, instance: str, message: Work) -> bool: ...

    def peers(self) -> list[PeerStatus]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Live:
    """`others` are further answers to the same prompt. They begin when this one's prompt is computed, so that they
    find its KV."""

    prepared: Prepared
    deadline_s: float
    answer: Answer
    others: Sequence[tuple[int, Prepared]] = ()


class Driver:
    """Owns the loop's thread. The methods above the line "In the loop" may be called from any thread.

    `make_link(wake)` gives the link; `on_fatal` is called once, after every client got its error;
    `interval_tokens` is the Emitter's.
    """

    def __init__(
        self,
        router: Core,
        make_link: Callable[[Callable[[], None]], Link],
        text: TextLayer,
        metrics: Metrics,
        *,
        on_fatal: Callable[[BaseException], None],
        interval_tokens: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = router
        self._text = text
        self._metrics = metrics
        self._clock = clock
        self._on_fatal = on_fatal
        self._ids = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._waiting: deque[core.Event] = deque()
        self._instances: dict[str, core.Hello] = {}
        self._registered = threading.Condition()
        self._began_s = clock()
        self._drain_until_s: float | None = None
        self._switches = Switches()
        self._discount = Discount()
        self._collector = Collector()
        self._loop = GuardedLoop("router", on_fatal=self._die)
        self._emitter = Emitter(self.client_gone, interval_tokens=interval_tokens, clock=clock)
        self._link = make_link(self._wake)

    def start(self) -> None:
        self._metrics.start()
        self._emitter.start()
        self._link.start()
        self._loop.start()
        self._loop.call(self._housekeeping)

    def stop(self) -> None:
        """Ends open streams with UNAVAILABLE, hangs up on the leaders, joins every thread. Idempotent."""
        self._emitter.stop(_SHUTTING_DOWN)
        self._loop.stop()
        self._link.close()
        self._metrics.stop()

    def submit(self, prepared: Prepared, sink: Sink, *, stream: bool) -> int:
        """Takes a request over; from here on `sink` gets a last response whatever happens. Returns its id."""
        return self.submit_all([prepared], [sink], stream=stream)[0]

    def submit_all(self, answers: Sequence[Prepared], sinks: Sequence[Sink], *, stream: bool) -> list[int]:
        """As `submit`, for several answers to one prompt, which is computed for the first of them."""
        ids = [next(self._ids) for _ in answers]
        for request_id, sink in zip(ids, sinks, strict=True):
            self._emitter.open(request_id, sink, stream=stream)
        others = list(zip(ids[1:], answers[1:], strict=True))
        if not self._loop.call(self._arrive, ids[0], answers[0], others):
            for request_id in ids:
                self._emitter.close(request_id, End(failure=_ROUTER_DOWN))
        return ids

    def reply(self, sink: Sink, end: End, *, text: str = "") -> None:
        """A response that needs no instance: an error, or the answer to a query."""
        request_id = next(self._ids)
        self._emitter.open(request_id, sink, stream=False)
        self._emitter.push(request_id, Piece(text=text))
        self._emitter.close(request_id, end)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Requests that begin and end in here are no client's: neither status nor metrics count them. To be used while
        there are no others."""
        self._loop.call(lambda: self._discount.begin(self._core.snapshot()))
        try:
            yield
        finally:
            self._loop.call(lambda: self._discount.end(self._core.snapshot()))

    def client_gone(self, request_id: int) -> None:
        self._loop.call(self._step, core.ClientGone(request_id=request_id))

    def drain(self, until_s: float) -> None:
        """What still runs at `until_s` (monotonic clock) is ended with UNAVAILABLE."""
        self._loop.call(self._set_drain, until_s)

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """What there is, what it does, what went wrong. Raises ServeError if the router doesn't answer."""
        future: Future[dict[str, Any]] = Future()
        if not self._loop.call(lambda: future.set_result(self._status())):
            raise ServeError("the router has stopped; it is being restarted")
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise ServeError(f"the router did not answer within {timeout_s:g} s") from error

    def wait_for(self, names: Iterable[str], timeout_s: float) -> dict[str, core.Hello]:
        """Waits until all `names` are registered or the time is over; returns who is."""
        wanted = set(names)
        with self._registered:
            self._registered.wait_for(lambda: wanted <= self._instances.keys(), timeout_s)
            return dict(self._instances)

    # In the loop

    def _wake(self) -> None:
        self._loop.call(self._on_link)

    def _on_link(self) -> None:
        for event in self._link.drain():
            self._note(event)
            self._step(event)

    def _arrive(self, request_id: int, prepared: Prepared, others: Sequence[tuple[int, Prepared]] = ()) -> None:
        now_s = self._clock()
        if self._drain_until_s is not None:
            self._close([request_id, *(other for other, _ in others)], End(failure=_SHUTTING_DOWN))
            return
        if self._emitter.has_left(request_id):  # before the core knew of it: nothing to undo
            self._close([request_id, *(other for other, _ in others)], End(cancelled=True))
            return
        answer = Answer(
            self._text,
            prepared.stops,
            hidden=prepared.sampling.end_ids,
            min_tokens=prepared.sampling.min_tokens,
            prompt_ids=prepared.prompt_ids if prepared.echo else (),
        )
        live = _Live(prepared, now_s + prepared.deadline_s, answer, others)
        self._live[request_id] = live
        self._step(
            core.Arrived(
                request_id=request_id,
                prompt_tokens=len(prepared.prompt_ids),
                max_tokens=prepared.max_tokens,
                deadline_s=live.deadline_s,
                ttft_s=prepared.ttft_s,
                tpot_s=prepared.tpot_s,
                block_hashes=prepared.block_hashes,
                priority=prepared.priority,
                tenant=prepared.tenant,
            )
        )

    def _close(self, request_ids: Iterable[int], end: End) -> None:
        for request_id in request_ids:
            self._emitter.close(request_id, end)

    def _begin_others(self, live: _Live) -> None:
        """The prompt is computed: its further answers arrive, with what is left of its time."""
        others, live.others = live.others, ()
        left_s = max(0.0, live.deadline_s - self._clock())
        for request_id, prepared in others:
            self._loop.call(self._arrive, request_id, replace(prepared, deadline_s=left_s))

    def _step(self, event: core.Event) -> None:
        """One event through the core, and whatever follows from its commands."""
        self._waiting.append(event)
        while self._waiting:
            for command in self._core.handle(self._clock(), self._waiting.popleft()):
                self._obey(command)

    def _obey(self, command: core.Command) -> None:
        match command:
            case core.Emit():
                self._emit(command)
            case core.Submit() | core.Pull() | core.Withdraw() | core.Cancel():
                self._send(command)
            case core.Finish():
                self._finish(command)
            case core.Refuse():
                self._refuse(command)
            case core.WakeAt():
                self._loop.later(command.at_s - self._clock(), self._step, core.Tick())
            case core.Quarantine():
                log.warning("%s gets no work for now: %s", command.instance, command.reason)
            case core.SwitchRole():
                self._switch(command)

    def _switch(self, command: core.SwitchRole) -> None:
        """The instance drains from here on; its launcher starts it again in the new role (runtime/worker/roles.py)."""
        if not self._switches.begin(command, self._clock()):
            return
        log.info("%s is to become a %s instance", command.instance, command.role)
        self._link.send(command.instance, SwitchWork(role=command.role))
        self._waiting.append(core.Drain(instance=command.instance, move=True))

    def _emit(self, command: core.Emit) -> None:
        live = self._live[command.request_id]
        piece, stopped_at = live.answer.push(
            command.first_index, command.ids, command.log_probs, command.top_log_probs, now_s=self._clock()
        )
        self._emitter.push(command.request_id, piece)
        self._begin_others(live)
        if stopped_at is not None:
            self._waiting.append(core.TextStopped(request_id=command.request_id, index=stopped_at))

    def _send(self, command: Order) -> None:
        try:
            # False: the instance is gone, and the core learns of it from the Lost that is on its way.
            self._link.send(command.instance, self._work(command))
        except WireError as error:
            log.warning("request %d can't go to %s: %s", command.request_id, command.instance, error)
            self._emitter.close(command.request_id, End(failure=failure_of("invalid_argument", str(error))))
            self._waiting.append(core.ClientGone(request_id=command.request_id))

    def _work(self, command: Order) -> Work:
        if isinstance(command, core.Withdraw | core.Cancel):
            return ending_of(command)
        live = self._live[command.request_id]
        return beginning_of(command, live.prepared, deadline_in_s=max(0.0, live.deadline_s - self._clock()))

    def _finish(self, command: core.Finish) -> None:
        live = self._live.pop(command.request_id)
        piece, end, timeline = live.answer.end(command)
        self._emitter.push(command.request_id, piece)
        self._emitter.close(command.request_id, end)
        self._close((other for other, _ in live.others), End(cancelled=True))
        if timeline is not None and not self._discount.under_way:
            prepared = live.prepared
            self._metrics.ended(
                timeline,
                state=command.state,
                reason=command.reason,
                ttft_s=prepared.ttft_s,
                tpot_s=prepared.tpot_s,
            )
        if command.state == "failed":
            log.warning("request %d failed (%s): %s", command.request_id, command.reason, command.message)

    def _refuse(self, command: core.Refuse) -> None:
        live = self._live.pop(command.request_id)
        failure = failure_of(command.code, command.message, retry_after_s=command.retry_after_s)
        self._emitter.close(command.request_id, End(failure=failure))
        self._close((other for other, _ in live.others), End(cancelled=True))
        self._metrics.count("trtpd_requests_total", state="refused", reason=command.code)

    def _note(self, event: core.Event) -> None:
        """Keeps who is there, for `wait_for`."""
        if isinstance(event, core.Step):
            return
        self._note_switch(event)
        with self._registered:
            if isinstance(event, core.Hello):
                self._instances[event.instance] = event
            elif isinstance(event, core.Lost):
                self._instances.pop(event.instance, None)
                log.warning("%s is lost: %s", event.instance, event.reason)
            self._registered.notify_all()

    def _note_switch(self, event: core.Event) -> None:
        ended = self._switches.note(event, self._clock())
        if ended is not None:
            instance, role, outcome = ended
            self._metrics.count("trtpd_role_switches_total", role=role, outcome=outcome)
            level = logging.INFO if outcome == "done" else logging.WARNING
            log.log(level, "%s was to become a %s instance: %s", instance, role, outcome)

    def _housekeeping(self) -> None:
        self._link.check()
        if not self._discount.under_way:
            self._metrics.gauges(self._discount.applied(self._core.snapshot()), up=self._instances)
        up = Counter[str](hello.role for hello in self._instances.values())
        self._metrics.roles(up, switching=len(self._switches.under_way))
        if self._drain_until_s is not None and self._clock() >= self._drain_until_s:
            for request_id in list(self._live):
                self._emitter.close(request_id, End(failure=_SHUTTING_DOWN))
                self._step(core.ClientGone(request_id=request_id))
        self._collector.look(self._clock())
        self._loop.later(HOUSEKEEPING_S, self._housekeeping)

    def _set_drain(self, until_s: float) -> None:
        self._drain_until_s = until_s

    def _status(self) -> dict[str, Any]:
        about = {
            "epoch": self._link.epoch,
            "uptime_s": round(self._clock() - self._began_s, 1),
            "draining": self._drain_until_s is not None,
        }
        busy_s = {peer.instance: round(peer.busy_s, 3) for peer in self._link.peers()}
        switched = {f"switched_{role}_{outcome}": count for (role, outcome), count in self._switches.ended.items()}
        router = self._discount.applied(self._core.snapshot())
        found = status_of(router, busy_s=busy_s, becoming=self._switches.under_way)
        found["counters"] |= switched
        return about | found

    def _die(self, error: BaseException) -> None:
        log.critical("the router stops: %s", error, exc_info=error)
        text = str(error) if isinstance(error, TrtpdError) else repr(error)
        self._emitter.close_all(Failure(status="INTERNAL", message=f"code=internal the router failed: {text}"))
        self._on_fatal(error)


_SHUTTING_DOWN = failure_of(SHUTTING_DOWN, "the server is stopping")
_ROUTER_DOWN = failure_of(NoInstanceError.code, "the router is restarting; try again in a few seconds")
