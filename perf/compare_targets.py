"""What a comparison fixes before its loaded runs: targets, found on an unloaded server, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtpd.errors import ServeError
from trtpd.perf.compare_arms import Variant
from trtpd.perf.compare_budget import UNLOADED_S, OutOfBudgetError, Step
from trtpd.perf.compare_runs import DisturbedError, Runs
from trtpd.perf.comparison import Aside
from trtpd.perf.interference import interference_workload
from trtpd.perf.prompt_text import Segment
from trtpd.perf.records import Record
from trtpd.perf.slo import LengthSlo
from trtpd.perf.workload import Ask, Workload

TTFT_FLOOR_S = 1.0
FACTOR = 2.5
UNLOADED_LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096)
UNLOADED_REPEATS = 3
UNLOADED_ANSWER = 24
UNLOADED_ANSWERED = 256
SHARED_DECODE = 4
LOAD_SHARES = (0.33, 0.41, 0.51, 0.64, 0.8, 1.0, 1.25, 1.56, 1.95, 2.44)
PATIENCE = 1.5
LONG_PERCENTILE = 90


def fix_targets(runs: Runs, variant: Variant) -> tuple[LengthSlo, Aside]:
    """From one request at a time on `variant`, which has all cores together: what a user alone on the machine would
    get; and how that run was. Made once more if it was disturbed. Raises ServeError if a length has no answer,
    DisturbedError if there is no time to make it again, OutOfBudgetError if there is none to make it."""
    most = max(ask.prompt_tokens for ask in runs.sample)
    enough = next((tokens for tokens in UNLOADED_LENGTHS[1:] if tokens >= most), UNLOADED_LENGTHS[-1])
    lengths = [t for t in UNLOADED_LENGTHS if t <= enough and t + UNLOADED_ANSWER <= runs.longest_tokens]
    warm_up = [tokens for tokens in lengths if tokens <= UNLOADED_ANSWERED]
    asks = [
        Ask(
            segments=(Segment(number, tokens),),
            max_tokens=UNLOADED_ANSWER if tokens <= UNLOADED_ANSWERED else 1,
            kind=str(tokens),
        )
        for number, tokens in enumerate(warm_up + lengths * UNLOADED_REPEATS)
    ]
    workload = Workload(name="unloaded", seed=0, asks=tuple(asks), concurrency=1)
    fault, lasts_s = "", UNLOADED_S
    for turn in range(2):  # again on a server that has not seen these prompts
        name = f"unloaded requests on {variant.arm} ({variant.label}), to fix the targets"
        try:
            with runs.served_when_needed(variant) as target_of:
                target = target_of(Step(name=name, arrive_s=lasts_s, again=fault))
                driven = runs.drive(target, workload, name + ", again" * turn)
        except OutOfBudgetError as error:
            if not fault:
                raise
            raise DisturbedError(
                f"the unloaded run that the targets come from was disturbed ({fault}), and making it again takes "
                f"{error.needs_s:.0f} s, more than the budget has left: give the same command a longer --budget-s, or "
                "end the other work"
            ) from error
        lasts_s = driven.run.health.wall_s
        fault = runs.fault(driven, None)
        if not fault:
            break
    slo = _targets(driven.run.records[len(warm_up) :], lengths)
    return slo, Aside(fault=fault, health=driven.run.health, others_cores=driven.others_cores)


def _targets(records: Sequence[Record], lengths: Sequence[int]) -> LengthSlo:
    """Raises ServeError if a length was not answered: no target may come from nothing."""
    finished = [record for record in records if record.state == "finished"]
    unloaded = []
    for tokens in lengths:
        found = [r.ttft_s for r in finished if r.kind == str(tokens) and r.ttft_s is not None]
        if not found:
            raise _unanswered(f"prompts of {tokens} tokens", [r for r in records if r.kind == str(tokens)])
        unloaded.append((tokens, float(np.median(found))))
    gaps = [r.tpot_s for r in finished if r.tpot_s is not None]
    if not gaps:
        raise _unanswered("any prompt with more than one token", records)
    return LengthSlo(
        floor_s=TTFT_FLOOR_S, factor=FACTOR, unloaded=tuple(unloaded), tpot_s=FACTOR * float(np.median(gaps))
    )


def _unanswered(what: str, records: Sequence[Record]) -> ServeError:
    why = sorted({f"{r.state} {r.reason}: {r.message}".strip(" :") for r in records if r.state != "finished"})
    said = f" ({'; '.join(why[:3])})" if why else ""
    return ServeError(
        f"no targets can be fixed: the unloaded server answered {what} in none of {len(records)} tries{said}; see its "
        "log below arms/, bound the lengths with --max-total-tokens if they are too long for it, and compare again"
    )


def patience_s(slo: LengthSlo, asks: Sequence[Ask]) -> float:
    """PATIENCE times what the request of the latest end may take by its targets: one that takes longer is of no use
    to anyone, and an overloaded run needs an end."""
    tpot_s = slo.tpot_s or 0.0
    return PATIENCE * max(slo.ttft_for(ask.prompt_tokens) + ask.max_tokens * tpot_s for ask in asks)


def usual_rates(slo: LengthSlo, asks: Sequence[Ask]) -> tuple[float, ...]:
    """Shares of the rate at which prompts alone one after another, and decoding SHARED_DECODE at a time, would fill
    the machine."""
    tpot_s = (slo.tpot_s or 0.0) / FACTOR
    busy_s = np.mean([slo.unloaded_s(a.prompt_tokens) + a.max_tokens * tpot_s / SHARED_DECODE for a in asks])
    return tuple(round(share / float(busy_s), 3) for share in LOAD_SHARES)


def disturbance(slo: LengthSlo, asks: Sequence[Ask], longest_tokens: int) -> Workload:
    """Long prompts of such requests beside answers being written."""
    tokens = round(float(np.percentile([ask.prompt_tokens for ask in asks], LONG_PERCENTILE)))
    return interference_workload(
        longest=longest_tokens,
        tpot_s=(slo.tpot_s or 0.1) / FACTOR,
        prefill_s=slo.unloaded_s(tokens),
        prompt_tokens=tokens,
    )
