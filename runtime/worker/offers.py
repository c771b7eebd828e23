"""Prefill's side of a hand-off: from the engine's events to an offer, chunks and a seal."""

from __future__ import annotations

import msgspec

from trtpd.kv_transfer.base import KVSource
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import PrefillBegan, PrefillChunk, PrefillDone
from trtpd.runtime.worker.jobs import Job, Stage


def hand_out(source: KVSource, job: Job, event: PrefillBegan | PrefillChunk | PrefillDone) -> core.InstanceEvent:
    """Lets `source` offer, publish or seal what the engine reports, and says so to the router."""
    if isinstance(event, PrefillBegan):
        return _offered(source, job, event)
    if isinstance(event, PrefillChunk):
        chunk = source.publish(job.key, ready_tokens=event.ready_tokens)
        return core.ChunkReady(
            request_id=event.request_id,
            attempt=event.attempt,
            ready_tokens=event.ready_tokens,
            chunk=msgspec.msgpack.encode(chunk),
        )
    return _sealed(source, job, event)


def _offered(source: KVSource, job: Job, event: PrefillBegan) -> core.Offered:
    offer = source.offer(job.key, prompt_tokens=len(job.request.prompt_ids), blocks=event.blocks)
    return core.Offered(
        request_id=event.request_id,
        attempt=event.attempt,
        blocks=len(event.blocks),
        lease_s=offer.lease_s,
        cached_tokens=event.cached_tokens,
        offer=msgspec.msgpack.encode(offer),
    )


def _sealed(source: KVSource, job: Job, event: PrefillDone) -> core.Sealed:
    job.stage = Stage.HELD
    seal = source.seal(
        job.key,
        first_token=event.token,
        first_log_prob=event.log_prob,
        seed=job.request.sampling.seed,
    )
    return core.Sealed(
        request_id=event.request_id,
        attempt=event.attempt,
        first_index=event.first_index,
        token=event.token,
        log_prob=event.log_prob,
        finish=event.finish,
        top_log_probs=event.top_log_probs,
        seal=msgspec.msgpack.encode(seal),
    )
