"""`trtpd lint`: what can't work in a pipeline file, or in a build on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from trtpd.build import lint_tensorrt_llm
from trtpd.build.backends import backend_of
from trtpd.build.backends.openvino import weights_file
from trtpd.build.backends.tensorrt_llm.engine_dir import is_engine_dir
from trtpd.build.checkpoint import Checkpoint, has_weights, open_architecture, open_checkpoint
from trtpd.build.checks import check
from trtpd.build.cost_profile import PROFILE
from trtpd.build.engines import ENGINES, EngineName
from trtpd.build.findings import Deployment, Finding, error, warning
from trtpd.build.found_profile import find_profile
from trtpd.build.machine import Machine, this_machine
from trtpd.build.manifest import (
    MANIFEST,
    REBUILD,
    EngineConfig,
    Manifest,
    RoleName,
    current_features,
    load_faults,
    read_engine_config,
    read_manifest,
    rebuild,
)
from trtpd.build.resolve import ResolvedRole, resolve
from trtpd.build.spec import ROLES, PipelineSpec, load_spec, parse_spec, settings_fault
from trtpd.build.tensors import FETCH_AGAIN, TensorFile
from trtpd.build.tokenizer_files import tokenizer_fault
from trtpd.errors import CheckpointError, EngineError, InputError


def lint(path: Path, *, machine: Machine | None = None) -> list[Finding]:
    """Findings on a pipeline file, a build directory or one that trtllm-build wrote, errors first.

    Raises SpecError, CheckpointError or InputError for what can't even be read.
    """
    if is_engine_dir(path):
        return lint_tensorrt_llm.lint_engine_dirs([path])
    if path.is_dir():
        return lint_build(path, machine=machine)
    spec = load_spec(path)
    machine = machine or this_machine(openvino=spec.engine == "openvino")
    return lint_spec(spec, open_plan(spec), machine)


def open_model(spec: PipelineSpec) -> Checkpoint:
    """The spec's model; weights are looked at only if its engine has any. Raises CheckpointError."""
    rules = ENGINES[spec.engine]
    opener = open_checkpoint if rules.has_weights else open_architecture
    return opener(Path(spec.model), rules.models)


def open_plan(spec: PipelineSpec) -> Checkpoint:
    """As open_model, for plans: an engine off the CPU may be planned for from a config.json alone."""
    rules = ENGINES[spec.engine]
    if rules.on_cpu or has_weights(Path(spec.model)):
        return open_model(spec)
    return open_architecture(Path(spec.model), rules.models)


def lint_spec(spec: PipelineSpec, checkpoint: Checkpoint, machine: Machine) -> list[Finding]:
    """Findings on a pipeline file with its model."""
    pipeline = resolve(spec, checkpoint.architecture, machine)
    findings = check(Deployment.of(pipeline), machine) + list(_own_args(spec))
    if spec.engine == "tensorrt_llm":
        findings += lint_tensorrt_llm.lint_pipeline(pipeline, checkpoint.architecture, machine)
        findings.sort(key=lambda finding: finding.severity != "error")
        if not checkpoint.source.files():
            findings.append(_no_weights(checkpoint))
    if not planned_only(spec, checkpoint):
        findings = [*_tokenizer(checkpoint), *findings]
    if not checkpoint.end_ids:
        findings.append(
            Finding(
                code="no_end_token",
                severity="warning",
                where="model",
                values=("eos_token_id", "absent"),
                message=f"{checkpoint.path} names no eos_token_id, so answers end at max_tokens only",
                mend="add eos_token_id to its generation_config.json",
            )
        )
    return findings


def _own_args(spec: PipelineSpec) -> Iterator[Finding]:
    for role, pool in spec.pools.given().items():
        if pool.engine_args and spec.engine != "tensorrt_llm":
            yield error(
                "engine_args_unused",
                f"pools.{role}.engine_args",
                (", ".join(pool.engine_args), spec.engine),
                f"is given, but {spec.engine} takes none",
                "leave it out",
            )


def planned_only(spec: PipelineSpec, checkpoint: Checkpoint) -> bool:
    """Whether the model is but a configuration, of which nothing can be built for this engine."""
    return ENGINES[spec.engine].has_weights and not checkpoint.source.files()


def _tokenizer(checkpoint: Checkpoint) -> Iterator[Finding]:
    try:
        checkpoint.source.check_tokenizer()
    except CheckpointError as fault:
        values = ("tokenizer.json", "unusable")
        yield error("tokenizer", "model", values, str(fault), "a build needs it to read and write text")


def _no_weights(checkpoint: Checkpoint) -> Finding:
    return warning(
        "no_weights",
        "model",
        ("config.json", "no weights"),
        f"{checkpoint.path} has no weights, so this can be planned but not built",
        "download them beside its config.json",
    )


def notes_on(path: Path) -> list[str]:
    """What is missing in a build without being wrong."""
    if not (path / MANIFEST).is_file():
        return []
    try:
        found = find_profile(path, read_manifest(path))
    except InputError:
        return []
    return list(found.remarks) if found.missing else []


