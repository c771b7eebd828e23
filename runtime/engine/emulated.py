"""The emulated engine: no model, a cost model that sleeps, and KV that matters.

It schedules, allocates and moves KV like a real engine. Each token leaves values in the KV that depend on it
and its position, and the next token is a function of all that the sequence's blocks hold: KV that is missing,
stale or in the wrong place gives other tokens. A temperature only says that the seed matters to them, top-k, top-p and
min-p nothing; what else a request may ask of its sampling is honoured, over logits made up around that token.

A sequence's KV is read whole once; from then on only its last block and, in turn, one of those before it are read
again, so that a step costs the same however long its sequences are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as xxh3

from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.group import Follower, Loaded, alone, check_group, follow, lead
from trtpd.runtime.engine.penalties import changes
from trtpd.runtime.engine.ranks import Array, Ranks
from trtpd.runtime.engine.sampling import Draw, draw, mix, uniform
from trtpd.runtime.engine.shell import ScheduledEngine
from trtpd.runtime.engine.steps import Step

U64 = npt.NDArray[np.uint64]
_WORD = (1 << 64) - 1
_LOGIT_RANGE = 8.0
_ZERO = np.zeros(1, np.uint64)
Sleep = Callable[[float], None]
Clock = Callable[[], float]


def load(
    config: EngineConfig,
    directory: Path,
    *,
    pool_name: str,
    generation: str,
    ranks: Ranks | None = None,
    sleep: Sleep | None = None,
    clock: Clock = time.monotonic,
) -> ScheduledEngine:
    """An engine with the costs of `config.emulated`; `directory` holds nothing it needs. `sleep` spends what a step
    costs beyond what it took: by default on the wall clock, until the engine is closed. In a group this is rank 0,
    and every rank takes a step's whole time. Raises EngineError, CapacityError."""
    del directory
    check_group(config, ranks)
    rank = _load_rank(config, pool_name, generation, ranks, sleep, clock)
    return alone(config, rank, clock=clock) if ranks is None else lead(config, rank, ranks)


def join(config: EngineConfig, directory: Path, *, pool_name: str, generation: str, ranks: Ranks) -> Follower:
    """A rank other than the first. Raises as `load`."""
    del directory
    check_group(config, ranks)
    return follow(config, _load_rank(config, pool_name, generation, ranks, None, time.monotonic), ranks)


def _load_rank(
    config: EngineConfig,
    pool_name: str,
    generation: str,
    ranks: Ranks | None,
    sleep: Sleep | None,
    clock: Clock,
) -> Loaded:
    costs = StepCosts.of(config.emulated)
    rank = 0 if ranks is None else ranks.rank
    pool = SharedPool.create(pool_name, config.layout, config.profile.kv_blocks, generation=generation, tp_rank=rank)
    try:
        part = EmulatedPart(pool, costs, sleep=sleep, clock=clock)
        return loaded(part, pool, vocab_size=config.architecture.vocab_size)
    except BaseException:
        pool.close()
        raise


