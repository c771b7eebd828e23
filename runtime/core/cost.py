"""What a step costs, as a function of what is in it: the seam between measured engines and those who
predict; and how the router's predictions are kept true while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from trtpd.errors import InputError
from trtpd.runtime.core.events import Hello, Role
from trtpd.runtime.core.learned import Learned


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
    its length. `prefill_step_s` and `decode_step_s` come on top of `fixed_s` in a step with work of that kind.
    `chunk_tokens`: a prompt is computed in steps of so many tokens (None: in one).
    """

    fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_sequence_s: float
    decode_kv_token_s: float
    prefill_step_s: float = 0.0
    decode_step_s: float = 0.0
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "chunk_tokens":
                if value is not None and value < 1:
                    raise InputError(f"chunk_tokens is {value}; a step computes at least 1")
            elif not 0.0 <= value < math.inf:
                raise InputError(f"{item.name} is {value}; a cost is a number of at least 0: measure it again")

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
            + (self.prefill_step_s if n_prefill else 0.0)
            + self.prefill_token_s * prefill_tokens
            + self.prefill_pair_s * pairs
            + (self.decode_step_s if n_decode else 0.0)
            + self.decode_sequence_s * n_decode
            + self.decode_kv_token_s * decode_kv_tokens
        )

    def prompt_s(self, tokens: int) -> float:
        """Seconds for a whole prompt by itself, in as many steps as it takes."""
        steps = -(-tokens // (self.chunk_tokens or tokens)) if tokens else 0
        return (
            (self.fixed_s + self.prefill_step_s) * steps
            + self.prefill_token_s * tokens
            + self.prefill_pair_s * tokens * (tokens // 2)
        )


@dataclass(slots=True, kw_only=True)
class StepWork:
    """What the answers in one message say was computed in the step. Filled while they are handled."""

    n_prefill: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    n_decode: int = 0

    def chunk(self, done_tokens: int, tokens: int) -> None:
        """A chunk of `tokens` behind `done_tokens` that were there."""
        self.n_prefill += 1
        self.prefill_tokens += tokens
        self.prefill_kv_tokens += done_tokens + tokens // 2


UNMEASURED = LinearStepTime(
    fixed_s=0.02, prefill_token_s=0.0, prefill_pair_s=0.0, decode_sequence_s=5e-4, decode_kv_token_s=1e-7
)
"""A decode step where nobody has measured one: how long its two parts are is learned from the steps seen."""

REFERENCE_TOKENS = 1024
KNOWN_AFTER = 8
SAMPLE_BOUND = 4.0
"""One step may count as at most so many times slower or faster than predicted."""

USUAL_SPREAD = 1.5
"""A factor within so much of 1 is no reason to hear an instance less: what its like have in common, and what is wrong
with the common model, shows there first. Of a factor beyond, the rest is taken for its own."""


class Costs:
    """Step times of every role: from a profile where one is given, else from what instances say and show.

    Two layers: a model per role (`models`; for roles without one Learned per build, from the decode steps of all its
    instances, so that an unmeasured engine is not taken for a slow machine, nor an idle one for a dear one), and a
    factor per instance (kept there), which sees a machine that is slower than its like. With `fingerprint` the models
    are of that build's engines: what instances of another cost is learned.
    """

    def __init__(self, models: Mapping[Role, StepTimeModel] | None = None, *, fingerprint: str | None = None) -> None:
        self._models = dict(models or {})
        self._token_s = {
            role: self._prompt_s(model, REFERENCE_TOKENS) / REFERENCE_TOKENS for role, model in self._models.items()
        }
        self._fingerprint = fingerprint
        self._learned: dict[tuple[str, str, Role], Learned] = {}

    def _model(self, hello: Hello, role: Role) -> StepTimeModel | None:
        return self._models.get(role) if self._fingerprint in (None, hello.fingerprint) else None

    def token_s(self, hello: Hello, role: Role) -> float:
        """Seconds per prompt token of a prompt of usual length."""
        if self._model(hello, role) is None:
            return 1.0 / hello.prefill_tokens_per_s
        return self._token_s[role]

    def stretch(self, hello: Hello, role: Role, tokens: int) -> float:
        """How much more a prompt of so many tokens costs than `token_s` for each: attention grows with the
        square."""
        model = self._model(hello, role)
        if model is None or tokens < 1:
            return 1.0
        reference_s = self._token_s[role]
        return self._prompt_s(model, tokens) / (tokens * reference_s) if reference_s > 0.0 else 1.0

    @staticmethod
    def _prompt_s(model: StepTimeModel, tokens: int) -> float:
        if isinstance(model, LinearStepTime):
            return model.prompt_s(tokens)
        return model.step_s(
            n_prefill=1, prefill_tokens=tokens, prefill_kv_tokens=tokens // 2, n_decode=0, decode_kv_tokens=0
        )

    def decode_s(self, hello: Hello, role: Role, mean_tokens: float) -> tuple[float, float]:
        """(a step of one sequence, what each further one adds) at that much KV a sequence."""
        model = self._model(hello, role)
        if model is None:
            return self._unmeasured_s(hello, role, 1.0, mean_tokens)
        if isinstance(model, LinearStepTime):
            each_s = model.decode_sequence_s + model.decode_kv_token_s * mean_tokens
            return model.fixed_s + model.decode_step_s + each_s, each_s
        one_s, most = self._decode_s(model, 1, mean_tokens), max(2, hello.max_batch)
        all_s = self._decode_s(model, most, mean_tokens)
        return one_s, (all_s - one_s) / (most - 1)

    def _unmeasured_s(self, hello: Hello, role: Role, sequences: float, mean_tokens: float) -> tuple[float, float]:
        """(a step of so many sequences, what each further one adds), by what was learned."""
        fixed, rest = self._of(hello, role).parts
        each_s = (UNMEASURED.decode_sequence_s + UNMEASURED.decode_kv_token_s * mean_tokens) * rest
        return UNMEASURED.fixed_s * fixed + each_s * sequences, each_s

    @staticmethod
    def _decode_s(model: StepTimeModel, sequences: int, mean_tokens: float) -> float:
        return model.step_s(
            n_prefill=0,
            prefill_tokens=0,
            prefill_kv_tokens=0,
            n_decode=sequences,
            decode_kv_tokens=round(sequences * mean_tokens),
        )

    def known(self, hello: Hello, role: Role) -> bool:
        """Whether its decode steps are more than a guess."""
        return self._model(hello, role) is not None or self._of(hello, role).samples >= KNOWN_AFTER

    def _of(self, hello: Hello, role: Role) -> Learned:
        key = (hello.model, hello.fingerprint, role)
        found = self._learned.get(key)
        if found is None:
            found = self._learned[key] = Learned()
        return found

    def observe(
        self, hello: Hello, role: Role, work: StepWork, decode_kv_tokens: int, step_s: float, *, factor: float
    ) -> tuple[float, bool]:
        """Takes in that a step took `step_s`. Returns the instance's factor by this step alone, or `factor` if the
        step says nothing; and whether what its like cost has changed with it."""
        predicted_s = self._predict(hello, role, work, decode_kv_tokens)
        if predicted_s <= 0.0 or step_s <= 0.0:
            return factor, False
        renewed = False
        if self._model(hello, role) is None and work.n_decode and not work.n_prefill:
            learned = self._of(hello, role)
            usual_s = step_s / min(max(1.0, factor / USUAL_SPREAD), factor * USUAL_SPREAD)
            if learned.samples:
                usual_s = min(max(usual_s, predicted_s / SAMPLE_BOUND), predicted_s * SAMPLE_BOUND)
            rest_s = UNMEASURED.decode_sequence_s * work.n_decode + UNMEASURED.decode_kv_token_s * decode_kv_tokens
            renewed = learned.note(UNMEASURED.fixed_s / usual_s, rest_s / usual_s)
            if learned.samples < KNOWN_AFTER:
                return factor, renewed
            predicted_s = self._predict(hello, role, work, decode_kv_tokens)
        return min(max(step_s / predicted_s, factor / SAMPLE_BOUND), factor * SAMPLE_BOUND), renewed

    def _predict(self, hello: Hello, role: Role, work: StepWork, decode_kv_tokens: int) -> float:
        model = self._model(hello, role)
        if model is not None:
            return model.step_s(
                n_prefill=work.n_prefill,
                prefill_tokens=work.prefill_tokens,
                prefill_kv_tokens=work.prefill_kv_tokens,
                n_decode=work.n_decode,
                decode_kv_tokens=decode_kv_tokens,
            )
        prefill_s = work.prefill_tokens / hello.prefill_tokens_per_s
        if not work.n_decode:
            return prefill_s
        return prefill_s + self._unmeasured_s(hello, role, work.n_decode, decode_kv_tokens / work.n_decode)[0]
