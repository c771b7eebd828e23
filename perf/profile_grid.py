"""What `trtpd profile` measures of one engine: cells from coarse to fine, so that a run cut short still has a fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trtpd.build.manifest import EngineConfig
from trtpd.perf.engine_runs import DECODE_STEPS, GROWTH_TOKENS, needs_of
from trtpd.perf.measured import Cell

LENGTHS = (128, 512, 32, 2048, 8192)
PREFIXES = (512, 2048)
CONTEXTS = (64, 2048, 512)
BATCHES = (1, 16, 4, 64, 256, 2, 8, 32, 128)
BESIDE = (4, 1, 16)
BESIDE_TOKENS = (128, 32)
BESIDE_CONTEXT = 256
FOREIGN_BATCHES = (1, 4, 2)
FOREIGN_CONTEXTS = 2
"""Of decode on an engine that only prefills: it decodes where nothing else can."""

FIRST_OWN, FIRST_OTHER = 6, 4
"""So many cells of each kind of work come first: of decode two batches of each context among them, of prefill three
lengths, as a fit needs."""


class Grid:
    """The cells for one engine. `stepwise`: it tells its steps apart, so work of both kinds in one step can be
    measured."""

    def __init__(self, config: EngineConfig, *, stepwise: bool = True) -> None:
        self._role = config.role
        self._profile = config.profile
        self._block = config.layout.tokens_per_block
        self._stepwise = stepwise
        self._max_seq_tokens = config.max_seq_tokens
        self._longest = min(config.max_seq_tokens, config.profile.kv_blocks * self._block) - GROWTH_TOKENS
        self._running = min(config.profile.max_batch, config.profile.max_step_tokens)

    def cells(self) -> list[Cell]:
        """Each once: first the few of both kinds that a fit needs, then those of the role's own work."""
        own, other = self._fitting(self._prefills()), self._fitting(self._decodes())
        if self._role == "decode":
            own, other = other, own
        mixed = self._fitting(self._mixed() if self._stepwise and self._role != "prefill" else ())
        first = [*own[:FIRST_OWN], *other[:FIRST_OTHER]]
        return list(dict.fromkeys([*first, *own, *other, *mixed]))

    def _prefills(self) -> Iterator[Cell]:
        lengths = self._sizes(LENGTHS)
        if self._role == "decode":
            lengths = [tokens for tokens in lengths if tokens <= max(512, 2 * self._profile.chunk_tokens)]
        # Steps that a chunk doesn't fill tell what a step costs from what its tokens do.
        for tokens in [*lengths, max(1, self._profile.chunk_tokens // 4), max(1, self._profile.chunk_tokens // 2)]:
            yield Cell(kind="prefill", tokens=tokens, batch=1)
        short = [tokens for tokens in lengths if tokens <= 512]
        for prefix in dict.fromkeys(self._whole(size) for size in self._sizes(PREFIXES)):
            for tokens in short:
                yield Cell(kind="prefill", tokens=tokens, batch=1, prefix_tokens=prefix)
        for tokens, batch in ((128, 4), (32, 8)):
            if self._role != "decode" and tokens * batch <= self._profile.max_step_tokens:
                yield Cell(kind="prefill", tokens=tokens, batch=batch)

    def _decodes(self) -> Iterator[Cell]:
        contexts, batches = self._sizes(CONTEXTS), [size for size in BATCHES if size <= self._running]
        if self._role == "prefill":
            contexts = sorted(contexts)[:FOREIGN_CONTEXTS]
            batches = [size for size in batches if size in FOREIGN_BATCHES]
        for batch in batches:
            for context in contexts:
                yield Cell(kind="decode", tokens=context, batch=batch)

    def _mixed(self) -> Iterator[Cell]:
        context = min(BESIDE_CONTEXT, self._longest // 2)
        for beside in BESIDE:
            room = min(self._profile.chunk_tokens, self._profile.max_step_tokens - beside)
            for tokens in BESIDE_TOKENS:
                if beside < self._running and 0 < tokens <= DECODE_STEPS * room:
                    yield Cell(kind="prefill", tokens=tokens, batch=1, beside=beside, context_tokens=context)

    def _sizes(self, wanted: Iterable[int]) -> list[int]:
        """Those that fit; for a small engine parts of what it holds."""
        sizes = [size for size in wanted if size <= self._longest]
        if len(sizes) < 2:
            sizes += [self._longest // 8, self._longest // 2]
        return [size for size in dict.fromkeys(sizes) if size > 0]

    def _whole(self, tokens: int) -> int:
        """A prefix that ends where its part is told apart: with a block where it comes from a cache, else with a
        step."""
        unit = self._block if self._profile.prefix_cache else self._profile.chunk_tokens
        return tokens // unit * unit or unit

    def _fitting(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if self._fits(cell)]

    def _fits(self, cell: Cell) -> bool:
        needs = needs_of(cell, self._block)
        return needs.fit(kv_blocks=self._profile.kv_blocks, max_seq_tokens=self._max_seq_tokens)


def transfer_cells(longest_tokens: int) -> list[Cell]:
    """Hand-offs of prompts of these sizes."""
    sizes = [size for size in (128, 2048, 512, 32) if size <= longest_tokens] or [longest_tokens]
    return [Cell(kind="transfer", tokens=size, batch=1) for size in sizes]
