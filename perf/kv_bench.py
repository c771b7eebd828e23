"""What a KV hand-off costs beside a plain memcpy of the same bytes, measured in turn in one run.

    python -m trtpd.perf.kv_bench [--json] [--transports shm tcp] [--shapes smollm2] [--tokens 128 2048] [--repeats 5]
                                  [--digests no] [--blocks run] [--cores 1] [--overlap-tokens 256 2048]

Source and sink are two processes, in the environment that workers get (hands.py), and so is memcpy. With `--cores 1`
each keeps to a core of its own, as two instances on two cores do; else both may use all, and the source, which is idle
meanwhile, leaves its core to the sink. A hand-off is timed from the seal's arrival at the sink until its result, so
thread wake-up, lease, epochs and verification are in it; `ratio` is memcpy's time over the hand-off's. The second table
is what of it a user waits for when chunks of the prompt move while later ones are computed, and when nothing moves
before the seal, for a prefill of so many tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import psutil

from trtpd.errors import CapacityError, TrtpdError
from trtpd.kv_transfer.factory import TRANSPORTS
from trtpd.kv_transfer.hands import copying_environment
from trtpd.kv_transfer.layout import KVLayout
from trtpd.perf.kv_pair import KVPair, Setup

SHAPES = {
    "smollm2": KVLayout(num_layers=30, kv_heads=3, head_dim=64, tokens_per_block=32, dtype="f32"),
    "smollm2-bf16": KVLayout(num_layers=30, kv_heads=3, head_dim=64, tokens_per_block=32, dtype="bf16"),
    "llama3-8b": KVLayout(num_layers=32, kv_heads=8, head_dim=128, tokens_per_block=32, dtype="bf16"),
}
TOKENS = (128, 512, 2048, 8192)
OVERLAP_TOKENS = (2048,)
POOLS_AND_COPIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case: medians, their ratio, and the ratio of the fastest of each (what other load on the machine
    spoils least). `seal_ms` is the source's seal, with the digests it makes."""

    transport: str
    shape: str
    tokens: int
    fragmented: bool
    digests: bool
    cores: int
    megabytes: float
    handoff_ms: float
    memcpy_ms: float
    gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float
    best_ratio: float
    seal_ms: float


