"""One path of KV from a prefill to a decode instance on this host, as a side that measures hand-offs.

    python -m trtpd.perf.transfer_side SETUP      (started by `trtpd profile`)

Source and sink are processes of their own, in the environment and on the cores that workers have.
"""

from __future__ import annotations

import os
import sys

import msgspec

from trtpd.kv_transfer.layout import KVLayout
from trtpd.perf.kv_pair import KVPair, Setup
from trtpd.perf.measured import Cell, Measure, answer


class TransferSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of up to `tokens` tokens. Cores: empty for any. `digest_every`: as in the pipeline file; 0: none."""

    layout: KVLayout
    tokens: int
    path: str
    digest_every: int
    source_cores: tuple[int, ...] = ()
    sink_cores: tuple[int, ...] = ()


class HandOffs:
    """See Measure: seconds from the seal's arrival to the end, everything moved in one piece."""

    def __init__(self, setup: TransferSetup) -> None:
        """Raises TransferError if the path can't be had here, CapacityError if there is no room."""
        self._layout = setup.layout
        self._requests = 0
        self._pair = KVPair(
            Setup(
                layout=setup.layout,
                num_blocks=setup.layout.blocks_for(setup.tokens),
                transport=setup.path,
                generation=f"profile-{os.urandom(4).hex()}",
                digest_every=setup.digest_every,
                cores=setup.source_cores,
            )
        )

    def __call__(self, cell: Cell) -> float:
        self._requests += 1
        blocks = tuple(range(self._layout.blocks_for(cell.tokens)))
        self._pair.begin(self._requests, cell.tokens, blocks, blocks)
        _, seconds, _ = self._pair.finish(self._requests)
        return seconds

    def close(self) -> None:
        self._pair.close()


def main() -> int:
    setup = msgspec.json.decode(sys.argv[1], type=TransferSetup)
    pairs: list[HandOffs] = []

    def load() -> Measure:
        pairs.append(HandOffs(setup))
        return pairs[0]

    try:
        return answer(load, setup.sink_cores)
    finally:
        for pair in pairs:
            pair.close()


if __name__ == "__main__":
    raise SystemExit(main())
