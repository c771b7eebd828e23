"""A request and the rules of the moment, as placement takes them: values made from the books."""

from __future__ import annotations

from trtpd.runtime.core.books import Books
from trtpd.runtime.core.degrade import Rung
from trtpd.runtime.core.place import Rules
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.score import Work


def work_of(books: Books, request: Request) -> Work:
    """A request as the score sees it."""
    return Work(
        prompt_tokens=request.prompt_tokens,
        total_tokens=request.total_tokens,
        left_tokens=request.left_tokens,
        tpot_s=request.arrived.tpot_s,
        hits=hits_of(books, request),
        short=books.policy.is_short(request.prompt_tokens),
    )


def hits_of(books: Books, request: Request) -> dict[str, int]:
    """Tokens of its prompt that instances with a prefix cache should hold. The last token is computed anyway."""
    hashes = request.arrived.block_hashes
    if not hashes:
        return {}
    found: dict[str, int] = {}
    for name, blocks in books.cluster.prefixes.hits(hashes).items():
        instance = books.cluster.instances[name]
        if instance.load.cached_blocks:
            found[name] = min(blocks * instance.hello.tokens_per_block, request.prompt_tokens - 1)
    return found


def rules_of(books: Books, request: Request) -> Rules:
    """What placement may do for this request now."""
    policy, rung = books.policy, books.ladder.rung
    if rung >= Rung.LONG_WAIT and books.now_s - request.arrived_s >= policy.long_wait_s:
        rung = Rung.SHORT_LOCAL  # it has left the way to others for long enough
    found = books.rules.get(rung)
    if found is None:
        found = books.rules[rung] = Rules(
            weights=policy.weights,
            links=books.links,
            rung=rung,
            local_tokens=policy.local_tokens if rung is Rung.NORMAL else max(policy.local_tokens, policy.short_tokens),
            long_tokens=policy.long_tokens,
        )
    return found
