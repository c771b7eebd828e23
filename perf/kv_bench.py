"""What a KV hand-off costs beside a plain memcpy of the same bytes, measured in turn in one run.

    python -m trtpd.perf.kv_bench [--json] [--tokens 128 512 2048] [--dtype f32] [--repeats 9]

Both pools have the shape of SmolLM2-135M. A hand-off is timed from the seal's arrival at the sink until its
result, so thread wake-up, lease, epochs and verification are in it; `ratio` is memcpy's time over the hand-off's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np

from trtpd.errors import TrtpdError
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.layout import KVDtype, KVLayout
from trtpd.kv_transfer.pool import SharedPool
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.shm import ShmSink, ShmSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case: medians, their ratio, and the ratio of the fastest of each (what other load on the machine
    spoils least). `source_digest_mb_per_s` is what the source's digests alone reach, 0 without digests."""

    tokens: int
    fragmented: bool
    digests: bool
    megabytes: float
    handoff_ms: float
    memcpy_ms: float
    ratio: float
    best_ratio: float
    source_digest_mb_per_s: float


class Bench:
    """Two pools, a source and a sink per digest setting."""

    def __init__(self, layout: KVLayout, tokens: int, *, seed: int) -> None:
        self._layout, self._tokens = layout, tokens
        self._needed = layout.blocks_for(tokens)
        blocks = 2 * self._needed
        generation = f"bench-{os.urandom(4).hex()}"
        self._rng = np.random.default_rng(seed)
        self._from = SharedPool.create("bench-source", layout, blocks, generation=generation)
        self._to = SharedPool.create("bench-sink", layout, blocks, generation=generation)
        for number, array in enumerate(self._from.keys + self._from.values):
            array[:] = number
        size_bytes = self._needed * self._from.grid[:, 0].nbytes
        self._plain_from, self._plain_to = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
        self._generation = generation
        self._request_id = 0

    def close(self) -> None:
        self._from.close()
        self._to.close()

    def row(self, *, fragmented: bool, digests: bool, repeats: int) -> Row:
        settings = TransferSettings(
            instance="bench", generation=self._generation, digest_every=int(digests), one_piece_tokens=1 << 30
        )
        ended = threading.Event()
        source = ShmSource(RankPools([self._from]), settings)
        sink = ShmSink(RankPools([self._to]), settings, wake=ended.set)
        handoffs, copies, digestings = [], [], []
        try:
            for _ in range(repeats + 1):  # the first one maps pages in
                copies.append(_timed_s(self._memcpy))
                handoff_s, digest_s = self._handoff_s(source, sink, ended, fragmented=fragmented)
                handoffs.append(handoff_s)
                digestings.append(digest_s)
        finally:
            sink.close()
            source.close()
        handoff_s, copy_s = statistics.median(handoffs[1:]), statistics.median(copies[1:])
        megabytes = self._needed * self._from.grid[:, 0].nbytes / 1e6
        return Row(
            tokens=self._tokens,
            fragmented=fragmented,
            digests=digests,
            megabytes=round(megabytes, 1),
            handoff_ms=round(handoff_s * 1e3, 2),
            memcpy_ms=round(copy_s * 1e3, 2),
            ratio=round(copy_s / handoff_s, 2),
            best_ratio=round(min(copies[1:]) / min(handoffs[1:]), 2),
            source_digest_mb_per_s=round(megabytes / statistics.median(digestings[1:])) if digests else 0.0,
        )

    def _memcpy(self) -> None:
        np.copyto(self._plain_to, self._plain_from)

    def _handoff_s(
        self, source: ShmSource, sink: ShmSink, ended: threading.Event, *, fragmented: bool
    ) -> tuple[float, float]:
        """Seconds of the hand-off, and of the seal with its digests."""
        self._request_id += 1
        key = (self._request_id, 1)
        of, to = (self._blocks(fragmented=fragmented) for _ in range(2))
        offer = source.offer(key, prompt_tokens=self._tokens, blocks=of)
        sink.begin(offer, to)
        began_s = time.perf_counter()
        seal = source.seal(key, first_token=0, first_log_prob=None, seed=0)
        digest_s = time.perf_counter() - began_s
        ended.clear()
        began_s = time.perf_counter()
        sink.sealed(seal)
        ended.wait(60)
        handoff_s = time.perf_counter() - began_s
        (result,) = sink.progress()
        if result.error:
            raise TrtpdError(f"the hand-off failed: {result.error}")
        source.end(key)
        return handoff_s, digest_s

    def _blocks(self, *, fragmented: bool) -> list[int]:
        if not fragmented:
            return list(range(self._needed))
        every_other = np.arange(0, 2 * self._needed, 2)
        return [int(block) for block in self._rng.permutation(every_other)]


def _timed_s(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measure(tokens: Sequence[int], *, dtype: KVDtype, repeats: int, seed: int) -> list[Row]:
    """One row per prompt length, fragmentation and digest setting. Raises CapacityError, TrtpdError."""
    layout = KVLayout(num_layers=30, kv_heads=3, head_dim=64, tokens_per_block=32, dtype=dtype)
    rows = []
    for count in tokens:
        bench = Bench(layout, count, seed=seed)
        try:
            for fragmented in (False, True):
                for digests in (False, True):
                    rows.append(bench.row(fragmented=fragmented, digests=digests, repeats=repeats))
        finally:
            bench.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kv_bench", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048], help="prompt lengths")
    parser.add_argument("--dtype", choices=get_args(KVDtype), default="f32")
    parser.add_argument("--repeats", type=int, default=9, help="of each case; medians are reported")
    parser.add_argument("--seed", type=int, default=0, help="of the fragmented block tables")
    options = parser.parse_args(argv)
    if min(options.tokens) < 1 or options.repeats < 1:
        parser.error("--tokens and --repeats must be at least 1")
    try:
        rows = measure(options.tokens, dtype=options.dtype, repeats=options.repeats, seed=options.seed)
    except TrtpdError as error:
        print(f"kv_bench: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps({"transport": "shm", "dtype": options.dtype, "rows": [asdict(row) for row in rows]}))
        return 0
    print("tokens  blocks      digests      MB  hand-off ms  memcpy ms  ratio   best  source digests MB/s")
    for row in rows:
        blocks, digests = "scattered" if row.fragmented else "in a run", "yes" if row.digests else "no"
        print(
            f"{row.tokens:6}  {blocks:<10}  {digests:<7}  {row.megabytes:6.1f}  {row.handoff_ms:11.2f}"
            f"  {row.memcpy_ms:9.2f}  {row.ratio:5.2f}  {row.best_ratio:5.2f}  {row.source_digest_mb_per_s:20.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
