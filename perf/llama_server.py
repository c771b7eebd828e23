"""llama.cpp's server (the PyPI package xllamacpp) over HTTP, as an outside arm of a comparison.

    python -m trtpd.perf.llama_server --model DIR --port PORT [--type F32] [--threads 2] [--slots 16]
                                      [--context-tokens 4096] [--cores 0,1]

    trtpd compare BUILD --workload mixed --outside \\
        'python -m trtpd.perf.llama_server --model DIR --cores 0,1 --port {port}'

The model is a Hugging Face folder of a Llama; its weights are written as GGUF once, into the cache, with its tokenizer.
Settings are the server's own where not given: continuous batching, prompts cached within a slot.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.files import cache_dir, digest_of, locked
from trtpd.errors import TrtpdError
from trtpd.perf.llama_cpp import start
from trtpd.perf.llama_gguf import GGUF_TYPES, write_gguf


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT."""
    args = _arguments().parse_args(argv)
    try:
        gguf = _gguf(args.model, args.type)
        if args.cores:
            os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
        stopped = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, stopped)  # before the server's threads, which inherit it
        server = _server(gguf, args)
        print(f"llama.cpp serves {gguf} at {server.listening_address}", file=sys.stderr, flush=True)
        signal.sigwait(stopped)
    except (TrtpdError, OSError, ValueError) as error:
        print(f"llama_server: {error}", file=sys.stderr)
        return 1
    sys.stderr.flush()
    os._exit(0)  # its destructor waits for connections that clients keep open


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="llama.cpp's server on a Hugging Face folder.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--type", choices=GGUF_TYPES, default="F32", help="of the matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16, help="answers written at once")
    parser.add_argument("--context-tokens", type=int, default=4096, help="of one slot")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of one step (n_batch)")
    parser.add_argument("--cores", default="", metavar="N,...", help="CPUs it keeps to")
    return parser


def _gguf(model: Path, kind: str) -> Path:
    checkpoint = open_checkpoint(model)
    path = cache_dir() / "llama_server" / f"{digest_of(checkpoint.digest(), kind)}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            write_gguf(checkpoint, path, kind, tokenizer=True)
    return path


def _server(gguf: Path, args: argparse.Namespace) -> Any:
    return start(
        str(gguf),
        context_tokens=args.context_tokens,
        slots=args.slots,
        threads=args.threads,
        batch_tokens=args.batch_tokens,
        port=args.port,
    )


if __name__ == "__main__":
    raise SystemExit(main())