def lint_build(build: Path, *, machine: Machine | None = None) -> list[Finding]:
    """Findings on a build directory as it would be served here."""
    manifest = read_manifest(build)
    configs: dict[RoleName, EngineConfig] = {}
    findings = list(_complete(manifest))
    if fault := settings_fault(manifest):
        findings.append(_broken(MANIFEST, fault))
        return findings
    for name, entry in manifest.roles.items():
        role = cast(RoleName, name)
        try:
            configs[role] = read_engine_config(build / entry.directory)
        except EngineError as error:
            findings.append(_broken(entry.directory, str(error)))
    if configs:
        findings += _lint_engines(build, manifest, configs, machine)
    findings += _profile(build, manifest)
    if fault := tokenizer_fault(build / "tokenizer"):
        findings.append(_broken("tokenizer", fault))
    if not (build / "model_repo").is_dir():
        findings.append(_broken("model_repo", "the Triton model repository is missing"))
    findings = [replace(finding, mend=finding.mend.replace(REBUILD, rebuild(build))) for finding in findings]
    return sorted(findings, key=lambda finding: finding.severity != "error")


def _profile(build: Path, manifest: Manifest) -> Iterator[Finding]:
    """A profile that the pipeline file names and that can't be used stops `trtpd serve`; one that lies in the build is
    passed over."""
    try:
        found = find_profile(build, manifest)
    except InputError as fault:
        yield error("profile_unusable", "scheduler.profile", ("profile", "build"), str(fault), "or set it to none")
        return
    if found.path is not None:
        for remark in found.remarks:
            yield warning("profile_stale", PROFILE, ("profile", "here"), remark, "or remove it")


def _complete(manifest: Manifest) -> Iterator[Finding]:
    given = manifest.roles.keys()
    if unknown := sorted(given - set(ROLES)):
        yield _broken(MANIFEST, f"names the roles {', '.join(unknown)}; there are {', '.join(ROLES)}")
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if other in given and role not in given:
            yield _broken(MANIFEST, f"has {other} and no {role}; a build has both, or mixed, or all three")


def _lint_engines(
    build: Path, manifest: Manifest, configs: dict[RoleName, EngineConfig], machine: Machine | None
) -> Iterator[Finding]:
    engine = next(iter(configs.values())).engine
    if engine not in get_args(EngineName):
        raise InputError(f"{build}: built for engine {engine!r}, which this trtpd doesn't know; {rebuild(build)}")
    machine = machine or this_machine(openvino=engine == "openvino")
    for role, config in configs.items():
        entry = manifest.roles[role]
        yield from _fingerprints(manifest, entry.directory, entry.fingerprint, config)
        yield from _loadable(entry.directory, config)
        if engine == "tensorrt_llm":
            yield from _content(build / entry.directory, entry.directory, config)
        elif ENGINES[cast(EngineName, engine)].has_weights:
            yield from _weights(build / entry.directory, entry.directory, config)
    if engine == "tensorrt_llm":
        yield from lint_tensorrt_llm.lint_build_roles(build, configs)
    yield from check(_deployment(manifest, configs), machine)


def _deployment(manifest: Manifest, configs: dict[RoleName, EngineConfig]) -> Deployment:
    first, settings = next(iter(configs.values())), parse_spec(manifest.settings)
    roles = tuple(
        ResolvedRole(
            role=role,
            instances=manifest.roles[role].instances,
            tp=config.tp,
            precision=config.precision,
            layout=config.layout,
            profile=config.profile,
            cores=manifest.roles[role].cores,
        )
        for role, config in configs.items()
    )
    return Deployment(
        engine=cast(EngineName, first.engine),
        architecture=first.architecture,
        max_seq_tokens=max(config.max_seq_tokens for config in configs.values()),
        roles=roles,
        accuracy=manifest.accuracy,
        elastic=settings.pools.elastic,
        convert_dtype=settings.transfer.convert_dtype,
    )


def _broken(where: str, message: str) -> Finding:
    return Finding(
        code="incomplete",
        severity="error",
        where=where,
        values=("built", "broken"),
        message=message,
        mend=REBUILD,
    )


def _fingerprints(manifest: Manifest, where: str, expected: str, config: EngineConfig) -> Iterator[Finding]:
    pairs = {
        "fingerprint": (expected, config.fingerprint),
        "pair_fingerprint": (manifest.pair_fingerprint, config.pair_fingerprint),
    }
    for name, (wanted, found) in pairs.items():
        if wanted != found:
            yield Finding(
                code="fingerprint_differs",
                severity="error",
                where=where,
                values=(wanted, found),
                message=f"its {name} is {found}, the manifest says {wanted}: it is of another build",
                mend=REBUILD,
            )


def _loadable(where: str, config: EngineConfig) -> Iterator[Finding]:
    for fault in load_faults(config):
        yield Finding(
            code="not_loadable",
            severity="error",
            where=where,
            values=("build", "here"),
            message=fault,
            mend=REBUILD,
        )
    more = sorted(set(current_features(config.engine)) - set(config.cpu_features))
    if more:
        yield Finding(
            code="cpu_has_more",
            severity="warning",
            where=where,
            values=(", ".join(config.cpu_features), ", ".join(more)),
            message=f"this CPU also has {', '.join(more)}, which the build makes no use of",
            mend=f"{REBUILD} to use it",
        )


def _content(directory: Path, where: str, config: EngineConfig) -> Iterator[Finding]:
    backend = backend_of("tensorrt_llm")
    if backend is not None and backend.found_key(directory, config) is None:
        yield _broken(where, f"{directory}: a file of its engine or model is missing or has another size")


def _weights(directory: Path, where: str, config: EngineConfig) -> Iterator[Finding]:
    for rank in range(config.tp):
        try:
            TensorFile(directory / weights_file(rank))
        except CheckpointError as error:
            yield _broken(where, str(error).removesuffix(FETCH_AGAIN))
