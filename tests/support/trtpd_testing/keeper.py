"""Keeps one worker of several ranks until it is killed, as a stage model's stub does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from trtpd.runtime.serve.worker_process import WorkerCommand, WorkerProcess


def main(build: str, instance: str, router: str, run_dir: str, ranks: str) -> None:
    command = WorkerCommand(
        build=Path(build), instance=instance, router=router, run_dir=Path(run_dir), ranks=int(ranks)
    )
    WorkerProcess(command, os.environ).start(60.0)
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
