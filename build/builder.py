"""`trtpd build`: from a pipeline file to a build directory, whole or not at all.

A build is made beside its place: what is unchanged is linked from the former build, the rest is written, and
one rename exchanges the two. Until that instant, whatever happens, the former build stays as it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trtpd.build.accuracy import AccuracyMeter, ComputeLogits, accuracy_words
from trtpd.build.backends import backend_of
from trtpd.build.backends.base import Job, Progress
from trtpd.build.checkpoint import Checkpoint
from trtpd.build.checks import PRECISION_CODES
from trtpd.build.files import link_or_copy, link_tree, locked, staged, translated
from trtpd.build.findings import Finding
from trtpd.build.lint import lint_build, lint_spec, open_model, open_plan, planned_only
from trtpd.build.machine import Machine, this_machine
from trtpd.build.manifest import ENGINE_CONFIG, MANIFEST, Manifest, RoleName, read_manifest, write_json
from trtpd.build.measured import file_wishes, kept_tuning, meter_for, tuning_key, with_accuracy, with_kept
from trtpd.build.planning import Action, BuildPlan, Former, RolePlan, plan_build
from trtpd.build.resolve import resolve
from trtpd.build.spec import ROLES, PipelineSpec
from trtpd.build.tuning import TuneOptions, left_to_try, tune
from trtpd.errors import BuildError, InputError, SpecError

Render = Callable[[Path, Manifest], None]
"""Writes the Triton model repository into a build directory, which is moved to its place afterwards."""

_DONE: dict[Action, str] = {
    "write": "written",
    "link": "settings written, weights linked",
    "keep": "unchanged",
}
_TO_DO: dict[Action, str] = {"write": "to be written", "link": "settings to be written", "keep": "unchanged"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What was done, or with `dry_run` would be done, down to the commands that would be run (`steps`). `warnings` are
    lint's, `notes` what else is worth saying."""

    out: Path
    plan: BuildPlan
    dry_run: bool
    steps: tuple[str, ...] = ()
    warnings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        return self.plan.manifest

    @property
    def plans(self) -> tuple[RolePlan, ...]:
        return self.plan.roles

    def summary(self) -> str:
        """One line for each role, then the steps of a dry run."""
        words = _TO_DO if self.dry_run else _DONE
        lines = []
        for plan in self.plans:
            config, instances = plan.config, len(self.manifest.roles[plan.role].instances)
            layout, profile = config.layout, config.profile
            lines.append(
                f"{plan.role}: {words[plan.action]} ({config.engine}, {config.precision} weights, {layout.dtype} KV "
                f"in {profile.kv_blocks} blocks of {layout.tokens_per_block}, steps of {profile.max_step_tokens} "
                f"tokens, batch {profile.max_batch}, {instances} instance{'' if instances == 1 else 's'}"
                f"{f' of {config.tp} ranks' if config.tp > 1 else ''})"
            )
        lines += [accuracy_words(name, found) for name, found in self.manifest.accuracy.items()]
        return "\n".join([*lines, *self.notes, *self.steps])


def _no_progress(stage: str, done: int, total: int) -> None:
    """Says nothing."""


def _render(build: Path, manifest: Manifest) -> None:
    from trtpd.build import repository

    repository.render(build, manifest)


def build(
    spec: PipelineSpec,
    out: Path,
    *,
    role: RoleName | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = _no_progress,
    machine: Machine | None = None,
    render: Render = _render,
    tuning: TuneOptions | None = None,
    compute_logits: ComputeLogits | None = None,
) -> BuildResult:
    """Builds `spec` into the folder `out`; blocks while another build of it runs.

    `role` builds only that one and keeps the others of the former build as they are; `force` writes even
    what is unchanged; `dry_run` only says what would be done, and needs no weights. Raises SpecError for what
    lint calls an error, CheckpointError for a bad model, InputError if `out` holds something else, BuildError if it
    can't be written. With `tuning` the build is made, measured, and made again with the settings that were found best;
    without, those that were found before stay as long as nothing has changed that they depend on. With
    `compute_logits` the errors of its precisions are measured.
    """
    out = out.resolve()
    _refuse_other(out)
    machine = machine or this_machine(openvino=spec.engine == "openvino")
    checkpoint = open_plan(spec) if dry_run else open_model(spec)
    if not planned_only(spec, checkpoint):
        checkpoint.source.check_tokenizer()
    warnings = refuse_errors(spec, checkpoint, machine)
    with (
        translated(f"build {out}", BuildError),
        locked(out.with_name(f".{out.name}.lock"), lambda: progress("waiting for another build", 0, 0)),
    ):
        former = _former(out)
        progress("reading the model", 0, 0)
        kept, notes = kept_tuning(former, spec, checkpoint, machine) if tuning is None else (None, ())
        pipeline = resolve(spec, checkpoint.architecture, machine, tuned=kept)
        plan = plan_build(pipeline, checkpoint, former, role=role, force=force)
        plan = with_kept(plan, former, tuned=kept is not None)
        if dry_run:
            steps = _steps(out, plan, checkpoint, former)
            return BuildResult(out=out, plan=plan, dry_run=True, steps=tuple(steps), warnings=warnings, notes=notes)
        _make(out, plan, checkpoint, former, render, progress, force=force)
        with ExitStack() as stack:
            meter = None
            if compute_logits is not None:
                meter = stack.enter_context(meter_for(out, plan, checkpoint, machine, compute_logits, progress))
            if tuning is not None:
                plan = _tuned_plan(out, spec, checkpoint, machine, tuning, progress, meter)
                notes = left_to_try(plan.manifest.tuning, tuning.seconds)
                _make(out, plan, checkpoint, _former(out), render, progress, force=False)
            if meter is not None:
                plan = with_accuracy(out, plan, meter)
        if plan.manifest.accuracy:
            warnings = _with_figures(warnings, out, machine)
    return BuildResult(out=out, plan=plan, dry_run=False, warnings=warnings, notes=notes)


