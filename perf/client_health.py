"""Whether the measuring client kept up: what it used, how late it was, and when that forbids a report."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from trtpd.errors import TrtpdError
from trtpd.perf.records import Record
from trtpd.perf.slo import Slo

LOOK_EVERY_S = 0.02
_GOLDEN = 0.6180339887498949
LATE_FLOOR_S = 0.010
LATE_SHARE_OF_TTFT = 0.05
LATE_SHARE_OF_GAP = 0.25
BUSY_SHARE = 0.9


class BottleneckError(TrtpdError):
    """The client was the bottleneck: its figures would describe itself."""

    code = "client_bottleneck"


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`late_*`: how long after its instant a request was sent. `lag_*`: how long it took from an instant, any of the
    run's, until the event loop was free: the error of an arrival's time if something arrives then. CPU shares are of
    one core."""

    late_p50_s: float
    late_p99_s: float
    late_largest_s: float
    lag_p99_s: float
    lag_largest_s: float
    cpu_share: float
    loop_cpu_share: float
    wall_s: float
    responses: int

    def faults(self, limit_s: float) -> list[str]:
        """Why nothing should be reported, one phrase each; empty if all is well."""
        found = []
        if self.late_p99_s > limit_s:
            found.append(f"requests left {self.late_p99_s * 1e3:.1f} ms late (p99)")
        if self.lag_p99_s > limit_s:
            found.append(f"arrivals were seen up to {self.lag_p99_s * 1e3:.1f} ms late (p99)")
        if self.loop_cpu_share > BUSY_SHARE:
            found.append(f"its event loop was busy {self.loop_cpu_share:.0%} of the time")
        return found


def late_limit_s(records: Sequence[Record]) -> float:
    """How late the client may be (p99): LATE_FLOOR_S, or more where that is still little beside what it measures."""
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    gaps = [gap for record in records for gap in record.gaps_s() if gap > 0.0]
    if not ttfts:
        return LATE_FLOOR_S
    limits = [LATE_SHARE_OF_TTFT * float(np.median(ttfts))]
    if gaps:
        limits.append(LATE_SHARE_OF_GAP * float(np.median(gaps)))
    return max(LATE_FLOOR_S, min(limits))


def late_limit_for(slo: Slo) -> float:
    """How late the client may be (p99) where targets are what counts: the same for all that is held to them.
    LATE_FLOOR_S, or more where that is still little beside the shortest TTFT target and the TPOT target."""
    limits = [
        share * target_s
        for share, target_s in ((LATE_SHARE_OF_TTFT, slo.ttft_for(1)), (LATE_SHARE_OF_GAP, slo.tpot_s))
        if target_s is not None
    ]
    return max(LATE_FLOOR_S, min(limits, default=LATE_FLOOR_S))


def refuse_if_bottleneck(health: ClientHealth, records: Sequence[Record], limit_s: float | None = None) -> None:
    """Raises BottleneckError with what to do. `limit_s` None: by what was measured."""
    limit_s = late_limit_s(records) if limit_s is None else limit_s
    faults = health.faults(limit_s)
    if faults:
        raise BottleneckError(
            f"the client was the bottleneck, so its figures are not reported: {'; '.join(faults)}; at most "
            f"{limit_s * 1e3:.1f} ms is allowed here. Give it a core of its own (taskset), or lower the rate"
        )


class Monitor:
    """Watches the event loop it runs in, between `start` and `stop`.

    Its looks are due at instants that don't wait for one another, one in each LOOK_EVERY_S: a stall counts for every
    look that fell into it, by what was left of it then, so that quantiles are over time and not over wakings. Within
    their periods the instants move (by the golden ratio), so that no load's rhythm can keep step with them. One that
    was never started has nothing to find fault with.
    """

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._begin_s = 0.0
        self._wall_s = self._cpu_s = self._loop_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._wall_s, self._cpu_s, self._loop_s = time.monotonic(), _cpu_s(), time.thread_time()
        loop = asyncio.get_running_loop()
        self._begin_s = loop.time()
        self._task = loop.create_task(self._watch())

    async def stop(self) -> None:
        assert self._task is not None, "start comes first"
        self._look(asyncio.get_running_loop().time())
        self._task.cancel()
        await asyncio.wait([self._task])
        self._wall_s = time.monotonic() - self._wall_s
        self._cpu_s, self._loop_s = _cpu_s() - self._cpu_s, time.thread_time() - self._loop_s

    def health(self, lateness_s: Sequence[float], responses: int) -> ClientHealth:
        late, lags = list(lateness_s) or [0.0], self._lags_s or [0.0]
        late_p50, late_p99 = (float(one) for one in np.percentile(late, (50, 99)))
        wall_s = max(self._wall_s, 1e-9)
        return ClientHealth(
            late_p50_s=late_p50,
            late_p99_s=late_p99,
            late_largest_s=max(late),
            lag_p99_s=float(np.percentile(lags, 99)),
            lag_largest_s=max(lags),
            cpu_share=self._cpu_s / wall_s,
            loop_cpu_share=self._loop_s / wall_s,
            wall_s=wall_s,
            responses=responses,
        )

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._due_s() - loop.time()))
            self._look(loop.time())

    def _due_s(self) -> float:
        """When the next look is due."""
        number = len(self._lags_s)
        return self._begin_s + (number + number * _GOLDEN % 1.0) * LOOK_EVERY_S

    def _look(self, now_s: float) -> None:
        """All looks that are due by now."""
        while (due_s := self._due_s()) <= now_s:
            self._lags_s.append(now_s - due_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
