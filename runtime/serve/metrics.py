"""Custom metrics of `pd` on Triton's metrics port.

Every change of a Triton metric is a message to the server, so the driver counts in plain Python and a thread
of its own passes the sums on.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from trtpd.runtime.serve.timeline import TimelineReport

log = logging.getLogger(__name__)

FLUSH_S = 0.5
TTFT_BUCKETS_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
TPOT_BUCKETS_S = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.5, 1.0]

COUNTERS = {
    "trtpd_requests_total": "Requests by how they ended",
    "trtpd_requests_judged_total": "Requests with targets, by whether they finished inside them (goodput)",
    "trtpd_prompt_tokens_total": "Prompt tokens of requests that ended",
    "trtpd_cached_tokens_total": "Prompt tokens whose KV was found in a prefix cache",
    "trtpd_output_tokens_total": "Tokens handed to clients",
    "trtpd_preemptions_total": "Answers that gave their KV blocks to others and were computed anew",
    "trtpd_retries_total": "Placements given up and tried again",
    "trtpd_transfer_bytes_total": "KV bytes moved from prefill to decode",
    "trtpd_transfer_seconds_total": "Time spent copying KV",
    "trtpd_transfer_exposed_seconds_total": "Time clients waited for KV after its prefill was done, turns included",
    "trtpd_placements_total": "Requests placed, by why there: pair, mixed, local, or the reason of a fallback",
    "trtpd_shed_total": "Requests refused for lack of capacity, by reason",
    "trtpd_moves_total": "Sessions moved from one decode instance to another, by reason",
    "trtpd_role_switches_total": "Instances that were to take the other role, by that role and outcome",
    "trtpd_ladder_changes_total": "Moves of the degradation ladder, by new rung and reason",
    "trtpd_data_plane_visits_total": "Connections to KV ports that were not served: strangers, stalled, refused",
}
VISITS = ("strangers", "stalled", "refused")
HISTOGRAMS = {
    "trtpd_ttft_seconds": ("Arrival to first token", TTFT_BUCKETS_S),
    "trtpd_tpot_seconds": ("Mean gap between the tokens of a request", TPOT_BUCKETS_S),
}
GAUGES = {
    "trtpd_requests_in_flight": "Requests admitted and not ended",
    "trtpd_requests_queued": "Requests waiting for a place",
    "trtpd_instance_up": "1 while the instance is registered",
    "trtpd_kv_blocks_free": "Free KV blocks of an instance",
    "trtpd_kv_blocks_cached": "KV blocks of an instance that hold beginnings of prompts for others to share",
    "trtpd_instance_running": "Sequences in an instance's batch",
    "trtpd_instance_slowness": "Step times of an instance by what is predicted of them",
    "trtpd_instance_quarantined": "1 while the instance gets no work because it was lost again and again",
    "trtpd_role_instances": "Registered instances by the role they have now",
    "trtpd_role_switching": "Instances on their way into another role",
    "trtpd_ladder_rung": "Rung of the degradation ladder, 0 (normal) to 4 (refuse)",
    "trtpd_pressure": "How near the deployment is to missing its targets; 1 is the point at which it does",
    "trtpd_oldest_queued_seconds": "How long the longest waiting request has waited",
}

SNAPSHOT_COUNTERS = (
    ("placed", "trtpd_placements_total", "reason"),
    ("shed", "trtpd_shed_total", "reason"),
    ("moves", "trtpd_moves_total", "reason"),
    ("rungs", "trtpd_ladder_changes_total", "change"),
)
"""(part of the router's snapshot, metric, label)."""

Labels = tuple[tuple[str, str], ...]


class Backend(Protocol):
    """Where sums go: Triton, or a recorder in tests."""

    def add(self, name: str, labels: Labels, value: float) -> None: ...

    def observe(self, name: str, labels: Labels, value: float) -> None: ...

    def set(self, name: str, labels: Labels, value: float) -> None: ...


def _within(measured_ms: float | None, target_s: float | None) -> bool:
    """True also where there is no target, or nothing to measure (an answer of one token has no TPOT)."""
    return target_s is None or measured_ms is None or measured_ms <= target_s * 1e3


class Metrics:
    """Counts for one model. `count`, `ended`, `gauge` are cheap and thread-safe; `flush` talks to Triton."""

    def __init__(self, backend: Backend, model: str) -> None:
        self._backend = backend
        self._model = model
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._observed: list[tuple[str, Labels, float]] = []
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._sent_gauges: dict[tuple[str, Labels], float] = {}
        self._visits: dict[tuple[str, str], tuple[str, int]] = {}
        self._former: dict[tuple[str, str], int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Passes on what is left. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        with self._lock:
            self._counts[(name, self._labels(labels))] += value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._gauges[(name, self._labels(labels))] = value

    def gauges(self, router: Mapping[str, Any], *, up: Collection[str]) -> None:
        """What the router's snapshot says now; `up` are the instances that are registered."""
        self.gauge("trtpd_requests_in_flight", sum(router["requests"].values()))
        self.gauge("trtpd_requests_queued", router["queued"])
        self.gauge("trtpd_ladder_rung", router["ladder"]["rung"])
        self.gauge("trtpd_pressure", router["ladder"]["pressure"])
        self.gauge("trtpd_oldest_queued_seconds", max((view["oldest_s"] for view in router["queues"]), default=0.0))
        for key, name, label in SNAPSHOT_COUNTERS:
            for reason, number in router[key].items():
                self._grown(name, label, reason, number)
        for view in router["instances"]:
            name = view["name"]
            self.gauge("trtpd_instance_up", float(name in up), instance=name)
            self.gauge("trtpd_kv_blocks_free", view["kv_blocks_free"], instance=name)
            self.gauge("trtpd_kv_blocks_cached", view["kv_blocks_cached"], instance=name)
            self.gauge("trtpd_instance_running", view["running"], instance=name)
            self.gauge("trtpd_instance_slowness", round(view["slowness"], 2), instance=name)
            self.gauge("trtpd_instance_quarantined", float(view["quarantined_for_s"] > 0.0), instance=name)
            for kind in VISITS:
                self._count_up(view[kind], view["generation"], instance=name, kind=kind)

    def _count_up(self, total: int, generation: str, *, instance: str, kind: str) -> None:
        """What an instance counts itself, from 0 in every generation."""
        known, counted = self._visits.get((instance, kind), (generation, 0))
        if known != generation:
            counted = 0
        self._visits[instance, kind] = (generation, total)
        if total > counted:
            self.count("trtpd_data_plane_visits_total", total - counted, instance=instance, kind=kind)

    def roles(self, up: Mapping[str, int], *, switching: int) -> None:
        """How many registered instances have each role, and how many are on their way into another."""
        for role in ("prefill", "decode", "mixed"):
            self.gauge("trtpd_role_instances", up.get(role, 0), role=role)
        self.gauge("trtpd_role_switching", switching)

    def _grown(self, name: str, label: str, reason: str, number: int) -> None:
        """Counts what a counter of the router has grown by since the last snapshot."""
        more = number - self._former.get((name, reason), 0)
        if more > 0:
            self._former[(name, reason)] = number
            self.count(name, more, **{label: reason})

    def ended(
        self, timeline: TimelineReport, *, state: str, reason: str, ttft_s: float | None, tpot_s: float | None
    ) -> None:
        """A request reached its end. `ttft_s` and `tpot_s` are its targets; with one, it is judged by them."""
        self.count("trtpd_requests_total", state=state, reason=reason)
        if ttft_s is not None or tpot_s is not None:
            inside = state == "finished" and _within(timeline.ttft_ms, ttft_s) and _within(timeline.tpot_ms, tpot_s)
            self.count("trtpd_requests_judged_total", inside=str(inside).lower())
        self.count("trtpd_prompt_tokens_total", timeline.prompt_tokens)
        self.count("trtpd_cached_tokens_total", timeline.cached_tokens)
        self.count("trtpd_output_tokens_total", timeline.output_tokens)
        if timeline.preemptions:
            self.count("trtpd_preemptions_total", timeline.preemptions)
        if timeline.retries:
            self.count("trtpd_retries_total", timeline.retries)
        if timeline.transfer is not None:
            self.count("trtpd_transfer_bytes_total", timeline.transfer.bytes)
            self.count("trtpd_transfer_seconds_total", timeline.transfer.ms / 1e3)
            self.count("trtpd_transfer_exposed_seconds_total", timeline.transfer.exposed_ms / 1e3)
        with self._lock:
            for name, value_ms in (
                ("trtpd_ttft_seconds", timeline.ttft_ms),
                ("trtpd_tpot_seconds", timeline.tpot_ms),
            ):
                if value_ms is not None:
                    self._observed.append((name, self._labels({}), value_ms / 1e3))

    def flush(self) -> None:
        """Passes on everything counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
            observed, self._observed = self._observed, []
            gauges = {k: v for k, v in self._gauges.items() if self._sent_gauges.get(k) != v}
            self._sent_gauges |= gauges
        for (name, labels), value in counts.items():
            self._backend.add(name, labels, value)
        for name, labels, value in observed:
            self._backend.observe(name, labels, value)
        for (name, labels), value in gauges.items():
            self._backend.set(name, labels, value)

    def _labels(self, labels: dict[str, str]) -> Labels:
        return (("model", self._model), *sorted(labels.items()))

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(FLUSH_S)
            try:
                self.flush()
            except Exception:  # metrics must not take the router down
                log.exception("metrics could not be passed to Triton")


class TritonMetrics:
    """Backend over `pb_utils` (typed Any: it exists only inside a Triton stub)."""

    def __init__(self, pb_utils: Any) -> None:
        kinds = pb_utils.MetricFamily
        self._buckets = {name: buckets for name, (_, buckets) in HISTOGRAMS.items()}
        self._families = {
            name: kinds(name=name, description=text, kind=kind)
            for table, kind in (
                (COUNTERS, kinds.COUNTER),
                (GAUGES, kinds.GAUGE),
                ({name: text for name, (text, _) in HISTOGRAMS.items()}, kinds.HISTOGRAM),
            )
            for name, text in table.items()
        }
        self._metrics: dict[tuple[str, Labels], Any] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        self._metric(name, labels).increment(value)

    def observe(self, name: str, labels: Labels, value: float) -> None:
        self._metric(name, labels).observe(value)

    def set(self, name: str, labels: Labels, value: float) -> None:
        self._metric(name, labels).set(value)

    def _metric(self, name: str, labels: Labels) -> Any:
        metric = self._metrics.get((name, labels))
        if metric is None:
            family, options = self._families[name], {"labels": dict(labels)}
            buckets = self._buckets.get(name)
            metric = family.Metric(**options, buckets=buckets) if buckets else family.Metric(**options)
            self._metrics[(name, labels)] = metric
        return metric
