"""A `trtpd serve` of its own for a measurement: built of emulated engines, started, and stopped whatever happens."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
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

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each kind of process: tritonserver, router (the stub of `pd`), stubs, workers by
        instance, launcher."""
        spent: dict[str, float] = {}
        launcher = psutil.Process(self.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                kind = kind_of(process.cmdline())
                spent[kind] = spent.get(kind, 0.0) + times.user + times.system
        return spent

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory now, by the same kinds."""
        held: dict[str, int] = {}
        launcher = psutil.Process(self.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                kind = kind_of(process.cmdline())
                held[kind] = held.get(kind, 0) + process.memory_info().rss
        return held


def kind_of(command: list[str]) -> str:
    """Which of a server's processes a command line belongs to."""
    name = Path(command[0]).name if command else ""
    if name == "tritonserver":
        return "tritonserver"
    if name == "triton_python_backend_stub":
        return "router" if any("/pd/" in argument for argument in command) else "stubs"
    if "trtpd.runtime.worker" in command:
        return command[command.index("--instance") + 1] if "--instance" in command else "workers"
    return "launcher" if "serve" in command else "others"


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
        line = process.stdout.readline()
        ready = json.loads(line) if line else {}
        if "grpc" not in ready:
            raise ServeError(f"the server for this measurement did not start: {line}{log.read_text().strip()[-500:]}")
        yield Served(pid=process.pid, grpc=ready["grpc"], http=ready["http"], metrics=ready["metrics"])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
