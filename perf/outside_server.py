"""Starts a server that is not ours, for an arm, and takes it down again."""

from __future__ import annotations

import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtpd.errors import ServeError
from trtpd.perf.bench import Target
from trtpd.perf.served import free_port, stop

READY_S = 180.0


@contextmanager
def outside(command: str, log: Path) -> Iterator[Target]:
    """Another OpenAI server, by its command; {port} becomes a free one. Raises ServeError if it does not come up."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    with log.open("w") as errors:
        try:
            process = subprocess.Popen(words, stdout=errors, stderr=errors, start_new_session=True)
        except OSError as error:
            raise ServeError(f"{words[0]} can't be started ({error.strerror})") from error
    root = f"http://127.0.0.1:{port}"
    try:
        _await_models(process, root, log)
        yield Target(url=root, openai=True, model="")
    finally:
        stop(process)


def _await_models(process: subprocess.Popen[bytes], root: str, log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise ServeError(f"the outside server ended ({process.returncode}): {log.read_text()[-500:]}")
        try:
            with urllib.request.urlopen(f"{root}/v1/models", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ServeError(f"the outside server does not list its models at {root}/v1/models after {READY_S:g} s")
