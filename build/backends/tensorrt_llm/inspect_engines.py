"""Opens the engines in a directory with TensorRT and prints, as JSON, what their profiles take.

`python -m trtpd.build.backends.tensorrt_llm.inspect_engines DIR` prints {"tensorrt": version, "engines": {file:
{"profiles": {tensor: [[min, opt, max], ...]}} or {"fault": text}}}, or {"tensorrt": null} where it isn't installed.
A process of its own, since a library that can't cope with an engine may take its process along.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TENSORS = ("input_ids", "position_ids", "context_lengths", "last_token_ids")


def report(directory: Path) -> dict[str, Any]:
    """What `main` prints."""
    try:
        tensorrt = importlib.import_module("tensorrt")
    except ImportError:
        return {"tensorrt": None, "engines": {}}
    try:
        # Registers the plugins without which no engine of its can be read.
        importlib.import_module("tensorrt_llm")
    except ImportError as error:
        print(f"tensorrt_llm can't be imported ({error})", file=sys.stderr)
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
    engines = {path.name: _inspect(runtime, path) for path in sorted(directory.glob("rank*.engine"))}
    return {"tensorrt": tensorrt.__version__, "engines": engines}


def _inspect(runtime: Any, path: Path) -> dict[str, Any]:
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        return {"fault": "TensorRT can't read it (another version, or another GPU than it was built for)"}
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    profiles = {
        name: [
            [list(shape) for shape in engine.get_tensor_profile_shape(name, profile)]
            for profile in range(engine.num_optimization_profiles)
        ]
        for name in _TENSORS
        if name in names
    }
    return {"profiles": profiles}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report of the directory named in `argv`."""
    (directory,) = sys.argv[1:] if argv is None else argv
    print(json.dumps(report(Path(directory))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