def loaded(part: EmulatedPart, pool: SharedPool, *, vocab_size: int) -> Loaded:
    """A rank by its part, which reads one digest for each piece that draws."""
    layout = pool.layout
    held = [tuple(layout.rank_heads(rank)) for rank in range(layout.tp)]
    return Loaded(part=part, pool=pool, draw_from=partial(draw_all, held, vocab_size), widths=[1] * layout.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step takes, the sum of its parts: `step_ms`; its prompt tokens at `prefill_tokens_per_s`; if it has
    decodes `decode_step_ms`, for each of them `decode_sequence_ms`, and `decode_kv_token_us` per token of their KV."""

    prefill_tokens_per_s: float
    decode_step_ms: float
    step_ms: float = 0.0
    decode_sequence_ms: float = 0.0
    decode_kv_token_us: float = 0.0

    @classmethod
    def of(cls, emulated: dict[str, float]) -> Self:
        """Raises EngineError for a cost that is unknown, missing or out of range."""
        known = {item.name for item in fields(cls)}
        unknown, missing = emulated.keys() - known, {"prefill_tokens_per_s", "decode_step_ms"} - emulated.keys()
        if unknown or missing:
            raise EngineError(
                f"emulated costs: unknown {sorted(unknown)}, missing {sorted(missing)}; known are {sorted(known)}"
            )
        costs = cls(**emulated)
        if costs.prefill_tokens_per_s <= 0 or min(emulated.values()) < 0:
            raise EngineError(f"emulated costs: {emulated}; none may be negative, and prefill must have a speed")
        return costs

    def step_s(self, pieces: Sequence[Piece]) -> float:
        decodes = [piece for piece in pieces if is_decode(piece)]
        prefill_tokens = sum(len(piece.ids) for piece in pieces if not is_decode(piece))
        seconds = self.step_ms / 1e3 + prefill_tokens / self.prefill_tokens_per_s
        if decodes:
            kv_tokens = sum(piece.end for piece in decodes)
            seconds += (self.decode_step_ms + self.decode_sequence_ms * len(decodes)) / 1e3
            seconds += self.decode_kv_token_us * kv_tokens / 1e6
        return seconds


def is_decode(piece: Piece) -> bool:
    return piece.start > 0 and len(piece.ids) == 1


@dataclass(slots=True)
class _Read:
    """What was read of one sequence: the digest of each of its full blocks, and their sum. `tokens` were there then."""

    tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    total: int = 0


BlockAt = tuple[int, int, int]
"""A block, its place in its sequence, and how many of its tokens count."""

GATHER_BYTES = 4 << 20

SequenceKey = tuple[int, int, int]
"""A sequence by its number, its first block and that block's epoch: what was read of it holds as long as these."""


class EmulatedPart:
    """Writes the KV of its rank's heads, reads it back for each token to be drawn, and sleeps for what the step costs
    beyond that."""

    def __init__(
        self, pool: SharedPool, costs: StepCosts, *, sleep: Sleep | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._closed = threading.Event()
        self._sleep = sleep or self._sleep_until_closed
        self._clock = clock
        self._read: dict[SequenceKey, _Read] = {}
        self._heads = pool.layout.rank_heads(pool.address.tp_rank)
        blocks, _, self._block_tokens, head_dim = pool.keys[0].shape
        # All arrays as one: [array][block][head][token][value].
        self._kv = pool.grid.view(pool.keys[0].dtype).reshape(-1, blocks, *pool.keys[0].shape[1:])
        self._block_bytes = self._kv[:, 0].nbytes
        lanes = mix(np.arange(len(self._kv) * pool.layout.kv_heads * head_dim, dtype=np.uint64))
        self._lanes = lanes.reshape(len(self._kv), -1, head_dim)[:, self._heads.start : self._heads.stop]

    def compute(self, step: Step) -> U64:
        """See Part: one column, a digest over all the KV that the sequence's blocks hold here. Digests of different
        heads add up to that of all."""
        began_s = self._clock()
        self._write(step.pieces)
        digests = self._read_all(step)
        self._sleep(max(0.0, self._costs.step_s(step.pieces) - (self._clock() - began_s)))
        return np.array(digests or [0], np.uint64).reshape(-1, 1)

    def close(self) -> None:
        """See Part. A step that sleeps in another thread ends."""
        self._closed.set()
        self._read.clear()
        self._kv = self._kv[:0].copy()

    def _sleep_until_closed(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _write(self, pieces: Sequence[Piece]) -> None:
        size = self._block_tokens
        at = [(piece.blocks[i // size], i) for piece in pieces for i in range(piece.start, piece.end)]
        blocks, positions = np.array(at, np.int64).T
        ids = np.array([token for piece in pieces for token in piece.ids], np.uint64)
        seeds = mix(ids + (positions.astype(np.uint64) << np.uint64(32)))
        # Small whole numbers, exact in every KV type, whatever they are converted to on the way.
        values = (mix(seeds[:, None, None, None] ^ self._lanes) & np.uint64(0x7F)).astype(np.float32)
        if self._pool.layout.dtype == "bf16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        for index, array in enumerate(self._kv):
            array[blocks, :, positions % size, :] = values[:, index]

    def _read_all(self, step: Step) -> list[int]:
        """What was read of sequences that draw nothing now is forgotten: it is read whole when they do again."""
        former, self._read = self._read, {}
        drawn: list[tuple[Piece, _Read]] = []
        wanted: list[BlockAt] = []
        for piece, epoch in zip(step.pieces, step.epochs, strict=True):
            if piece.draw is None:
                continue
            key = (piece.sequence, piece.blocks[0], epoch)
            read = former.get(key)
            if read is None or read.tokens != piece.start:
                read = _Read()
            self._read[key] = read
            drawn.append((piece, read))
            wanted += self._unread(piece, read)
        digests = iter(self._digests(wanted))
        return [self._digest(piece, read, digests) & _WORD for piece, read in drawn]

    def _unread(self, piece: Piece, read: _Read) -> list[BlockAt]:
        """The blocks `_digest` needs, in the order in which it takes their digests."""
        size = self._block_tokens
        full, rest = divmod(piece.end, size)
        again = [piece.end % len(read.blocks)] if read.blocks else []
        wanted = [(piece.blocks[index], index, size) for index in (*again, *range(len(read.blocks), full))]
        if rest:
            wanted.append((piece.blocks[full], full, rest))
        return wanted

    def _digest(self, piece: Piece, read: _Read, digests: Iterator[int]) -> int:
        """Over the KV of all tokens up to the piece's end, as it lies in the sequence's blocks."""
        full, rest = divmod(piece.end, self._block_tokens)
        if read.blocks:
            index = piece.end % len(read.blocks)
            read.total -= read.blocks[index]
            read.blocks[index] = next(digests)
            read.total += read.blocks[index]
        for _ in range(len(read.blocks), full):
            read.blocks.append(next(digests))
            read.total += read.blocks[-1]
        read.tokens = piece.end
        return read.total + (next(digests) if rest else 0)

    def _digests(self, wanted: Sequence[BlockAt]) -> list[int]:
        """One for each block, over its first tokens. Many are copied out at once: a step of small blocks would
        otherwise be spent on calls."""
        at_once = max(1, GATHER_BYTES // self._block_bytes)
        parts = (wanted[first : first + at_once] for first in range(0, len(wanted), at_once))
        return [digest for part in parts for digest in self._digests_of(part)]

    def _digests_of(self, wanted: Sequence[BlockAt]) -> list[int]:
        blocks = np.array([block for block, _, _ in wanted], np.int64)
        held = np.ascontiguousarray(self._kv[:, blocks].transpose(1, 2, 3, 0, 4))  # [block][head][token][array][value]
        everything = held.view(np.uint8).reshape(-1).data
        head_bytes = held[0, 0].nbytes
        token_bytes = head_bytes // self._block_tokens
        digests, offset = [], 0
        for _, index, tokens in wanted:
            digest = 0
            for head in self._heads:
                digest += xxh3(everything[offset : offset + tokens * token_bytes], index << 16 | head)
                offset += head_bytes
            digests.append(digest)
        return digests


def draw_all(
    held: Sequence[tuple[int, ...]], vocab_size: int, digests: list[Array], asked: Sequence[DrawAt]
) -> list[Draw]:
    """Tokens from every rank's digests; `held` are its heads. Ranks that hold the same head must have read the same
    of it: if they haven't, the token is another."""
    total = np.zeros(len(asked), np.uint64)
    for at, heads in enumerate(held):
        first = held.index(heads)
        # The digest of heads read before counts once; where this rank read something else, that is added.
        total += digests[at][:, 0] if first == at else mix(digests[at][:, 0] ^ digests[first][:, 0]) - mix(_ZERO)
    seeds = np.array([at.sampling.seed & _WORD if at.sampling.temperature > 0 else 0 for at in asked], np.uint64)
    words = mix(mix(total ^ mix(seeds)) ^ np.array([at.index for at in asked], np.uint64))
    return [_draw(word, vocab_size, at) for word, at in zip(words.tolist(), asked, strict=True)]


def _draw(word: int, vocab_size: int, at: DrawAt) -> Draw:
    """The token that `word` stands for, unless the request bars it or prefers others."""
    sampling = at.sampling
    if not (sampling.log_probs or sampling.top_log_probs or changes(sampling, at.index)):
        return Draw(word % vocab_size, None)
    logits = (uniform(word, 0, np.arange(vocab_size)) * -_LOGIT_RANGE).astype(np.float32)
    logits[word % vocab_size] = 1.0
    return draw(logits[None], [msgspec.structs.replace(sampling, temperature=0.0)], [at.index], [at.history])[0]