@dataclass(frozen=True, slots=True)
class Cores:
    """Where the two processes run."""

    source: tuple[int, ...]
    sink: tuple[int, ...]

    @classmethod
    def choose(cls, count: int | None) -> Cores:
        """`count` cores each, side by side as far as there are enough; None: all, for both."""
        there = sorted(os.sched_getaffinity(0))
        if count is None:
            return cls(tuple(there), tuple(there))
        return cls(tuple(there[:count]), tuple(there[-count:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Exposed time of a hand-off after a prefill of `prefill_ms`, chunk by chunk and in one piece."""

    transport: str
    shape: str
    tokens: int
    prefill_ms: float
    exposed_ms: float
    exposed_one_piece_ms: float


class Bench:
    """One transport, shape and digest setting, for prompts of up to `tokens` tokens."""

    def __init__(self, transport: str, shape: str, tokens: int, *, digests: bool, cores: Cores, seed: int) -> None:
        layout = SHAPES[shape]
        blocks = layout.blocks_for(tokens)
        self._transport, self._shape, self._layout, self._digests = transport, shape, layout, digests
        self._cores = cores
        self._rng = np.random.default_rng(seed)
        check_room(blocks * layout.tokens_per_block * layout.bytes_per_token)
        self._pair = KVPair(
            Setup(
                layout=layout,
                num_blocks=blocks,
                transport=transport,
                generation=f"bench-{os.urandom(4).hex()}",
                digest_every=1 if digests else 0,
                cores=cores.source,
            )
        )
        self._block_bytes = self._pair.pool.grid[:, 0].nbytes
        self._requests = 0

    def close(self) -> None:
        self._pair.close()

    def row(self, tokens: int, *, fragmented: bool, repeats: int) -> Row:
        size_bytes = self._layout.blocks_for(tokens) * self._block_bytes
        plain_from, plain_to = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
        handoffs, copies, seals = [], [], []
        for _ in range(repeats + 1):  # the first one maps pages in
            copies.append(_timed_s(lambda: np.copyto(plain_to, plain_from)))
            self._begin(tokens, fragmented=fragmented)
            _, handoff_s, seal_s = self._pair.finish(self._requests)
            handoffs.append(handoff_s)
            seals.append(seal_s)
        handoff_s, copy_s = statistics.median(handoffs[1:]), statistics.median(copies[1:])
        return Row(
            transport=self._transport,
            shape=self._shape,
            tokens=tokens,
            fragmented=fragmented,
            digests=self._digests,
            cores=len(self._cores.sink),
            megabytes=round(size_bytes / 1e6, 1),
            handoff_ms=round(handoff_s * 1e3, 2),
            memcpy_ms=round(copy_s * 1e3, 2),
            gb_per_s=round(size_bytes / handoff_s / 1e9, 2),
            memcpy_gb_per_s=round(size_bytes / copy_s / 1e9, 2),
            ratio=round(copy_s / handoff_s, 2),
            best_ratio=round(min(copies[1:]) / min(handoffs[1:]), 2),
            seal_ms=round(statistics.median(seals[1:]) * 1e3, 2),
        )

    def overlap(self, tokens: int, *, chunk_tokens: int, prefill_tokens_per_s: float, repeats: int) -> Overlap:
        exposed: dict[bool, list[float]] = {False: [], True: []}
        prefill_s = tokens / prefill_tokens_per_s
        for _ in range(repeats):
            for one_piece in (False, True):
                self._begin(tokens, fragmented=False)
                for ready_tokens in range(chunk_tokens, tokens, chunk_tokens):
                    time.sleep(chunk_tokens / prefill_tokens_per_s)
                    if not one_piece:
                        self._pair.publish(self._requests, ready_tokens)
                time.sleep(chunk_tokens / prefill_tokens_per_s)
                result, _, _ = self._pair.finish(self._requests)
                exposed[one_piece].append(result.exposed_s)
        return Overlap(
            transport=self._transport,
            shape=self._shape,
            tokens=tokens,
            prefill_ms=round(prefill_s * 1e3, 1),
            exposed_ms=round(statistics.median(exposed[False]) * 1e3, 2),
            exposed_one_piece_ms=round(statistics.median(exposed[True]) * 1e3, 2),
        )

    def _begin(self, tokens: int, *, fragmented: bool) -> None:
        self._requests += 1
        of, to = (self._blocks(tokens, fragmented=fragmented) for _ in range(2))
        self._pair.begin(self._requests, tokens, of, to)

    def _blocks(self, tokens: int, *, fragmented: bool) -> tuple[int, ...]:
        needed, there = self._layout.blocks_for(tokens), self._pair.pool.num_blocks
        if not fragmented:
            return tuple(range(needed))
        return tuple(int(block) for block in self._rng.permutation(there)[:needed])


def check_room(pool_bytes: int) -> None:
    """Raises CapacityError rather than push a shared machine into its swap."""
    needed, available = POOLS_AND_COPIES * pool_bytes, psutil.virtual_memory().available
    if needed > available // 2:
        raise CapacityError(
            f"the bench would need {needed >> 20} MiB of the {available >> 20} MiB available: ask for fewer --tokens"
        )


def _timed_s(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measure(
    transports: Sequence[str], shapes: Sequence[str], tokens: Sequence[int], options: argparse.Namespace
) -> tuple[list[Row], list[Overlap]]:
    """All cases, one pair of processes per transport, shape and digest setting. Raises TrtpdError."""
    rows, overlaps = [], []
    cores = Cores.choose(options.cores)
    os.sched_setaffinity(0, cores.sink)
    for shape in shapes:
        for transport in transports:
            for digests in options.digests:
                largest = max([*tokens, *options.overlap_tokens])
                bench = Bench(transport, shape, largest, digests=digests, cores=cores, seed=options.seed)
                try:
                    for count in tokens:
                        for fragmented in options.blocks:
                            rows.append(bench.row(count, fragmented=fragmented, repeats=options.repeats))
                    overlaps += [_overlap(bench, count, options) for count in options.overlap_tokens if digests]
                finally:
                    bench.close()
    return rows, overlaps


def _overlap(bench: Bench, tokens: int, options: argparse.Namespace) -> Overlap:
    return bench.overlap(
        tokens,
        chunk_tokens=options.chunk_tokens,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        repeats=max(3, options.repeats),
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kv_bench", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--transports", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["smollm2", "llama3-8b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=5, help="of each case; medians are reported")
    both = {"yes": (True,), "no": (False,), "both": (False, True)}
    where = {"run": (False,), "scattered": (True,), "both": (False, True)}
    parser.add_argument("--digests", choices=both, default="both", help="whether blocks are verified")
    parser.add_argument("--blocks", choices=where, default="both", help="how a prompt's blocks lie")
    parser.add_argument("--cores", type=int, help="cores of each of the two processes; all if not given")
    parser.add_argument("--overlap-tokens", type=int, nargs="*", default=list(OVERLAP_TOKENS), help="prompt lengths")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of a prefill's chunks")
    parser.add_argument("--seed", type=int, default=0, help="of the fragmented block tables")
    parser.add_argument(
        "--prefill-tokens-per-s", type=float, default=4000.0, help="of the prefill beside which chunks move"
    )
    options = parser.parse_args(argv)
    counts = [*options.tokens, *options.overlap_tokens, options.chunk_tokens, options.repeats, options.cores or 1]
    if min(counts) < 1 or options.prefill_tokens_per_s <= 0:
        parser.error("numbers must be at least 1")
    options.digests, options.blocks = both[options.digests], where[options.blocks]
    return options


def _in_a_workers_environment() -> None:
    """Starts this program anew if it is not: the C library reads its tunables at the start only."""
    environment = copying_environment(os.environ)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        rows, overlaps = measure(options.transports, options.shapes, options.tokens, options)
    except TrtpdError as error:
        print(f"kv_bench: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        tables = {"rows": [asdict(row) for row in rows], "overlap": [asdict(overlap) for overlap in overlaps]}
        print(json.dumps(tables))
        return 0
    print(
        "transport  shape         tokens  blocks     digests  cores      MB  hand-off ms   GB/s  memcpy  ratio   best"
        "  seal ms"
    )
    for row in rows:
        blocks, digests = "scattered" if row.fragmented else "in a run", "yes" if row.digests else "no"
        print(
            f"{row.transport:<9}  {row.shape:<12}  {row.tokens:6}  {blocks:<9}  {digests:<7}  {row.cores:5}"
            f"  {row.megabytes:6.1f}  {row.handoff_ms:11.2f}  {row.gb_per_s:5.2f}  {row.memcpy_gb_per_s:6.2f}"
            f"  {row.ratio:5.2f}  {row.best_ratio:5.2f}  {row.seal_ms:7.2f}"
        )
    print("\ntransport  shape         tokens  prefill ms  exposed ms  share  in one piece ms")
    for case in overlaps:
        print(
            f"{case.transport:<9}  {case.shape:<12}  {case.tokens:6}  {case.prefill_ms:10.1f}  {case.exposed_ms:10.2f}"
            f"  {case.exposed_ms / case.prefill_ms:5.1%}  {case.exposed_one_piece_ms:15.2f}"
        )
    return 0


if __name__ == "__main__":
    _in_a_workers_environment()
    sys.exit(main())