def _tuned_plan(
    out: Path,
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    machine: Machine,
    tuning: TuneOptions,
    progress: Progress,
    meter: AccuracyMeter | None,
) -> BuildPlan:
    """The plan of the build at `out`, made again with what a search finds best for its roles."""
    tpot_s = spec.slo.tpot_ms / 1000 if spec.slo.tpot_ms else None
    work = out.with_name(f".{out.name}.tune")
    found, records = tune(out, work, file_wishes(spec), tuning, tpot_s=tpot_s, progress=progress, meter=meter)
    again = resolve(spec, checkpoint.architecture, machine, tuned=found)
    former = _former(out)
    plan = with_kept(plan_build(again, checkpoint, former), former, tuned=False)
    key = tuning_key(spec, checkpoint, machine)
    return replace(plan, manifest=msgspec.structs.replace(plan.manifest, tuning=records, tuning_key=key))


def refuse_errors(spec: PipelineSpec, checkpoint: Checkpoint, machine: Machine) -> tuple[Finding, ...]:
    """Lint's warnings. Raises SpecError, in one line, if lint finds an error."""
    findings = lint_spec(spec, checkpoint, machine)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise SpecError("; ".join(f"{one.where}: {one.message}: {one.mend} [{one.code}]" for one in errors))
    return tuple(findings)


def _with_figures(warnings: tuple[Finding, ...], out: Path, machine: Machine) -> tuple[Finding, ...]:
    """What lint says of precisions is said of what was built and measured, not of the file."""
    rest = [finding for finding in warnings if finding.code not in PRECISION_CODES]
    found = [finding for finding in lint_build(out, machine=machine) if finding.code in PRECISION_CODES]
    return (*rest, *found)


def _refuse_other(out: Path) -> None:
    """Raises InputError if `out` is something that a build would destroy, or can't be put in place of."""
    if not out.name:
        raise InputError(f"{out}: can't be a build directory; name another one with -o")
    with translated(f"build {out}", BuildError):
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).is_file())):
            raise InputError(f"{out}: exists and is not a build directory; name another one with -o")


def _former(out: Path) -> Former | None:
    """The build at `out`, None if there is none that can be used. Raises as _refuse_other, BuildError."""
    _refuse_other(out)
    if not out.exists():
        return None
    try:
        return Former(folder=out, manifest=read_manifest(out))
    except InputError:
        return None


def _work(out: Path) -> Path:
    """Where a backend keeps what is dear to make, until the build is in place."""
    return out.with_name(f".{out.name}.work")


def _jobs(plan: BuildPlan, new: Path, former: Former | None) -> list[Job]:
    jobs = []
    for role in plan.roles:
        if role.action == "write" and role.weights is not None and plan.digest is not None:
            place = former.folder / role.role if former is not None else None
            directory = new / role.role
            jobs.append(
                Job(config=role.config, directory=directory, key=role.weights, digest=plan.digest, former=place)
            )
    return jobs


def _steps(out: Path, plan: BuildPlan, checkpoint: Checkpoint, former: Former | None) -> list[str]:
    backend = backend_of(plan.roles[0].config.engine)
    return backend.steps(checkpoint, _jobs(plan, out, former), work=_work(out)) if backend is not None else []


def _make(
    out: Path,
    plan: BuildPlan,
    checkpoint: Checkpoint,
    former: Former | None,
    render: Render,
    progress: Progress,
    *,
    force: bool,
) -> None:
    if force:
        shutil.rmtree(_work(out), ignore_errors=True)
    with staged(out) as new:
        _carry_over(out, new, plan)
        (new / "tokenizer").mkdir()
        checkpoint.source.write_tokenizer(new / "tokenizer")
        _make_roles(plan, out, new, checkpoint, former, progress)
        progress("model repository", 0, 0)
        render(new, plan.manifest)
        write_json(new / MANIFEST, plan.manifest)
    shutil.rmtree(_work(out), ignore_errors=True)


def _carry_over(out: Path, new: Path, plan: BuildPlan) -> None:
    """Links what stays: roles that aren't being built, and whatever the user keeps in the folder."""
    made = {MANIFEST, "tokenizer", "model_repo", *(role.role for role in plan.roles)}
    gone = {role for role in ROLES if role not in plan.manifest.roles}
    for path in out.iterdir() if out.is_dir() else ():
        if path.name in made | gone:
            continue
        if path.is_dir():
            link_tree(path, new / path.name)
        else:
            link_or_copy(path, new / path.name)


def _make_roles(
    plan: BuildPlan, out: Path, new: Path, checkpoint: Checkpoint, former: Former | None, progress: Progress
) -> None:
    for role in plan.roles:
        if role.action == "keep":
            link_tree(out / role.role, new / role.role)
        else:
            (new / role.role).mkdir()
            write_json(new / role.role / ENGINE_CONFIG, role.config)
    backend = backend_of(plan.roles[0].config.engine)
    if backend is None:
        return
    backend.write(checkpoint, _jobs(plan, new, former), work=_work(out), progress=progress)
    for role in plan.roles:
        if role.action == "link" and role.linked_role is not None:
            source = (new if role.from_new else out) / role.linked_role
            backend.link(source, role.config, new / role.role)
