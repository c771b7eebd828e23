"""The invariants of RouterCore, checked over its whole state."""

from __future__ import annotations

from trtpd.errors import InternalError
from trtpd.runtime.core.books import Books
from trtpd.runtime.core.fair import Queue
from trtpd.runtime.core.instance import Hold, Instance
from trtpd.runtime.core.lifecycle import State
from trtpd.runtime.core.requests import Request


def check(books: Books) -> None:
    """Raises InternalError for the first invariant that does not hold."""
    for name, instance in books.cluster.instances.items():
        _check_instance(books, name, instance)
    _require(books.cluster.prefixes.check_integrity(), "the two indexes of prompt blocks differ")
    _check_queue(books)
    for request in books.requests.values():
        _check_request(books, request)
    _check_holds(books)
    _check_counts(books)


def _require(holds_true: bool, text: str) -> None:
    if not holds_true:
        raise InternalError(text)


def _check_instance(books: Books, name: str, instance: Instance) -> None:
    """The sums match the holds, and the row what placement would find by asking."""
    holds = instance.holds.values()
    decoding = [hold for hold in holds if hold.decodes]
    found = {
        "peak blocks": (instance.peak_blocks, sum(hold.blocks for hold in holds)),
        "pending tokens": (instance.pending_tokens, sum(hold.pending_tokens for hold in holds)),
        "prefilling": (instance.prefilling, sum(hold.pending_tokens > 0 for hold in holds)),
        "short tokens": (instance.short_tokens, sum(hold.pending_tokens for hold in holds if hold.short)),
        "short prefilling": (
            instance.short_prefilling,
            sum(hold.short and hold.pending_tokens > 0 for hold in holds),
        ),
        "unseen blocks": (instance.unseen_blocks, sum(hold.blocks for hold in holds if not hold.seen)),
        "sequences": (instance.sequences, len(decoding)),
        "context tokens": (instance.context_tokens, sum(hold.context_tokens for hold in decoding)),
        "left tokens": (round(instance.left_tokens, 3), round(sum(hold.left_tokens for hold in decoding), 3)),
        "flows": (instance.flows, sum(hold.moving for hold in holds)),
    }
    for what, (counted, summed) in found.items():
        _require(abs(counted - summed) < 0.01, f"{name} counts {counted} {what}, its holds say {summed}")
    _require(instance.healthy or not holds, f"{name} is lost and still holds {list(instance.holds)}")
    for key, hold in instance.holds.items():
        _require(hold.instance == name and hold.key == key, f"{name} lists holds that are not its own")
    table = instance.table
    _require(table.names.get(name) is instance, f"{name} is not in the table of its role")
    _require(instance.stale or not table.stale(instance, books.now_s), f"what placement sees of {name} is old")
    _require(table.open == int((table.capacity >= 0.0).sum()), f"{table.role}: {table.open} counted open")


def _check_queue(books: Books) -> None:
    waiting = {request.id for request in books.backlog}
    queued = {request.id for request in books.requests.values() if request.state is State.QUEUED}
    _require(waiting == queued, f"in the queue {sorted(waiting)}, in state queued {sorted(queued)}")
    _require(len(books.backlog) == len(waiting), "the queue's length is not the number of requests in it")
    for model, queue in books.backlog.queues.items():
        _check_model_queue(model, queue)


def _check_model_queue(model: str, queue: Queue) -> None:
    tokens = sum(request.prompt_tokens for request in queue)
    _require(tokens == queue.tokens, f"the queue of {model} counts {queue.tokens} tokens and holds {tokens}")
    for priority, members in queue.classes.items():
        tags = [request.tag for request in members]
        _require(members.shorts == sum(r.short for r in members), f"class {priority} of {model} miscounts short ones")
        _require(tags == sorted(tags), f"class {priority} of {model} is out of order")


def _check_request(books: Books, request: Request) -> None:
    name = f"request {request.id}"
    _require(not request.state.terminal, f"{name} is {request.state} and still in flight")
    _require((request.attempt is None) == (request.state is State.QUEUED), f"{name}: attempt while {request.state}")
    _require(request.arrived.deadline_s > books.now_s, f"{name} outlives its deadline")
    timer = request.deadline
    _require(timer is not None and not timer.cancelled, f"{name} has no timer for its deadline")
    _require(len(request.journal) < request.arrived.max_tokens, f"{name} is complete and still in flight")
    _require(request.timeline.output_tokens == len(request.journal), f"{name}: its journal is not what went out")
    _require(len(request.failures) <= books.policy.retry_budget, f"{name} cost more retries than it may")
    _require(len(request.losses) <= books.policy.loss_budget, f"{name} cost more instances than it may")
    patient_until_s = request.arrived_s + books.policy.queue_s
    _require(
        request.attempts > 0 or patient_until_s > books.now_s,
        f"{name} has waited {books.now_s - request.arrived_s} s for a place",
    )
    attempt = request.attempt
    if attempt is None:
        return
    _require(attempt.number == request.attempts, f"{name} runs attempt {attempt.number} of {request.attempts}")
    owned = (attempt.prefill, attempt.decode)
    for hold in owned:
        if hold is not None:
            kept = books.cluster.instances[hold.instance].holds.get(hold.key)
            _require(kept is hold and not hold.closing, f"{name} counts on a hold {hold.instance} doesn't have")
    _require(any(owned), f"{name} is {request.state} and nobody works on it")
    if attempt.kind == "context_only" and attempt.seal is not None and not attempt.joined:
        served = attempt.pulling or request.id in books.undelivered
        _require(served, f"{name} is sealed and neither pulled nor waiting for a sink")


def _check_holds(books: Books) -> None:
    """Every hold that is not on its way back belongs to the running attempt of a request in flight."""
    for instance in books.cluster.instances.values():
        for hold in instance.holds.values():
            if not hold.closing:
                _require(_owned(books, hold), f"{instance.name} has a hold of {hold.key} that nobody owns")
            else:
                _require(hold.sent, f"{instance.name} is asked to give back {hold.key}, which it never had")


def _owned(books: Books, hold: Hold) -> bool:
    request = books.requests.get(hold.request_id)
    attempt = None if request is None else request.attempt
    return attempt is not None and (attempt.prefill is hold or attempt.decode is hold)


def _check_counts(books: Books) -> None:
    paced = sum(r.attempt is not None and r.attempt.paced for r in books.requests.values())
    _require(paced == books.reprefills, f"{books.reprefills} new attempts counted in prefill, {paced} are")
    for request_id, request in books.undelivered.items():
        attempt = request.attempt
        waits = attempt is not None and attempt.prefill is not None and not attempt.pulling and not attempt.joined
        _require(books.requests.get(request_id) is request and waits, f"request {request_id} waits for no sink")
    due_s = books.timers.next_s()
    _require(due_s is None or due_s > books.now_s, "a timer is due and has not fired")
