"""What a build has measured: kept from the former build where it still holds, else found and written down."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from trtpd.build.accuracy import AccuracyMeter, ComputeLogits, Place, accuracy_key
from trtpd.build.backends.base import Progress
from trtpd.build.checkpoint import Checkpoint
from trtpd.build.files import digest_of, write_whole
from trtpd.build.machine import Machine
from trtpd.build.manifest import (
    MANIFEST,
    Accuracy,
    Manifest,
    Precision,
    RoleName,
    current_versions,
    json_of,
    read_engine_config,
)
from trtpd.build.planning import BuildPlan, Former
from trtpd.build.resolve import wishes_of
from trtpd.build.roles import RoleWishes
from trtpd.build.spec import PipelineSpec
from trtpd.build.tuning import kept_wishes

KEPT_TUNING = "settings that --tune found are kept"
LOST_TUNING = (
    "settings that --tune found are given up, since the pipeline file, the model or the machine has changed: build "
    "with --tune to find them again"
)


def file_wishes(spec: PipelineSpec) -> dict[RoleName, RoleWishes]:
    """What the file fixes for each role."""
    wishes = {role: wishes_of(pool) for role, pool in spec.pools.given().items()}
    return {role: replace(wish, precision=wish.precision or spec.precision) for role, wish in wishes.items()}


def tuning_key(spec: PipelineSpec, checkpoint: Checkpoint, machine: Machine) -> str:
    """Names what a search's answer holds for."""
    versions = current_versions(spec.engine)
    return digest_of(spec.model_dump(mode="json"), checkpoint.digest(), machine.cores, machine.cpu_features, versions)


def kept_tuning(
    former: Former | None, spec: PipelineSpec, checkpoint: Checkpoint, machine: Machine
) -> tuple[dict[RoleName, RoleWishes] | None, tuple[str, ...]]:
    """The wishes that the former build's search found, if they still hold, and what to say of them."""
    if former is None or not former.manifest.tuning:
        return None, ()
    if former.manifest.tuning_key != tuning_key(spec, checkpoint, machine):
        return None, (LOST_TUNING,)
    try:
        return kept_wishes(former.manifest.tuning, file_wishes(spec)), (KEPT_TUNING,)
    except msgspec.ValidationError:  # edited by hand
        return None, (LOST_TUNING,)


def with_kept(plan: BuildPlan, former: Former | None, *, tuned: bool) -> BuildPlan:
    """The plan with what of the former build's measurements still holds: errors of precisions in use (what was skipped
    is tried again), and if the plan is `tuned` the record of that search."""
    if former is None:
        return plan
    there, config = former.manifest.accuracy, plan.roles[0].config
    keys = {name: accuracy_key(config, plan.digest or "", name) for name in _narrow(plan.manifest)}
    held = {name: found for name, found in there.items() if found.figures is not None}
    accuracy = {name: held[name] for name, key in keys.items() if name in held and held[name].key == key}
    manifest = msgspec.structs.replace(plan.manifest, accuracy=accuracy)
    if tuned:
        tuning, key = former.manifest.tuning, former.manifest.tuning_key
        manifest = msgspec.structs.replace(manifest, tuning=tuning, tuning_key=key)
    return replace(plan, manifest=manifest)


@contextmanager
def meter_for(
    out: Path,
    plan: BuildPlan,
    checkpoint: Checkpoint,
    machine: Machine,
    compute: ComputeLogits,
    progress: Progress,
) -> Iterator[AccuracyMeter]:
    """A meter of the build at `out`. What it makes is removed at the end."""
    work = out.with_name(f".{out.name}.accuracy")
    shutil.rmtree(work, ignore_errors=True)
    roles = [out / role for role in plan.manifest.roles]
    place = Place(work=work, roles=roles, tokenizer=out / "tokenizer" / "tokenizer.json")
    try:
        yield AccuracyMeter(
            read_engine_config(roles[0]),
            checkpoint,
            machine,
            place,
            compute,
            digest=plan.digest or "",
            progress=progress,
            known=plan.manifest.accuracy,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def with_accuracy(out: Path, plan: BuildPlan, meter: AccuracyMeter) -> BuildPlan:
    """The plan of the build at `out` with the errors of its precisions; each is in the manifest as soon as it is
    found, so that a build that is cut off goes on there."""
    for precision in _narrow(plan.manifest):
        found: Mapping[str, Accuracy] = plan.manifest.accuracy | {precision: meter.of(precision)}
        if found != plan.manifest.accuracy:
            plan = replace(plan, manifest=msgspec.structs.replace(plan.manifest, accuracy=dict(found)))
            write_whole(out / MANIFEST, json_of(plan.manifest))
    return plan


def _narrow(manifest: Manifest) -> list[Precision]:
    """The precisions that have an error: those in use by engines that compute a model, f32 apart."""
    used = {entry.precision for entry in manifest.roles.values() if entry.engine != "emulated"}
    return sorted(used - {"f32"})
