"""`trtpd profile`: its arguments, and what it shows."""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtpd import argument_types, console


def add_profile(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "build", type=Path, metavar="BUILD|FILE", help="a build directory, or a pipeline file that is built for the run"
    )
    sub.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: profile.json in the build, where `trtpd serve` finds it; for a pipeline file what "
        "scheduler.profile names, else profile.json beside it",
    )
    sub.add_argument("--roles", metavar="NAME,...", help="only these engines (and --paths)")
    sub.add_argument("--paths", metavar="NAME,...", help="only these transfers: shm, nixl, tcp")
    sub.add_argument(
        "--budget-s",
        type=argument_types.some_seconds,
        default=600.0,
        metavar="S",
        help="no point begins that would end later (default: 600); again goes on",
    )
    sub.add_argument("--force", action="store_true", help="begin anew, whatever is in the file")


def profile(args: argparse.Namespace) -> int:
    from trtpd.perf.option_lists import parts
    from trtpd.perf.profile_report import HEADINGS, lines, rows
    from trtpd.perf.profiler import ProfileOptions, Profiler

    _end_on_sigterm()
    with _build_of(args.build) as build, console.progress() as progress:
        out = args.output or _place(args.build)
        options = ProfileOptions(
            build=build,
            out=out,
            roles=parts(args.roles, "--roles"),
            paths=parts(args.paths, "--paths"),
            budget_s=args.budget_s,
            force=args.force,
        )
        profiler = Profiler(options, progress)
        for note in (*profiler.notes, profiler.plan):
            console.say(note)
        try:
            found = profiler.run()
        except KeyboardInterrupt:
            done, left = profiler.cells
            console.say(f"{out}: {done} points are measured, {left} are left; the same command goes on")
            raise
        done, left = profiler.cells
    if args.json:
        about = {"path": str(out), "cells": done, "cells_left": left}
        console.result(found.model_dump(mode="json") | about, as_json=True)
        return 0
    if points := rows(found):
        console.table(HEADINGS, points)
        print("\n".join(["", *lines(found)]))
    elif left:
        console.say(f"{args.budget_s:g} s were too short for a single point: an engine must be loaded first")
    if left:
        console.say(f"{left} points are left; the same command goes on (longer with --budget-s S)")
    print(out)
    return 0


def _end_on_sigterm() -> None:
    """As on Ctrl-C: its processes and what it built go with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def _build_of(path: Path) -> Iterator[Path]:
    """The build directory; for a pipeline file one that is made now and removed afterwards."""
    if not path.is_file():
        yield path
        return
    from trtpd.build.builder import build
    from trtpd.build.spec import load_spec

    with tempfile.TemporaryDirectory(prefix="trtpd-profile-") as folder:
        with console.progress() as progress:
            made = build(load_spec(path), Path(folder) / "BUILD", progress=progress)
        yield made.out


def _place(given: Path) -> Path:
    """Where the profile goes if nobody says."""
    from trtpd.build.cost_profile import PROFILE
    from trtpd.build.spec import NO_PROFILE, load_spec

    if not given.is_file():
        return given / PROFILE
    named = load_spec(given).scheduler.profile
    return given.parent / PROFILE if named in (None, NO_PROFILE) else Path(str(named))
