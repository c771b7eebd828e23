"""The hand-off of one attempt: offer, early pull, chunks, seal, and the join to decode's batch."""

from __future__ import annotations

from collections.abc import Callable

from trtpd.runtime.core import sinks
from trtpd.runtime.core.books import Books
from trtpd.runtime.core.events import ChunkReady, Offered, Pull, TransferBegun, TransferDone
from trtpd.runtime.core.instance import Hold, Instance
from trtpd.runtime.core.lifecycle import Instant, State
from trtpd.runtime.core.requests import Attempt, Request
from trtpd.runtime.core.view import rules_of, work_of


class Delivery:
    """What moves forward between prefill and decode. What goes wrong there is Recovery's."""

    def __init__(self, books: Books, *, on_stall: Callable[[Request, Attempt], None]) -> None:
        self._books = books
        self._on_stall = on_stall

    def offered(self, request: Request, hold: Hold, event: Offered) -> None:
        attempt = request.running()
        self._books.cluster.seen(hold)
        request.timeline.mark(Instant.PREFILL_BEGIN, self._books.now_s)
        attempt.record.cached_tokens = event.cached_tokens
        if hold.side == "prefill" and attempt.offer is None:
            attempt.offer, attempt.ready_at_s = event.offer, self._books.now_s
            self.advance(request)

    def chunk_ready(self, request: Request, hold: Hold, event: ChunkReady) -> None:
        attempt = request.running()
        if event.ready_tokens <= attempt.ready_tokens:
            return
        self._books.cluster.seen(hold)
        request.timeline.mark(Instant.PREFILL_BEGIN, self._books.now_s)
        computed_from = max(attempt.ready_tokens, attempt.record.cached_tokens or 0)  # what was cached cost no step
        if event.ready_tokens > computed_from:
            self._books.step_work.chunk(computed_from, event.ready_tokens - computed_from)
        attempt.ready_tokens, attempt.ready_at_s = event.ready_tokens, self._books.now_s
        self._books.cluster.progress(hold, max(0, attempt.prompt_tokens - event.ready_tokens))
        if hold.side == "prefill":
            attempt.chunks.append(event.chunk)
            self.advance(request)

    def sealed(self, request: Request, seal: bytes) -> None:
        """The whole prompt is there; its first token was handed out already."""
        attempt = request.running()
        attempt.seal = seal
        request.state = State.TRANSFERRING
        self._books.end_prefill(request)
        self.advance(request)

    def advance(self, request: Request) -> bool:
        """Sends the sink what it should have by now. False if there is something to pull and no sink for it;
        then the request is among the undelivered."""
        attempt = request.running()
        if attempt.pulling:
            self._update(request, attempt)
            return True
        if request.id in self._books.undelivered:
            return self._begin_pull(request, attempt)
        wait_s = None if attempt.joined else self._until_pull_s(attempt)
        if wait_s is None:
            return True
        if wait_s > 0.0:
            self._pull_later(request, attempt, wait_s)
            return True
        return self._begin_pull(request, attempt)

    def _begin_pull(self, request: Request, attempt: Attempt) -> bool:
        sink = self._sink(request, attempt)
        if sink is None:
            self._books.await_sink(request)
            return False
        self._books.undelivered.pop(request.id, None)
        self._pull(request, attempt, sink)
        return True

    def _until_pull_s(self, attempt: Attempt) -> float | None:
        """Seconds until the pull should begin: at the seal, or when the rest of the prefill is predicted to take no
        more than the lead. Earlier decode's blocks would lie idle; later it would copy after the seal what it could
        have copied before. None: there is nothing to pull, or no telling when."""
        if attempt.offer is None or attempt.prefill is None:
            return None
        if attempt.seal is not None:
            return 0.0
        source = self._books.cluster.instances[attempt.prefill.instance]
        if not source.hello.capabilities.chunk_events:
            return None
        token_s = self._books.cluster.costs.token_s(source.hello, source.hello.role) * source.factor
        rest_s = (attempt.prompt_tokens - attempt.ready_tokens) * token_s
        return max(0.0, attempt.ready_at_s + rest_s - self._books.policy.pull_lead_s - self._books.now_s)

    def _pull_later(self, request: Request, attempt: Attempt, wait_s: float) -> None:
        """A long chunk says nothing until it is done, so the time to pull may come between two events."""
        if attempt.lead is not None:
            self._books.timers.cancel(attempt.lead)
        attempt.lead = self._books.timers.at(self._books.now_s + wait_s, lambda: self._lead_reached(request, attempt))

    def _lead_reached(self, request: Request, attempt: Attempt) -> None:
        if request.attempt is attempt and not attempt.pulling and attempt.prefill is not None:
            self._begin_pull(request, attempt)

    def _sink(self, request: Request, attempt: Attempt) -> Hold | None:
        """The chosen decode instance, or another if that one can't be had any more."""
        books = self._books
        assert attempt.prefill is not None
        source = books.cluster.instances[attempt.prefill.instance]
        if attempt.decode is not None:
            chosen = books.cluster.instances[attempt.decode.instance]
            if chosen.usable(books.now_s) and books.cluster.link_up(source.name, chosen.name):
                return attempt.decode
            books.release(attempt.decode)
            attempt.decode = None
        other = sinks.choose_sink(
            request,
            source,
            books.cluster,
            work=work_of(books, request),
            rules=rules_of(books, request),
            not_again=attempt.record.decode if attempt.repulls else None,
        )
        return None if other is None else self._credit(request, attempt, other)

    def _credit(self, request: Request, attempt: Attempt, sink: Instance) -> Hold:
        if attempt.record.decode != sink.name:
            attempt.record.why += f"; then {sink.name} in place of {attempt.record.decode}"
            attempt.record.decode = sink.name
        attempt.decode = self._books.reserve(request, sink, "decode", tokens=request.total_tokens)
        return attempt.decode

    def _pull(self, request: Request, attempt: Attempt, sink: Hold) -> None:
        """The first Pull of an offer at a sink: all there is of it so far."""
        sink.sent = True
        self._books.cluster.moving(sink, moves=True)
        if attempt.prefill is not None:
            self._books.cluster.moving(attempt.prefill, moves=True)
        attempt.record.pulls += 1
        if attempt.lead is not None:
            self._books.timers.cancel(attempt.lead)
        self._send(
            attempt,
            sink,
            offer=attempt.offer,
            journal=tuple(request.journal[: attempt.base]),
            chunks=attempt.chunks,
        )
        self._await_transfer(request, attempt)

    def _update(self, request: Request, attempt: Attempt) -> None:
        """What is new since the last Pull."""
        new = attempt.chunks[attempt.chunks_sent :]
        if attempt.decode is not None and (new or (attempt.seal is not None and not attempt.seal_sent)):
            self._send(attempt, attempt.decode, offer=None, journal=(), chunks=new)
            self._await_transfer(request, attempt)

    def _send(
        self,
        attempt: Attempt,
        sink: Hold,
        *,
        offer: bytes | None,
        journal: tuple[int, ...],
        chunks: list[bytes],
    ) -> None:
        self._books.send(
            Pull(
                instance=sink.instance,
                request_id=sink.request_id,
                attempt=sink.attempt,
                offer=offer,
                journal=journal,
                chunks=tuple(chunks),
                seal=None if attempt.seal_sent else attempt.seal,
            )
        )
        attempt.chunks_sent = len(attempt.chunks)
        attempt.seal_sent = attempt.seal is not None

    def _await_transfer(self, request: Request, attempt: Attempt) -> None:
        """Once all is there to be pulled, it has to arrive within a time that grows with its bytes."""
        books = self._books
        if not attempt.seal_sent or attempt.prefill is None:
            return
        source = books.cluster.instances[attempt.prefill.instance].hello
        move_s = attempt.prompt_tokens * source.bytes_per_token / books.policy.transfer_floor_bytes_per_s
        due_s = books.now_s + books.policy.transfer_patience_s + move_s
        attempt.stall = books.timers.at(due_s, lambda: self._on_stall(request, attempt))

    def begun(self, request: Request, hold: Hold, _event: TransferBegun) -> None:
        request.running().begun = True
        self._books.cluster.seen(hold)
        request.timeline.mark(Instant.TRANSFER_BEGIN, self._books.now_s)

    def done(self, request: Request, hold: Hold, event: TransferDone) -> None:
        attempt = request.running()
        if attempt.joined:
            return
        record = attempt.record
        record.bytes_moved, record.chunks, record.path = event.bytes_moved, event.chunks, event.path
        record.transfer_s, record.exposed_s = event.seconds, event.exposed_s
        record.present_tokens = event.present_tokens
        if attempt.prefill is not None:
            instances = self._books.cluster.instances
            self._books.links.note(instances[attempt.prefill.instance], instances[hold.instance], event)
        self._books.tally.counts["transfers"] += 1
        self._books.tally.counts["transfer_bytes"] += event.bytes_moved
        self.join(request, hold)

    def join(self, request: Request, hold: Hold) -> None:
        """Decode has the KV and goes on alone; prefill may free its copy."""
        books, attempt = self._books, request.running()
        attempt.joined = True
        attempt.chunks = []
        request.state = State.DECODING
        request.timeline.mark(Instant.TRANSFER_END, books.now_s)
        books.cluster.seen(hold)
        books.cluster.moving(hold, moves=False)
        if attempt.stall is not None:
            books.timers.cancel(attempt.stall)
        if attempt.prefill is not None:
            books.close(attempt.prefill, withdraw=True)
            attempt.prefill = None
