"""profile.json: what `trtpd profile` measured of a build's engines and transfers, and what was fitted to it.

Whoever predicts reads it: the router, the linter, a simulator. It is a file a user may bring, so it is checked whole:
a key that isn't known is an error that names the nearest one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtpd.build.decoding import plain_json
from trtpd.build.files import ELSEWHERE, translated, write_whole
from trtpd.build.manifest import RoleName
from trtpd.build.spec_errors import describe
from trtpd.errors import InputError

FORMAT = 1
PROFILE = "profile.json"
"""Its name in a build directory, where `trtpd serve` finds it."""

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Residuals(_Part):
    """How far a fit is from what was measured: |predicted - measured| / measured over `points`."""

    points: Count
    p50: Share
    p95: Share
    worst: Share


class StepFit(_Part):
    """The terms of a step's time, as LinearStepTime (runtime/core/cost.py) takes them, and how well they fit."""

    fixed_s: Seconds
    prefill_step_s: Seconds
    prefill_token_s: Seconds
    prefill_pair_s: Seconds
    decode_step_s: Seconds
    decode_sequence_s: Seconds
    decode_kv_token_s: Seconds
    residuals: Residuals


class StepPoint(_Part):
    """One cell that was measured: `batch` prompts of `tokens` tokens behind `prefix_tokens` each that were there (in
    steps in which `beside` sequences with `context_tokens` decode), or a decode step of `batch` sequences with a
    context of `tokens`. `seconds` is the median of `runs` runs, `spread` their range by it.

    The rest is what its steps held all together: so many `steps`, of them `prefill_steps` and `decode_steps` with work
    of that kind; `prefill_pairs` of a new token and one it attends to; `decode_sequences` and `decode_kv_tokens` are
    summed over steps.
    """

    kind: Literal["prefill", "decode"]
    tokens: Count
    batch: Count
    prefix_tokens: Count = 0
    beside: Count = 0
    context_tokens: Count = 0
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    spread: Share
    runs: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    prefill_steps: Count
    prefill_tokens: Count
    prefill_pairs: Seconds
    decode_steps: Count
    decode_sequences: Count
    decode_kv_tokens: Count


class EngineCosts(_Part):
    """One role's engine. `fingerprint` as in the manifest: of what was measured. `fit` is missing until there are
    points enough."""

    fingerprint: str
    engine: str
    precision: str
    tp: Count
    threads: Count
    cores: list[Count]
    chunk_tokens: Count
    points: list[StepPoint]
    fit: StepFit | None = None


class TransferPoint(_Part):
    """The KV of one prompt, handed over from its seal to the end, in one piece."""

    tokens: Count
    bytes: Annotated[int, Field(gt=0)]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    spread: Share
    runs: Annotated[int, Field(ge=1)]


class TransferFit(_Part):
    """A hand-off's time: a fixed part and a rate."""

    fixed_s: Seconds
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    residuals: Residuals


class TransferCosts(_Part):
    """One path, both ends on this host, on the CPUs `source_cores` and `sink_cores`, digests over one block in
    `digest_every` (0: none). None of it is known of a profile made before it was kept."""

    digest_every: Count | None = None
    source_cores: list[Count] | None = None
    sink_cores: list[Count] | None = None
    points: list[TransferPoint]
    fit: TransferFit | None = None


class Where(_Part):
    """Where and with what it was measured. `load_average`: of the minute before it began."""

    made_at: str
    cpu: str
    cpus: int
    cpus_usable: int
    memory_gib: float
    system: str
    python: str
    packages: dict[str, str]
    load_average: float
    gpus: list[str] = Field(default_factory=list)


class CostProfile(_Part):
    """The whole file. `unavailable` says why a path or role was not measured; `complete` is false where the time ended
    first."""

    format: int
    trtpd: str
    model: str
    pair_fingerprint: str
    environment: Where
    complete: bool
    engines: dict[RoleName, EngineCosts]
    transfers: dict[str, TransferCosts]
    unavailable: dict[str, str] = Field(default_factory=dict)


def read_profile(path: Path) -> CostProfile:
    """Raises InputError for a file that is none, in one line: file, key, fault."""
    try:
        data = plain_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}); make it with `trtpd profile BUILD`") from error
    except ValueError as error:
        raise InputError(f"{path}: no profile, it isn't JSON ({error}); make it with `trtpd profile BUILD`") from error
    found: Any = data.get("format") if isinstance(data, dict) else None
    if found is None:
        raise InputError(f"{path}: no profile, it names no format; make it with `trtpd profile BUILD`")
    if found != FORMAT:
        raise InputError(
            f"{path}: format {found!r}, this trtpd reads those of format {FORMAT}; make it with `trtpd profile BUILD`"
        )
    try:
        return CostProfile.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{path}: {describe(error, CostProfile, None)}") from error


def write_profile(path: Path, profile: CostProfile) -> None:
    """Whole or not at all. Raises InputError if it can't be written there."""
    with translated("writing the profile", InputError, ELSEWHERE):
        write_whole(path, (profile.model_dump_json(indent=1) + "\n").encode())
