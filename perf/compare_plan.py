"""What must be the same for a comparison to go on in its folder, or to take another's targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trtpd.build.files import digest_of, expanded
from trtpd.build.manifest import Manifest
from trtpd.errors import InputError
from trtpd.perf.compare_arms import OUTSIDE, Variant, cores_of
from trtpd.perf.compare_folder import Folder, read
from trtpd.perf.comparison import Choice, Plan
from trtpd.perf.make_workload import Wanted
from trtpd.perf.slo import LengthSlo
from trtpd.perf.traces import SLICES

ABSENT = "nothing"
SAVED = (".jsonl", ".jsonl.gz")


def check_comparable(wanted: Wanted) -> None:
    """Raises InputError for requests that can't be asked at several rates, and others of their kind for the tuning."""
    if wanted.name.endswith(SAVED) and not wanted.name.startswith("trace:"):
        raise InputError(
            f"{wanted.name} is a saved workload, which is replayed as it is: it has one rate, and no other requests to "
            "tune by. Compare by the workload it was made from (mixed, ..., with its --seed), or by a trace of such "
            f"traffic (trace:FILE); `trtpd bench --workload {wanted.name}` replays it against a running server"
        )
    if wanted.concurrency is not None:
        raise InputError(
            f"a closed loop of {wanted.concurrency} offers each arm another load; give the workload without a "
            "concurrency, and --rates if they are to be set; `trtpd bench --concurrency` measures a running server so"
        )


def plan_of(
    manifest: Manifest,
    wanted: Wanted,
    variants: Mapping[str, Sequence[Variant]],
    *,
    point_s: float,
    chunks: Sequence[int],
    definition: str,
    targets_sent: bool = False,
) -> Plan:
    """`wanted`: as a run of the comparison has it, lengths bounded."""
    fit, trace = wanted.fit, wanted.trace
    traced = wanted.name.startswith("trace:")
    requests: dict[str, object] = {
        "arrivals": None if wanted.arrivals is None else str(wanted.arrivals),
        "length_scale": fit.scale,
        "max_prompt_tokens": fit.max_prompt_tokens,
        "max_total_tokens": fit.max_total_tokens,
    }
    if traced:
        requests |= {
            "trace": _digest(wanted.name.removeprefix("trace:")),
            "columns": trace.columns,
            "trace_offset": trace.offset,
            "time_scale": trace.time_scale,
        }
    found = [one for arm, row in variants.items() if arm != OUTSIDE for one in row]
    made = {f"{one.arm}, {one.label}": {"pools": one.pools, "scheduler": dict(one.scheduler)} for one in found}
    return Plan(
        fingerprint=manifest.pair_fingerprint,
        workload=wanted.name,
        seed=wanted.seed,
        point_s=point_s,
        cores=cores_of(manifest),
        chunks=tuple(sorted(set(chunks))),
        definition=definition,
        targets_sent=targets_sent,
        requests=requests,
        settings=_plain({name: one for name, one in manifest.settings.items() if name not in ("pools", "model")}),
        variants=_plain(made),
    )


def _digest(source: str) -> str:
    """Of a trace's content; its name where that is one of ours. "" where there is no file: who reads it says so."""
    path = expanded(source)
    return source if source in SLICES else digest_of(path.read_bytes().hex()) if path.is_file() else ""


def _plain(value: object) -> dict[str, object]:
    """As it will be read back."""
    found: dict[str, object] = msgspec.json.decode(msgspec.json.encode(value))
    return found


def check_same(plan: Plan, there: Plan, folder: Path) -> None:
    """Raises InputError with the first thing that differs from the plan in the folder, and what to do."""
    if plan == there:
        return
    mend = f"name another folder with -o (--like {folder} takes the targets and tuned variants of this one)"
    if there.requests is None:
        raise InputError(
            f"{folder} holds a comparison of an older trtpd, which did not note how its requests were made: it can't "
            f"be told whether it is another comparison; {mend}"
        )
    here, found = dict(_flat(plan)), dict(_flat(there))
    key = next(key for key in [*here, *found] if here.get(key, ABSENT) != found.get(key, ABSENT))
    raise InputError(
        f"{folder} holds another comparison: {key} is {_text(found, key)} there and {_text(here, key)} here; {mend}"
    )


def _flat(plan: Plan) -> Iterator[tuple[str, object]]:
    def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict) and value:
            for key, one in value.items():
                yield from leaves(f"{name}.{key}" if name else key, one)
        else:
            yield name, value

    plain: dict[str, Any] = msgspec.to_builtins(plan)
    yield from leaves("", plain)


def _text(values: Mapping[str, object], key: str) -> str:
    value = values.get(key, ABSENT)
    return ABSENT if value is None else f"{value:g}" if isinstance(value, float) else str(value)


class Like:
    """Another comparison's targets and what its tuning chose; of its plan only the build matters. One that an older
    trtpd made will do."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder that holds no targets."""
        self.folder = folder
        self.slo = read(folder / "slo.json", LengthSlo)
        path = folder / "plan.json"
        self._plan = read(path, Plan) if path.is_file() else None

    def check(self, slo: LengthSlo, ours: Folder) -> None:
        """Raises InputError if the comparison that goes on has other targets."""
        if slo != self.slo:
            raise InputError(
                f"{ours.path} has its own targets ({slo}, unloaded {_unloaded(slo)}), not those of {self.folder} "
                f"({self.slo}, unloaded {_unloaded(self.slo)}); name another folder with -o, or leave out --like"
            )

    def choice(self, arm: str) -> Choice | None:
        """Says where it is from."""
        found = Folder(self.folder).choice(arm)
        if found is None:
            return None
        of = "" if self._plan is None else f" ({self._plan.workload}, by {self._plan.definition})"
        return msgspec.structs.replace(found, origin=found.origin or f"{self.folder}{of}")

    def remarks(self, fingerprint: str) -> list[str]:
        """What a reader must know of what was taken."""
        if self._plan is None or self._plan.fingerprint == fingerprint:
            return []
        return [
            f"The targets are those of {self.folder}, which is of another build ({self._plan.fingerprint}; this one is "
            f"{fingerprint})."
        ]


def _unloaded(slo: LengthSlo) -> str:
    return ", ".join(f"{tokens}: {seconds * 1e3:.0f} ms" for tokens, seconds in slo.unloaded)
