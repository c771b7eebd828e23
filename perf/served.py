"""A `trtpd serve` of its own for a measurement: built, started, and stopped whatever happens."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from trtpd.build.fetch import fetch_model
from trtpd.errors import ServeError

TRTPD = (sys.executable, "-P", "-m", "trtpd.cli")
STOP_S = 60.0
TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
}
"""A shape whose KV costs next to nothing, so that a measurement sees the router and not the KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server. `grpc`, `http` and `metrics` are HOST:PORT."""

    pid: int
    grpc: str
    http: str
    metrics: str

    @property
    def root(self) -> psutil.Process:
        """The launcher, for process_cpu.py."""
        return psutil.Process(self.pid)


def tiny_model(folder: Path, *, model: Path | None = None) -> Path:
    """A Hugging Face folder with SmolLM2's tokenizer (or that of `model`) and a TINY shape; it has no weights, which
    emulated engines don't read."""
    source = model or fetch_model("smollm2")
    folder.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | TINY))
    return folder


def build(folder: Path, pipeline: Mapping[str, Any]) -> Path:
    """`trtpd build` of a pipeline given as data. Raises ServeError with what it printed if it fails."""
    spec = folder / "pipeline.yaml"
    spec.write_text(yaml.safe_dump(dict(pipeline)))
    run = subprocess.run(
        [*TRTPD, "build", str(spec), "--output", str(folder / "build")], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise ServeError(f"the build for this measurement failed: {run.stderr.strip()}")
    return folder / "build"


@contextlib.contextmanager
def served(build: Path, *, log: Path, arguments: tuple[str, ...] = ()) -> Iterator[Served]:
    """Starts `trtpd serve` on free ports, waits until it is ready, stops it in the end. Raises ServeError if it
    doesn't get ready; what it says goes to `log`."""
    command = [*TRTPD, "serve", str(build), "--json", "--http", "0", "--grpc", "0", "--metrics", "0", *arguments]
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # empty once it has ended
        ready = json.loads(line) if line.startswith("{") else {}
        if "grpc" not in ready:
            raise ServeError(f"{build} was not served: {ready.get('error') or log.read_text().strip()[-500:]}")
        yield Served(pid=process.pid, grpc=ready["grpc"], http=ready["http"], metrics=ready["metrics"])
    finally:
        stop(process)
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def served_tiny(
    name: str,
    pipeline: Callable[[Path], Mapping[str, Any]],
    *,
    model: Path | None = None,
    log: Path | None = None,
) -> Iterator[Served]:
    """Builds what `pipeline` makes of a tiny model (see tiny_model for `model`) and serves it as `served` does, all in
    a temporary folder named after `name`, the log too unless another place is given for it."""
    with tempfile.TemporaryDirectory(prefix=f"trtpd-{name}.") as path:
        folder = Path(path)
        made = build(folder, pipeline(tiny_model(folder / "model", model=model)))
        with served(made, log=log or folder / "serve.log") as server:
            yield server


def free_port() -> int:
    """A TCP port of the loopback that nothing listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ends a server: it may drain for a while."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
