"""How work begins: what an instance of this role can take, and what it needs of engine, source and sink."""

from __future__ import annotations

from trtpd.errors import RequestError
from trtpd.kv_transfer.base import Key, KVSource
from trtpd.runtime.engine.base import Engine, EngineRequest, RequestKind
from trtpd.runtime.worker.jobs import Job, Stage, UnsupportedError
from trtpd.runtime.worker.local import SyntheticWork, fill_synthetic
from trtpd.runtime.worker.messages import PullWork, SubmitWork
from trtpd.runtime.worker.pulls import Pulls, reserve

NewWork = SubmitWork | PullWork | SyntheticWork


def key_of(work: NewWork) -> Key:
    return (work.request_id, work.attempt) if isinstance(work, PullWork) else work.request.key


class Intake:
    """Begins work. Every method raises TrtpdError for work that can't begin; then nothing is held for it."""

    def __init__(self, engine: Engine, source: KVSource | None, pulls: Pulls | None) -> None:
        self._engine = engine
        self._source = source
        self._pulls = pulls

    def begin(self, work: NewWork, *, now_s: float) -> Job:
        deadline_s = now_s + work.deadline_in_s
        if isinstance(work, PullWork):
            return Job(self._pull(work), deadline_s, Stage.PULLING)
        if isinstance(work, SyntheticWork):
            self._decode_synthetic(work.request)
        else:
            self._compute(work.request)
        return Job(work.request, deadline_s, Stage.RUNNING)

    def _compute(self, request: EngineRequest) -> None:
        if request.kind is RequestKind.GENERATION_ONLY:
            raise RequestError("generation_only work needs an offer to pull; send PullWork")
        if request.kind is RequestKind.CONTEXT_ONLY and self._source is None:
            raise UnsupportedError("this instance hands no KV to others; it can't prefill for them")
        self._engine.submit(request)

    def _pull(self, work: PullWork) -> EngineRequest:
        if self._pulls is None:
            raise UnsupportedError("this instance takes no KV from others; it can't decode for them")
        return self._pulls.begin(work)

    def _decode_synthetic(self, request: EngineRequest) -> None:
        kv = self._engine.kv
        if kv is None:
            raise UnsupportedError("this engine's KV can't be filled from outside")
        blocks = reserve(self._engine, kv, request)
        try:
            fill_synthetic(kv.pool, blocks)
            self._engine.submit(request)
        except BaseException:
            kv.free(request.key)
            raise
