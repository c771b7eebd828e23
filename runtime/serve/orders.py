"""What the core orders of an instance, as the message that its leader takes."""

from __future__ import annotations

from dataclasses import dataclass

from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineRequest, RequestKind, Sampling
from trtpd.runtime.worker.messages import CancelWork, PullWork, SubmitWork, WithdrawWork

Order = core.Submit | core.Pull | core.Withdraw | core.Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked and tokenised request. `deadline_s`, `ttft_s` and `tpot_s` are durations. `block_hashes` as in Arrived;
    `reuse` as in EngineRequest."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    deadline_s: float
    stops: tuple[str, ...] = ()
    echo: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    block_hashes: tuple[int, ...] = ()
    reuse: bool = False
    priority: int = 0
    tenant: str = ""


def ending_of(order: core.Withdraw | core.Cancel) -> WithdrawWork | CancelWork:
    kind = WithdrawWork if isinstance(order, core.Withdraw) else CancelWork
    return kind(request_id=order.request_id, attempt=order.attempt)


def beginning_of(order: core.Submit | core.Pull, prepared: Prepared, *, deadline_in_s: float) -> SubmitWork | PullWork:
    """The request is in it: in a Pull only where the sink doesn't have it yet."""
    if isinstance(order, core.Submit):
        return SubmitWork(request=_request(order, prepared, RequestKind(order.kind)), deadline_in_s=deadline_in_s)
    return PullWork(
        request_id=order.request_id,
        attempt=order.attempt,
        request=None if order.offer is None else _request(order, prepared, RequestKind.GENERATION_ONLY),
        offer=order.offer,
        chunks=order.chunks,
        seal=order.seal,
        deadline_in_s=deadline_in_s,
    )


def _request(order: core.Submit | core.Pull, prepared: Prepared, kind: RequestKind) -> EngineRequest:
    return EngineRequest(
        request_id=order.request_id,
        attempt=order.attempt,
        kind=kind,
        prompt_ids=prepared.prompt_ids + order.journal,
        max_tokens=prepared.max_tokens,
        sampling=prepared.sampling,
        first_index=len(order.journal),
        priority=prepared.priority,
        reuse=prepared.reuse,
    )
