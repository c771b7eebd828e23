"""The logits that `trtpd build` compares precisions by, computed in a process of their own.

python -m trtpd.perf.accuracy REQUEST OUT        (started by the build)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from trtpd.errors import EngineError, TrtpdError
from trtpd.runtime.engine.forced import forced_logits

GIVE_UP_S = 240.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """An engine directory, and the token ids to feed it."""

    directory: str
    passages: tuple[tuple[int, ...], ...]


def engine_logits(
    directory: Path, passages: Sequence[Sequence[int]], out: Path, *, give_up_s: float = GIVE_UP_S
) -> None:
    """See ComputeLogits."""
    request = Request(directory=str(directory), passages=tuple(map(tuple, passages)))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(request))
        file.flush()
        command = [sys.executable, "-P", "-m", "trtpd.perf.accuracy", file.name, str(out)]
        quiet = subprocess.DEVNULL
        try:
            done = subprocess.run(command, stdin=quiet, capture_output=True, timeout=give_up_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"it was not computed within {give_up_s:g} s") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise EngineError(f"it could not be computed: {lines[-1] if lines else f'status {done.returncode}'}")


def main(argv: Sequence[str]) -> int:
    request_file, out = map(Path, argv)
    request = msgspec.json.decode(request_file.read_bytes(), type=Request)
    part = out.with_suffix(".part")
    try:
        logits = forced_logits(Path(request.directory), request.passages, pool_name=f"trtpd-accuracy-{os.getpid()}")
        with part.open("wb") as file:
            np.save(file, logits, allow_pickle=False)
        part.replace(out)
    except (TrtpdError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
