"""The emulated engine: no model, a cost model that sleeps, and KV that matters.

It schedules, allocates and moves KV like a real engine. Each token leaves values in the KV that depend on it
and its position, and the next token is a function of all that the sequence's blocks hold: KV that is missing,
stale or in the wrong place gives other tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from trtpd.build.manifest import EngineConfig
from trtpd.errors import EngineError
from trtpd.kv_transfer.layout import DTYPE_BYTES
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.sampling import Draw
from trtpd.runtime.engine.shell import ScheduledEngine

U64 = npt.NDArray[np.uint64]
Sleep = Callable[[float], None]


def load(
    config: EngineConfig, directory: Path, *, pool_name: str, generation: str, sleep: Sleep | None = None
) -> ScheduledEngine:
    """An engine with the costs of `config.emulated`; `directory` holds nothing it needs. `sleep` spends a
    step's time: by default on the wall clock, cut short by `shutdown`. Raises EngineError, CapacityError."""
    del directory
    costs = StepCosts.of(config.emulated)
    pool = SharedPool.create(pool_name, config.layout, config.profile.kv_blocks, generation=generation)
    try:
        executor = EmulatedExecutor(pool, costs, vocab_size=config.architecture.vocab_size, sleep=sleep)
        return ScheduledEngine(config, pool, executor)
    except BaseException:
        pool.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step takes: `step_ms`, and for its prompt tokens their share of `prefill_tokens_per_s`, and for
    its decodes `decode_step_ms` once, `decode_sequence_ms` each, and `decode_kv_token_us` per token of their
    KV."""

    prefill_tokens_per_s: float
    decode_step_ms: float
    step_ms: float = 0.0
    decode_sequence_ms: float = 0.0
    decode_kv_token_us: float = 0.0

    @classmethod
    def of(cls, emulated: dict[str, float]) -> Self:
        """Raises EngineError for a cost that is unknown, missing or out of range."""
        known = {field.name for field in fields(cls)}
        unknown, missing = (
            emulated.keys() - known,
            {"prefill_tokens_per_s", "decode_step_ms"} - emulated.keys(),
        )
        if unknown or missing:
            raise EngineError(
                f"emulated costs: unknown {sorted(unknown)}, missing {sorted(missing)}; "
                f"known are {sorted(known)}"
            )
        costs = cls(**emulated)
        if costs.prefill_tokens_per_s <= 0 or min(emulated.values()) < 0:
            raise EngineError(
                f"emulated costs: {emulated}; none may be negative, and prefill must have a speed"
            )
        return costs

    def step_s(self, pieces: Sequence[Piece]) -> float:
        decodes = [piece for piece in pieces if is_decode(piece)]
        prefill_tokens = sum(len(piece.ids) for piece in pieces if not is_decode(piece))
        milliseconds = self.step_ms + self.decode_sequence_ms * len(decodes)
        if decodes:
            milliseconds += self.decode_step_ms
        milliseconds += self.decode_kv_token_us * sum(piece.end for piece in decodes) / 1e3
        return milliseconds / 1e3 + prefill_tokens / self.prefill_tokens_per_s


def is_decode(piece: Piece) -> bool:
    return piece.start > 0 and len(piece.ids) == 1


class EmulatedExecutor:
    """Writes KV, reads it back and sleeps."""

    def __init__(
        self, pool: SharedPool, costs: StepCosts, *, vocab_size: int, sleep: Sleep | None = None
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._vocab_size = np.uint64(vocab_size)
        self._closed = threading.Event()
        self._sleep = sleep or self._sleep_until_closed
        layout = pool.layout
        lanes = 2 * len(pool.keys) * pool.keys[0].shape[1] * layout.head_dim
        self._lanes = mix(np.arange(1, lanes + 1, dtype=np.uint64))
        self._word = np.dtype({4: np.uint32, 2: np.uint16}[DTYPE_BYTES[layout.dtype]])
        self._planes = [
            array.view(self._word) for pair in zip(pool.keys, pool.values, strict=True) for array in pair
        ]

    def run(self, pieces: Sequence[Piece]) -> list[Draw | None]:
        """See Executor."""
        self._sleep(self._costs.step_s(pieces))
        for piece in pieces:
            self._write(piece)
        return [None if piece.draw is None else self._draw(piece, piece.draw) for piece in pieces]

    def close(self) -> None:
        """See Executor. A step that sleeps in another thread ends."""
        self._closed.set()
        self._planes = []

    def _sleep_until_closed(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _write(self, piece: Piece) -> None:
        positions = np.arange(piece.start, piece.end, dtype=np.uint64)
        seeds = mix(np.asarray(piece.ids, np.uint64) + (positions << np.uint64(32)))
        # Small whole numbers, exact in every KV type, whatever it is converted to on the way.
        values = (mix(seeds[:, None] ^ self._lanes) & np.uint64(0x7F)).astype(np.float32)
        if self._pool.layout.dtype == "f32":
            words = values.view(np.uint32)
        elif self._pool.layout.dtype == "f16":
            words = values.astype(np.float16).view(np.uint16)
        else:
            words = (values.view(np.uint32) >> 16).astype(np.uint16)
        blocks, slots = self._places(piece, piece.start)
        for plane, part in zip(self._planes, self._by_plane(words), strict=True):
            plane[blocks, :, slots, :] = part

    def _draw(self, piece: Piece, at: DrawAt) -> Draw:
        blocks, slots = self._places(piece, 0)
        parts = [plane[blocks, :, slots, :].reshape(piece.end, -1) for plane in self._planes]
        words = np.concatenate(parts, axis=1).astype(np.uint64)
        per_token = (words * self._lanes).sum(axis=1, dtype=np.uint64)
        weights = mix(np.arange(piece.end, dtype=np.uint64)) | np.uint64(1)
        held = (per_token * weights).sum(dtype=np.uint64)
        seed = at.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF if at.sampling.temperature > 0 else 0
        salt = np.array([seed, at.index], np.uint64)
        word = mix(mix(held[None] ^ mix(salt[:1])) + salt[1:])[0]
        log_prob = float(np.log((float(word >> np.uint64(11)) + 1) * 2.0**-53))
        return Draw(int(word % self._vocab_size), log_prob if at.sampling.log_probs else None)

    def _places(self, piece: Piece, start: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Block and slot of each of the sequence's tokens from `start` to the piece's end."""
        positions = np.arange(start, piece.end)
        size = self._pool.layout.tokens_per_block
        return np.asarray(piece.blocks, np.intp)[positions // size], positions % size

    def _by_plane(self, words: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
        """`[tokens, lanes]` as one `[tokens, heads, head_dim]` for K and V of each layer."""
        heads, head_dim = self._planes[0].shape[1], self._planes[0].shape[3]
        split = words.reshape(len(words), len(self._planes), heads, head_dim)
        return [split[:, plane] for plane in range(len(self._planes))]


def mix(words: U64) -> U64:
    """A well-mixed 64-bit word for each word (the finaliser of splitmix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = words ^ (words >> np.uint64(31))
    return mixed
