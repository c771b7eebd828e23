"""Whether a new request is taken in at all: what can't work is refused before any work, what won't in time
early."""

from __future__ import annotations

from trtpd.runtime.core.cluster import Cluster, Instance
from trtpd.runtime.core.events import Arrived, Refuse
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.requests import Backlog

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


def refusal(
    arrived: Arrived, model: str, *, cluster: Cluster, backlog: Backlog, policy: Policy, now_s: float
) -> Refuse | None:
    """Why `arrived` is refused; None if it is admitted."""
    return (
        _malformed(arrived)
        or _too_long(arrived, model, cluster)
        or _unserved(arrived, model, cluster, policy, now_s)
        or _saturated(arrived, model, cluster, backlog, policy, now_s)
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


def _unserved(arrived: Arrived, model: str, cluster: Cluster, policy: Policy, now_s: float) -> Refuse | None:
    last_s = cluster.last_usable_s(model, now_s)
    if last_s is None:
        message = f"no instance has served model {model!r} yet; see the status of this deployment"
        return _refuse(arrived, "no_instance", message)
    if now_s - last_s > policy.no_instance_grace_s:
        message = f"no instance has served model {model!r} for {now_s - last_s:.0f} s; see `trtpd status`"
        return _refuse(arrived, "no_instance", message)
    return None


def _saturated(
    arrived: Arrived, model: str, cluster: Cluster, backlog: Backlog, policy: Policy, now_s: float
) -> Refuse | None:
    instances = cluster.usable_prefillers(model, now_s)
    wait_s = backlog_s(instances, backlog.tokens_of(model))
    retry_after_s = round(min(max(wait_s, RETRY_LEAST_S), RETRY_MOST_S), 1)
    if len(backlog) >= policy.queue_limit:
        message = f"{len(backlog)} requests wait already; try again in {retry_after_s} s"
        return _refuse(arrived, "saturated", message, retry_after_s)
    rate = max((instance.hello.prefill_tokens_per_s for instance in instances), default=0.0)
    own_s = arrived.prompt_tokens / rate if rate else 0.0
    left_s = arrived.deadline_s - now_s
    if wait_s + own_s > left_s > 0.0:
        message = (
            f"its first token is expected in {wait_s + own_s:.1f} s and its deadline is in {left_s:.1f} s; "
            f"try again in {retry_after_s} s"
        )
        return _refuse(arrived, "saturated", message, retry_after_s)
    return None


def backlog_s(instances: list[Instance], waiting_tokens: int) -> float:
    """Seconds of prefill that stand before a new request, spread over all instances that prefill."""
    rate = sum(instance.hello.prefill_tokens_per_s for instance in instances)
    if rate <= 0.0:
        return 0.0
    return (sum(instance.queued_tokens for instance in instances) + waiting_tokens) / rate
