"""The emulated engine: no model, a cost model that sleeps, and KV that matters.

It schedules, allocates and moves KV like a real engine. Each token leaves values in the KV that depend on it
and its position, and the next token is a function of all that the sequence's blocks hold: KV that is missing,
stale or in the wrong place gives other tokens.

What holds a sequence is read whole once; from then on only its last block and, in turn, one of those before it are
read again, so that a step costs the same however long its sequences are.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.sampling import Draw
from trtpd.runtime.engine.shell import ScheduledEngine

U64 = npt.NDArray[np.uint64]
Sleep = Callable[[float], None]
Clock = Callable[[], float]


def load(
    config: EngineConfig,
    directory: Path,
    *,
    pool_name: str,
    generation: str,
    sleep: Sleep | None = None,
    clock: Clock = time.monotonic,
) -> ScheduledEngine:
    """An engine with the costs of `config.emulated`; `directory` holds nothing it needs. `sleep` spends what a step
    costs beyond what it took: by default on the wall clock, until the engine is closed. Raises EngineError,
    CapacityError."""
    del directory
    costs = StepCosts.of(config.emulated)
    pool = SharedPool.create(pool_name, config.layout, config.profile.kv_blocks, generation=generation)
    try:
        executor = EmulatedExecutor(pool, costs, vocab_size=config.architecture.vocab_size, sleep=sleep, clock=clock)
        return ScheduledEngine(config, pool, executor, clock=clock)
    except BaseException:
        pool.close()
        raise


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


SequenceKey = tuple[int, int]
"""A sequence by its first block and that block's epoch: no two sequences have had the same."""


class EmulatedExecutor:
    """Writes KV, reads it back for each token it draws, and sleeps for what the step costs beyond that."""

    def __init__(
        self,
        pool: SharedPool,
        costs: StepCosts,
        *,
        vocab_size: int,
        sleep: Sleep | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._vocab_size = vocab_size
        self._closed = threading.Event()
        self._sleep = sleep or self._sleep_until_closed
        self._clock = clock
        self._read: dict[SequenceKey, _Read] = {}
        blocks, self._heads, self._block_tokens, self._head_dim = pool.keys[0].shape
        # All arrays as one: [array][block][head][token][value].
        self._kv = pool.grid.view(pool.keys[0].dtype).reshape(-1, blocks, *pool.keys[0].shape[1:])
        self._lanes = mix(np.arange(len(self._kv) * self._heads * self._head_dim, dtype=np.uint64))

    def run(self, pieces: Sequence[Piece]) -> list[Draw | None]:
        """See Executor."""
        began_s = self._clock()
        self._write(pieces)
        draws = self._draw_all(pieces)
        self._sleep(max(0.0, self._costs.step_s(pieces) - (self._clock() - began_s)))
        return draws

    def close(self) -> None:
        """See Executor. A step that sleeps in another thread ends."""
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
        values = (mix(seeds[:, None] ^ self._lanes) & np.uint64(0x7F)).astype(np.float32)
        if self._pool.layout.dtype == "bf16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        by_array = values.reshape(len(positions), -1, self._heads, self._head_dim)
        for index, array in enumerate(self._kv):
            array[blocks, :, positions % size, :] = by_array[:, index]

    def _draw_all(self, pieces: Sequence[Piece]) -> list[Draw | None]:
        """What was read of sequences that draw nothing now is forgotten: it is read whole when they do again."""
        epochs = self._pool.epochs_of([piece.blocks[0] for piece in pieces])
        former, self._read = self._read, {}
        draws: list[Draw | None] = []
        for piece, epoch in zip(pieces, epochs, strict=True):
            if piece.draw is None:
                draws.append(None)
                continue
            key = (piece.blocks[0], epoch)
            read = former.get(key)
            if read is None or read.tokens != piece.start:
                read = _Read()
            self._read[key] = read
            draws.append(self._draw(self._digest(piece, read), piece.draw))
        return draws

    def _draw(self, digest: int, at: DrawAt) -> Draw:
        seed = at.sampling.seed if at.sampling.temperature > 0 else 0
        word = xxhash.xxh3_64_intdigest(f"{digest} {seed} {at.index}".encode())
        log_prob = math.log(((word >> 11) + 1) * 2.0**-53)
        return Draw(word % self._vocab_size, log_prob if at.sampling.log_probs else None)

    def _digest(self, piece: Piece, read: _Read) -> int:
        """Over the KV of all tokens up to the piece's end, as it lies in the sequence's blocks."""
        full, rest = divmod(piece.end, self._block_tokens)
        if read.blocks:
            index = piece.end % len(read.blocks)
            read.total -= read.blocks[index]
            read.blocks[index] = self._block_digest(piece, index, self._block_tokens)
            read.total += read.blocks[index]
        for index in range(len(read.blocks), full):
            read.blocks.append(self._block_digest(piece, index, self._block_tokens))
            read.total += read.blocks[index]
        read.tokens = piece.end
        return read.total + (self._block_digest(piece, full, rest) if rest else 0)

    def _block_digest(self, piece: Piece, index: int, tokens: int) -> int:
        held = self._kv[:, piece.blocks[index], :, :tokens]
        return xxhash.xxh3_64_intdigest(held.tobytes(), seed=index)


def mix(words: U64) -> U64:
    """A well-mixed 64-bit word for each word (the finaliser of splitmix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = words ^ (words >> np.uint64(31))
    return mixed
