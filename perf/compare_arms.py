"""The arms of a comparison: the same cores, weights and KV memory, put together in different ways.

Made from a build: colocated (whole prompts), colocated with chunked prefill, disaggregated. Variants of an arm are what
its tuning may choose from. An outside server can be an arm too, by its command.
"""

from __future__ import annotations

import copy
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpd.build.builder import build as make_build
from trtpd.build.files import digest_of, link_tree
from trtpd.build.manifest import MANIFEST, Manifest, read_manifest, rebuild
from trtpd.build.spec import parse_spec, settings_fault
from trtpd.errors import InputError
from trtpd.perf.climb import next_to_try

COLOCATED = "colocated"
CHUNKED = "colocated, chunked"
SPLIT = "disaggregated"
OUTSIDE = "outside"
CHUNKS = (32, 64, 128, 256, 512)
LOCAL_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run an arm: its pools, and what is special in its scheduler, as a pipeline file would have them; or
    an outside server's command (with {port} in it). Variants of a `group` differ in their chunk, and are in its order.
    """

    arm: str
    label: str
    pools: dict[str, dict[str, Any]]
    group: str = ""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def folder(self) -> str:
        which = f" {digest_of(self.command)}" if self.command else ""
        return "".join(c if c.isalnum() else "-" for c in f"{self.arm} {self.label}{which}").strip("-")


def cores_of(manifest: Manifest) -> tuple[int, ...]:
    """All CPUs that the build's instances use."""
    pools = _pools(manifest)
    cores = sorted({int(core) for pool in pools.values() for core in pool.get("cores") or ()})
    if not cores:
        raise InputError("the build names no cores; build it with `cores` in its pools, so that arms can share them")
    return tuple(cores)


def variants(manifest: Manifest, *, chunks: Sequence[int] = CHUNKS, outside: str = "") -> dict[str, list[Variant]]:
    """What each arm may be. Raises InputError for a build without prefill and decode, or on fewer than two cores."""
    pools, cores = _pools(manifest), cores_of(manifest)
    if not {"prefill", "decode"} <= pools.keys():
        raise InputError(f"the build has {', '.join(pools)}; a comparison needs one with prefill and decode pools")
    if len(cores) < 2:
        raise InputError(f"the build uses {len(cores)} core; a comparison needs at least two to share out")
    longest = int(_settings(manifest)["kv"]["max_seq_tokens"])
    sizes = [chunk for chunk in sorted(set(chunks)) if chunk < longest]
    if not sizes:
        raise InputError(
            f"chunk sizes {', '.join(map(str, chunks)) or 'none'}: at least one must be below the {longest} tokens "
            "that a prompt and its answer may have here"
        )
    found = {
        COLOCATED: [_mixed(COLOCATED, pools, cores, count, longest, None) for count in (1, len(cores))],
        CHUNKED: [_mixed(CHUNKED, pools, cores, count, longest, chunk) for count in (1, len(cores)) for chunk in sizes],
        SPLIT: [
            _split(pools, cores, prefill, chunk, local)
            for prefill in range(1, len(cores))
            for local in (0, LOCAL_TOKENS)
            for chunk in sizes
        ],
    }
    if outside:
        if "{port}" not in outside:
            raise InputError(f"the outside server's command {outside!r} has no {{port}} in it")
        found[OUTSIDE] = [Variant(arm=OUTSIDE, label=_program(outside), pools={}, command=outside)]
    return found


def _program(command: str) -> str:
    """What a command runs: the module of `python -m MODULE`, else the program."""
    words = shlex.split(command)
    if "-m" in words[:-1] and "python" in words[0]:
        return words[words.index("-m") + 1].rsplit(".", 1)[-1]
    return words[0].rsplit("/", 1)[-1]


