"""Routes: a plan of slices (reshard.py) as places in two pools, and the copies that follow it on one host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trtpd.kv_transfer.convert import convert
from trtpd.kv_transfer.integrity import Arrivals, Sums, array_weights
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import SharedPool, Words
from trtpd.kv_transfer.ranks import RankPools
from trtpd.kv_transfer.reshard import slices_for
from trtpd.kv_transfer.runs import Run, split

TILE_BYTES = 2 << 20
"""Copies are made, and digested, in tiles of about this size: few enough calls, and enough to share."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """From one rank of a source to one rank of a sink. Arrays and heads are counted as the two pools count
    them; arrays are K and V of each layer in turn. `heads` are the same heads as the model counts them,
    `weights` those of the arrays (integrity.py)."""

    source_rank: tuple[int, int]
    sink: SharedPool
    source_arrays: range
    sink_arrays: range
    source_heads: range
    sink_heads: range
    heads: range
    weights: Sums

    def sink_cells(self, run: Run, arrays: range) -> Words:
        """A run's place in the sink; `arrays` count from the route's first."""
        first = self.sink_arrays.start
        return self.sink.cells[
            first + arrays.start : first + arrays.stop,
            run.sink : run.sink + run.count,
            self.sink_heads.start : self.sink_heads.stop,
        ]

    def source_cells(self, source: SharedPool, run: Run, arrays: range) -> Words:
        """A run's place in the source's pool."""
        first = self.source_arrays.start
        return source.cells[
            first + arrays.start : first + arrays.stop,
            run.source : run.source + run.count,
            self.source_heads.start : self.source_heads.stop,
        ]

    @property
    def arrays(self) -> range:
        return range(len(self.sink_arrays))

    def block_bytes(self) -> int:
        """Bytes of one block, of one array, in the sink."""
        return int(self.sink.cells[0, 0, 0].nbytes) * len(self.sink_heads)


def plan_routes(source: KVLayout, pools: RankPools) -> tuple[Route, ...]:
    """All that the sink's ranks here take from the ranks of a source. The layouts are convertible."""
    routes = []
    for (tp_rank, pp_rank), pool in pools.by_rank.items():
        for part in slices_for(source, pools.layout, tp_rank, pp_rank):
            source_layers, sink_layers = source.rank_layers(part.pp_rank), pools.layout.rank_layers(pp_rank)
            source_heads, sink_heads = source.rank_heads(part.tp_rank), pools.layout.rank_heads(tp_rank)
            routes.append(
                Route(
                    source_rank=(part.tp_rank, part.pp_rank),
                    sink=pool,
                    source_arrays=_arrays(part.layers, source_layers.start),
                    sink_arrays=_arrays(part.layers, sink_layers.start),
                    source_heads=_within(part.heads, source_heads.start),
                    sink_heads=_within(part.heads, sink_heads.start),
                    heads=part.heads,
                    weights=array_weights(part.layers),
                )
            )
    return tuple(routes)


def _within(model: range, first: int) -> range:
    return range(model.start - first, model.stop - first)


def _arrays(layers: range, first: int) -> range:
    return range(2 * (layers.start - first), 2 * (layers.stop - first))


def tiles(route: Route, blocks: int) -> list[range]:
    """The route's arrays in steps of about TILE_BYTES for so many blocks."""
    step = max(1, TILE_BYTES // (blocks * route.block_bytes()))
    return [range(i, min(i + step, len(route.arrays))) for i in route.arrays[::step]]


def copy_cells(route: Route, source: SharedPool, run: Run, arrays: range) -> None:
    """Copies (or converts) part of a run, in one call that lets other Python threads run."""
    of, to = route.source_cells(source, run, arrays), route.sink_cells(run, arrays)
    if source.layout.dtype == route.sink.layout.dtype:
        np.copyto(to, of)
    else:
        convert(of, source.layout.dtype, to, route.sink.layout.dtype)


def copy_jobs(route: Route, source: SharedPool, run: Run, arrivals: Arrivals) -> Iterator[Callable[[], None]]:
    """What copies a run in all layers, tile by tile and in any order, and digests what is to be verified: the bytes
    that arrived or, where they were converted on the way, the source's."""
    for part in arrivals.parts(run):
        for tile in split(part, max(1, TILE_BYTES // route.block_bytes())):
            for arrays in tiles(route, tile.count):
                yield functools.partial(_copy_tile, route, source, tile, arrays, arrivals)


def copy_run(route: Route, source: SharedPool, run: Run, arrivals: Arrivals) -> None:
    """Does them all."""
    for job in copy_jobs(route, source, run, arrivals):
        job()


def _copy_tile(route: Route, source: SharedPool, tile: Run, arrays: range, arrivals: Arrivals) -> None:
    copy_cells(route, source, tile, arrays)
    if arrivals.wanted(tile):
        converted = source.layout.dtype != route.sink.layout.dtype
        cells = route.source_cells(source, tile, arrays) if converted else route.sink_cells(tile, arrays)
        weights = route.weights[arrays.start : arrays.stop]
        arrivals.add(route.sink.address.tp_rank, tile, route.heads, cells, weights)
