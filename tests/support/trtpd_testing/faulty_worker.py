"""A worker of an emulated engine whose ranks go wrong when told to.

Told by a file in the run directory: `fault` holds "raise RANK" or "hang RANK", which the next step does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from trtpd.errors import EngineError
from trtpd.runtime.engine.emulated import EmulatedPart
from trtpd.runtime.worker import __main__ as worker


def main(arguments: list[str]) -> int:
    fault = Path(arguments[arguments.index("--run-dir") + 1]) / "fault"
    compute = EmulatedPart.compute

    def faulty(self: EmulatedPart, step: Any) -> Any:
        rank = self._pool.address.tp_rank
        what = fault.read_text() if fault.exists() else ""
        if what == f"raise {rank}":
            raise EngineError("told to fail")
        while what == f"hang {rank}":
            time.sleep(1.0)
        return compute(self, step)

    EmulatedPart.compute = faulty  # type: ignore[method-assign]
    return worker.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
