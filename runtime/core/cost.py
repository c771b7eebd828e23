"""What a step costs, as a function of what is in it: the seam between measured engines and those who
predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trtpd.errors import InputError


class StepTimeModel(Protocol):
    """Predicts one engine step. Pure: equal arguments give equal seconds."""

    def step_s(
        self,
        *,
        n_prefill: int,
        prefill_tokens: int,
        prefill_kv_tokens: int,
        n_decode: int,
        decode_kv_tokens: int,
    ) -> float:
        """Seconds for a step of `prefill_tokens` prompt tokens of `n_prefill` sequences and one token for
        each of `n_decode` sequences. The `kv` counts are the tokens attended to: for a chunk, those already
        computed plus half the chunk's own, summed over sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepTime:
    """A step's time as a fixed part and one rate per kind of work; good to a few percent within one batch
    regime.

    `prefill_pair_s` is per pair of a new token and a token it attends to: with n sequences of about the same
    shape there are `prefill_tokens * prefill_kv_tokens / n` pairs, so a long prompt grows with the square of
    its length.
    """

    fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_sequence_s: float
    decode_kv_token_s: float

    def __post_init__(self) -> None:
        for name in (
            "fixed_s",
            "prefill_token_s",
            "prefill_pair_s",
            "decode_sequence_s",
            "decode_kv_token_s",
        ):
            if getattr(self, name) < 0.0:
                raise InputError(f"{name} is {getattr(self, name)}; a cost can't be negative: measure it again")

    def step_s(
        self,
        *,
        n_prefill: int,
        prefill_tokens: int,
        prefill_kv_tokens: int,
        n_decode: int,
        decode_kv_tokens: int,
    ) -> float:
        if n_prefill == 0 and n_decode == 0:
            return 0.0
        pairs = prefill_kv_tokens * prefill_tokens / n_prefill if n_prefill else 0.0
        return (
            self.fixed_s
            + self.prefill_token_s * prefill_tokens
            + self.prefill_pair_s * pairs
            + self.decode_sequence_s * n_decode
            + self.decode_kv_token_s * decode_kv_tokens
        )
