"""First steps of an engine before anyone waits for them: graphs settle, pages fault in, and prefill is timed."""

from __future__ import annotations

import time
from collections.abc import Callable

from trtpd.errors import EngineError
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import Engine, EngineRequest, RequestKind, Sampling

PROMPT_TOKENS = 256
POLL_S = 1.0
GIVE_UP_S = 120.0


def warm_up(engine: Engine, clock: Callable[[], float] = time.monotonic) -> float:
    """Runs two prompts and a few tokens each; the second prompt's prefill rate in tokens per second.

    Raises EngineError if the engine can't do that.
    """
    limits = engine.limits
    pool_tokens = limits.kv_blocks * limits.tokens_per_block
    room_tokens = min(limits.max_seq_tokens, pool_tokens) // 2
    tokens = max(1, min(PROMPT_TOKENS, limits.max_step_tokens, room_tokens))
    _one(engine, 0, tokens, clock)
    return tokens / max(_one(engine, 1, tokens, clock), 1e-6)


def _one(engine: Engine, request_id: int, tokens: int, clock: Callable[[], float]) -> float:
    """Seconds to the first token."""
    request = EngineRequest(
        request_id=request_id,
        attempt=1,
        kind=RequestKind.CONTEXT_AND_GENERATION,
        prompt_ids=tuple(index % engine.limits.vocab_size for index in range(tokens)),
        max_tokens=3,
        sampling=Sampling(),
        reuse=False,
    )
    began_s = clock()
    engine.submit(request)
    first_s: float | None = None
    while clock() - began_s < GIVE_UP_S:
        for event in engine.poll(POLL_S).events:
            if isinstance(event, core.Rejected):
                raise EngineError(f"the engine failed its first step: {event.reason}")
            if isinstance(event, core.Tokens):
                first_s = clock() - began_s if first_s is None else first_s
                if event.finish is not None:
                    return first_s
    raise EngineError(f"the engine did not finish {tokens} tokens within {GIVE_UP_S:g} s of its start")
