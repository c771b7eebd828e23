"""What each command does: a few lines between the rooms and the console."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trtpd import console
from trtpd.errors import InputError, ServeError, TrtpdError

if TYPE_CHECKING:
    from trtpd.build.tuning import TuneOptions

NOTES_SHOWN = 5


def fetch(args: argparse.Namespace) -> int:
    from trtpd.build.fetch import fetch_model

    with console.progress() as progress:
        path = fetch_model(args.model, args.output, progress)
    console.result({"model": args.model, "path": str(path)}, as_json=args.json, text=str(path))
    return 0


def init(args: argparse.Namespace) -> int:
    from trtpd.build.checkpoint import open_architecture
    from trtpd.build.engines import ENGINES
    from trtpd.build.fetch import fetch_smollm2
    from trtpd.build.files import ELSEWHERE, mend_of, write_whole
    from trtpd.build.machine import this_machine
    from trtpd.build.starter import init_text

    if args.output.exists() and not args.force:
        raise InputError(f"{args.output} exists; choose another name with -o, or overwrite it with --force")
    if args.model is None:
        with console.progress() as progress:
            args.model = fetch_smollm2(progress=progress)
    folder = args.output.resolve().parent
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; make it first, or choose another place with -o")
    machine = this_machine(openvino=args.engine == "openvino")
    text = init_text(open_architecture(args.model, ENGINES[args.engine].models), args.engine, machine, folder=folder)
    try:
        write_whole(args.output, text.encode())
    except OSError as error:
        mend = mend_of(error, ELSEWHERE)
        raise InputError(f"{args.output} can't be written ({error.strerror}); {mend}") from error
    console.result({"pipeline": str(args.output)}, as_json=args.json, text=str(args.output))
    return 0


def lint(args: argparse.Namespace) -> int:
    from trtpd.build.lint import lint as findings_of
    from trtpd.build.lint import notes_on

    findings = findings_of(args.path)
    errors = sum(finding.severity == "error" for finding in findings)
    lines = [str(finding) for finding in findings]
    notes = notes_on(args.path)
    lines += [f"note: {note}" for note in notes]
    lines.append(f"{args.path}: {errors} errors, {len(findings) - errors} warnings")
    document = {"errors": errors, "findings": [asdict(finding) for finding in findings], "notes": notes}
    console.result(document, as_json=args.json, text="\n".join(lines))
    return 1 if errors else 0


def build(args: argparse.Namespace) -> int:
    from trtpd.build.builder import build as make
    from trtpd.build.spec import load_spec

    if args.tune and (args.role or args.dry_run):
        raise InputError("--tune measures all roles of a whole build; leave out --role and --dry-run")
    if args.tune_precision is not None and (not args.tune or args.no_accuracy):
        raise InputError("--tune-precision needs --tune, and errors measured: leave out --no-accuracy")
    tuning = _tuning(args.tune_s, args.tune_precision) if args.tune else None
    with console.progress() as progress:
        made = make(
            load_spec(args.pipeline),
            args.output,
            role=args.role,
            force=args.force,
            dry_run=args.dry_run,
            progress=progress,
            tuning=tuning,
            compute_logits=None if args.no_accuracy else _compute_logits,
        )
    document = {
        "build": str(made.out),
        "dry_run": made.dry_run,
        "fingerprint": made.manifest.pair_fingerprint,
        "roles": {plan.role: plan.action for plan in made.plans},
        "steps": list(made.steps),
        "tuning": {role: msgspec.to_builtins(record) for role, record in made.manifest.tuning.items()},
        "accuracy": {name: msgspec.to_builtins(found) for name, found in made.manifest.accuracy.items()},
        "notes": list(made.notes),
        "warnings": [asdict(finding) for finding in made.warnings],
    }
    reasons = "".join(f"{role}: {why}\n" for role, record in made.manifest.tuning.items() for why in record.why)
    for finding in made.warnings:
        console.say(str(finding))
    head = f"{made.out} (not written: --dry-run)" if made.dry_run else str(made.out)
    console.result(document, as_json=args.json, text=f"{made.summary()}\n{reasons}{head}")
    return 0


def _tuning(seconds: float, kl_bound_nats: float | None) -> TuneOptions:
    from trtpd.build.tuning import TuneOptions
    from trtpd.perf.profile import engine_measure

    return TuneOptions(measure=engine_measure, seconds=seconds, kl_bound_nats=kl_bound_nats)


def _compute_logits(directory: Path, passages: Sequence[Sequence[int]], out: Path) -> None:
    from trtpd.perf.accuracy import engine_logits

    engine_logits(directory, passages, out)


def keys(args: argparse.Namespace) -> int:
    from trtpd.runtime.worker.sockets import make_keys

    make_keys(args.output)
    console.result({"keys": str(args.output)}, as_json=args.json, text=str(args.output))
    return 0


def serve(args: argparse.Namespace) -> int:
    from trtpd.runtime.serve.launcher import Ready
    from trtpd.runtime.serve.launcher import serve as run
    from trtpd.runtime.serve.serve_options import ServeOptions

    def ready(server: Ready) -> None:
        text = f"ready in {server.seconds:.1f} s: http {server.http}, grpc {server.grpc}, metrics {server.metrics}"
        console.result(asdict(server), as_json=args.json, text=text)

    options = ServeOptions(
        build=args.build,
        http=args.http,
        grpc=args.grpc,
        metrics=args.metrics,
        host=args.host,
        only=tuple(name.strip() for name in args.only.split(",")) if args.only else (),
        router=args.router,
        keys=args.keys,
        tag=args.tag,
        drain_s=args.drain_s,
        verbose=args.verbose,
    )
    return run(options, on_ready=ready, say=console.say)


def generate(args: argparse.Namespace) -> int:
    from trtpd.runtime.serve.client import generate as stream
    from trtpd.runtime.serve.timeline import render

    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        prompt.encode()
    except UnicodeError as error:
        raise InputError("PROMPT is not valid UTF-8 text; convert it first (iconv -t UTF-8)") from error
    message: dict[str, Any] = {"prompt": prompt} if args.raw else {"messages": [{"role": "user", "content": prompt}]}
    text, timeline = "", None
    ids: list[int] = []
    pieces = stream(
        args.url,
        **message,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    try:
        for piece in pieces:
            text += piece.text
            ids += piece.ids
            timeline = piece.timeline or timeline
            if not args.json:
                print(piece.text, end="", flush=True)
    except TrtpdError:
        if text and not args.json:
            print(flush=True)  # what is said next begins a line of its own
        raise
    if args.json:
        document = {"text": text, "ids": ids, "timeline": msgspec.to_builtins(timeline) if timeline else None}
        console.result(document, as_json=True)
    else:
        print(flush=True)
        if timeline:
            console.say("\n" + render(timeline))
    return 0


def status(args: argparse.Namespace) -> int:
    from trtpd.runtime.serve.client import status as ask

    shown = False
    while True:
        try:
            found = ask(args.url)
        except ServeError as error:
            if not (args.watch and shown):
                raise
            console.say(f"trtpd status: {error}")
            time.sleep(1.0)
            continue
        shown = True
        if args.watch and not args.json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            print("\x1b[2J\x1b[H", end="")
        if args.json:
            console.result(found, as_json=True)
        else:
            _show_status(found)
        if not args.watch:
            return 0
        try:
            time.sleep(1.0)
        except KeyboardInterrupt:
            return 0


def _show_status(found: Mapping[str, Any]) -> None:
    rows = [
        [
            name,
            f"{i['role']}, to be {i['becoming']}" if i.get("becoming") else str(i["role"]),
            str(i["state"]),
            str(i["requests"]),
            f"{i['running']} + {i['waiting']}",
            f"{i['kv_blocks'] - i['kv_blocks_free']} of {i['kv_blocks']} ({i['kv_blocks_held']} held)",
            str(i["generation"]),
        ]
        for name, i in sorted(found["instances"].items())
    ]
    headings = ["instance", "role", "state", "requests", "running + waiting", "KV blocks used", "generation"]
    console.table(headings, rows)
    print(_profile_line(found.get("profile") or {}))
    print(f"in flight {found['requests_in_flight']}, queued {found['queued']}")
    counts = ", ".join(f"{name} {value}" for name, value in sorted(found["counters"].items()) if value)
    print(f"since start: {counts or 'nothing yet'}")
    for kind in ("fault", "event"):
        for note in found.get(f"{kind}s", [])[-NOTES_SHOWN:]:
            print(f"{kind} {note['ago_s']:.0f} s ago: {note['what']}")


def _profile_line(profile: Mapping[str, Any]) -> str:
    """What the router predicts by; {} of a server that doesn't say."""
    if not profile.get("path"):
        return "profile: none, step times are learned while serving"
    errors = ", ".join(f"{role} {found['p50']:.0%} / {found['p95']:.0%}" for role, found in profile["roles"].items())
    moved = profile.get("hand_off_bytes_per_s")
    rate = "learned while serving" if moved is None else f"{moved / 1e9:.2f} GB/s"
    return f"profile: {profile['path']} of {profile['made_at']}, error p50 / p95: {errors}; hand-offs: {rate}"


def doctor(args: argparse.Namespace) -> int:
    from trtpd.runtime.serve.doctor import examine

    checks = examine()
    usable = all(check.status != "missing" for check in checks if check.name in ("python", "openvino", "triton"))
    if args.json:
        console.result({"serves": usable, "checks": [check.as_dict() for check in checks]}, as_json=True)
    else:
        rows = [[c.name, c.status, c.found, c.needed_for, c.mend] for c in checks]
        console.table(["what", "", "found", "needed for", "mend"], rows)
        print("\nthis machine can serve engine openvino" if usable else "\nthis machine can't serve yet: see mend")
    return 0 if usable else 1
