"""Where the `trtpd` command begins. Imports nothing until Ctrl-C can be answered: what commands need takes a moment."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    try:
        from trtpd.command_line import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("trtpd: interrupted", file=sys.stderr, flush=True)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