def _mixed(
    arm: str, pools: dict[str, Any], cores: tuple[int, ...], instances: int, longest: int, chunk: int | None
) -> Variant:
    """`instances` that do both, sharing cores and the KV memory that the two pools had. Without a chunk a prompt is
    computed in one step."""
    memory = sum(pool["kv_tokens"] * pool["instances"] for pool in (pools["prefill"], pools["decode"]))
    batch = max(1, pools["decode"]["max_batch"] * pools["decode"]["instances"] // instances)
    pool = {
        "instances": instances,
        "cores": list(cores),
        "threads": len(cores) // instances,
        "max_batch": batch,
        "chunk_tokens": chunk or longest,
        "max_step_tokens": batch + (chunk or longest),
        "kv_tokens": max(longest, memory // instances),
    }
    group = f"{instances} x {len(cores) // instances} threads"
    label = group + (f", chunks of {chunk}" if chunk else "")
    return Variant(arm=arm, label=label, pools={"mixed": pool}, group=group)


def _split(pools: dict[str, Any], cores: tuple[int, ...], prefill: int, chunk: int, local: int) -> Variant:
    """The first cores prefill in chunks, one step for each chunk, the others decode; one instance each, all else as the
    build has it. Prompts of up to `local` tokens may stay on decode where the router finds that cheaper."""
    shares = {"prefill": cores[:prefill], "decode": cores[prefill:]}
    made = {}
    for role, share in shares.items():
        made[role] = copy.deepcopy(pools[role]) | {
            "instances": 1,
            "cores": list(share),
            "threads": len(share),
            "kv_tokens": pools[role]["kv_tokens"] * pools[role]["instances"],
        }
    made["prefill"] |= {"chunk_tokens": chunk, "max_step_tokens": max(chunk, made["prefill"]["max_batch"])}
    made["decode"] |= {"chunk_tokens": min(chunk, made["decode"]["chunk_tokens"])}
    group = f"{prefill} prefill : {len(cores) - prefill} decode" + (f", up to {local} local" if local else "")
    scheduler = {"local_prompt_tokens": local}
    return Variant(arm=SPLIT, label=f"{group}, chunks of {chunk}", pools=made, group=group, scheduler=scheduler)


def next_variant(candidates: Sequence[Variant], scores: Mapping[str, float]) -> Variant | None:
    """What a tuning tries next, by the scores of the labels tried so far: each group at its middle chunk, then the best
    group's other chunks for as long as they get better. None: done, the best of `scores` is taken."""
    groups: dict[str, list[Variant]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.group, []).append(candidate)
    for row in groups.values():
        if not any(one.label in scores for one in row):
            return row[(len(row) - 1) // 2]
    if not scores:
        return None
    best = max(scores, key=lambda label: scores[label])
    row = next(row for row in groups.values() if any(one.label == best for one in row))
    found = {index: scores[one.label] for index, one in enumerate(row) if one.label in scores}
    index = next_to_try(len(row), found, first=(len(row) - 1) // 2)
    return None if index is None else row[index]


def build_variant(variant: Variant, build: Path, folder: Path) -> Path:
    """A build of `variant` below `folder`, its weights linked from `build`; the one that is there if it is whole.

    Raises TrtpdError as `trtpd build` does.
    """
    place = folder / variant.folder
    if (place / ".whole").is_file():
        return place
    manifest = read_manifest(build)
    settings = _settings(manifest) | {"pools": variant.pools}
    settings["scheduler"] = settings.get("scheduler", {}) | variant.scheduler
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for path in build.iterdir():  # its weights, for the new roles to be linked to
        if path.is_dir():
            link_tree(path, place / path.name)
    shutil.copy2(build / MANIFEST, place / MANIFEST)
    make_build(parse_spec(settings), place)
    (place / ".whole").touch()
    return place


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Raises InputError if they were edited by hand into what can't be."""
    if fault := settings_fault(manifest):
        raise InputError(f"{MANIFEST}: {fault}; {rebuild(None)}")
    return copy.deepcopy(dict(manifest.settings))


def _pools(manifest: Manifest) -> dict[str, Any]:
    """The pools by role, without what is said of all of them."""
    return {role: pool for role, pool in _settings(manifest)["pools"].items() if isinstance(pool, dict)}
