"""Whether a new request is taken in at all: what can't work is refused before any work, what won't in time
early."""

from __future__ import annotations

from trtpd.runtime.core.books import Books
from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.degrade import Rung
from trtpd.runtime.core.events import Arrived, Refuse
from trtpd.runtime.core.forecast import Forecast, backlog_s, forecast
from trtpd.runtime.core.lifecycle import State
from trtpd.runtime.core.requests import Request

SURE = 0.75
"""The part of a TTFT target that a forecast may use up: under overload every admitted request is near this bound, and
a forecast is no better than the lengths it guesses."""

RETRY_LEAST_S = 0.5
RETRY_MOST_S = 30.0


def model_of(arrived: Arrived, cluster: Cluster) -> str | Refuse:
    """The model a request is for: the one it names, or the only one there is."""
    if arrived.model is not None:
        return arrived.model
    models = sorted(cluster.groups)
    if not models:
        return _refuse(arrived, "no_instance", "no instance has registered yet; try again in a few seconds")
    if len(models) > 1:
        return _refuse(arrived, "invalid_argument", f"several models are served here, name one of: {', '.join(models)}")
    return models[0]


def refusal(arrived: Arrived, model: str, books: Books) -> Refuse | None:
    """Why `arrived` is refused; None if it is admitted."""
    return (
        _malformed(arrived)
        or _too_long(arrived, model, books.cluster)
        or _unserved(arrived, model, books)
        or _saturated(arrived, model, books)
    )


def _refuse(arrived: Arrived, code: str, message: str, retry_after_s: float | None = None) -> Refuse:
    return Refuse(request_id=arrived.request_id, code=code, message=message, retry_after_s=retry_after_s)


def _malformed(arrived: Arrived) -> Refuse | None:
    if arrived.prompt_tokens < 1:
        return _refuse(arrived, "invalid_argument", "the prompt is empty; it must hold at least one token")
    if arrived.max_tokens < 1:
        message = f"max_tokens is {arrived.max_tokens}; it must be at least 1"
        return _refuse(arrived, "invalid_argument", message)
    return None


def _too_long(arrived: Arrived, model: str, cluster: Cluster) -> Refuse | None:
    """Every instance ever seen counts: one that is away may come back. Decode (or whoever does it all) must
    hold the whole sequence, so the largest capacity of any instance bounds what can be served."""
    largest = cluster.largest(model)
    total = arrived.prompt_tokens + arrived.max_tokens
    if largest is None or total <= largest.capacity_tokens:
        return None
    hello = largest.hello
    return _refuse(
        arrived,
        "invalid_argument",
        f"{arrived.prompt_tokens} prompt tokens + max_tokens {arrived.max_tokens} = {total}; at most "
        f"{largest.capacity_tokens} fit here (sequences of {hello.max_seq_tokens} tokens, "
        f"{hello.kv_blocks} KV blocks of {hello.tokens_per_block} on {hello.instance}); "
        f"shorten the prompt or lower max_tokens",
    )


def _unserved(arrived: Arrived, model: str, books: Books) -> Refuse | None:
    last_s = books.cluster.last_usable_s(model)
    if last_s is None:
        message = f"no instance has served model {model!r} yet; see the status of this deployment"
        return _refuse(arrived, "no_instance", message)
    if books.now_s - last_s > books.policy.no_instance_grace_s:
        return _refuse(arrived, "no_instance", nobody_for(model, books.now_s - last_s))
    return None


def nobody_for(model: str, seconds: float) -> str:
    return f"no instance has served model {model!r} for {seconds:.0f} s; see `trtpd status`"


def _saturated(arrived: Arrived, model: str, books: Books) -> Refuse | None:
    """Whether it comes too late for its deadline or targets, or there are too many already."""
    seen = forecast(arrived, model, books)
    retry_after_s = round(min(max(seen.wait_s, seen.place_s, RETRY_LEAST_S), RETRY_MOST_S), 1)
    text = _shed(arrived, books) or _late(arrived, seen, books) or _full(arrived, model, books)
    if text is None:
        return None
    reason, message = text
    books.tally.shed[reason] += 1
    return _refuse(arrived, "saturated", f"{message}; try again in {retry_after_s} s", retry_after_s)


def _shed(arrived: Arrived, books: Books) -> tuple[str, str] | None:
    ladder = books.ladder
    if ladder.rung >= Rung.REFUSE:
        return "rung_refuse", f"the deployment is overloaded ({ladder.reason}) and takes no new requests"
    if ladder.rung >= Rung.SHED_LOW and arrived.priority < 0:
        return "rung_shed", f"requests of priority {arrived.priority} are shed for now ({ladder.reason})"
    return None


def _late(arrived: Arrived, seen: Forecast, books: Books) -> tuple[str, str] | None:
    """The deadline binds always; targets only where load is what makes it miss them: what an idle deployment could
    not do either is served as well as it can be."""
    ttft_s, left_s = seen.ttft_s, arrived.deadline_s - books.now_s
    if ttft_s > left_s > 0.0:
        return "deadline", f"its first token is expected in {ttft_s:.1f} s and its deadline is in {left_s:.1f} s"
    if not books.policy.refuse_late:
        return None
    if arrived.ttft_s is not None:
        target_s = arrived.ttft_s * SURE
        bound_s = target_s if seen.own_s <= target_s else max(arrived.ttft_s, seen.own_s * books.policy.late_factor)
        if ttft_s > bound_s:
            text = f"its first token is expected in {ttft_s:.2f} s, its target is {arrived.ttft_s:.2f} s"
            return "ttft", text
    elif arrived.tpot_s is not None and seen.place_s > books.policy.patience_s:
        return "tpot", f"a place that keeps its TPOT target is expected in {seen.place_s:.1f} s"
    return None


def _full(arrived: Arrived, model: str, books: Books) -> tuple[str, str] | None:
    """A full queue refuses, unless another's claim to a place in it is clearly less."""
    if len(books.backlog) < books.policy.queue_limit:
        return None
    other = books.backlog.pushed_out_for(model, arrived.priority, arrived.tenant)
    if other is None:
        return "queue_full", f"{len(books.backlog)} requests wait already"
    give_way(books, other, "its place in the full queue goes to one of higher claim", "pushed_out")
    return None


def give_way(books: Books, request: Request, why: str, reason: str) -> None:
    """Ends a request that waits and was never begun, as if it had been refused on arrival."""
    books.tally.shed[reason] += 1
    wait_s = backlog_s(books, request.model)
    retry_after_s = round(min(max(wait_s, RETRY_LEAST_S), RETRY_MOST_S), 1)
    message = f"{why}; try again in {retry_after_s} s"
    books.end(request, State.REFUSED, "saturated", message, retry_after_s=retry_after_s)
