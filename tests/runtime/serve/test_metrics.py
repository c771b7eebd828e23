from __future__ import annotations

from collections import defaultdict

import pytest

from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.events import Arrived
from trtpd.runtime.core.lifecycle import AttemptRecord, Instant, Timeline
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.serve.metrics import Metrics
from trtpd.runtime.serve.timeline import report


class Recorder:
    """Sums like Triton's metrics, by name and labels behind the model's."""

    def __init__(self) -> None:
        self.sums: defaultdict = defaultdict(float)
        self.observed: defaultdict = defaultdict(list)
        self.gauges: dict = {}
        self.sets = 0

    def add(self, name, labels, value):
        assert value >= 0, "a counter never falls"
        self.sums[(name, *labels[1:])] += value

    def observe(self, name, labels, value):
        self.observed[name].append(value)

    def set(self, name, labels, value):
        self.gauges[(name, *labels[1:])] = value
        self.sets += 1


def timeline():
    attempt = AttemptRecord(
        number=1, kind="pair", prefill="p", decode="d", why="", bytes_moved=100, transfer_s=2.0, exposed_s=1.0
    )
    at = {Instant.ARRIVED: 0.0, Instant.FIRST_TOKEN: 0.5, Instant.LAST_TOKEN: 1.5}
    record = Timeline(request_id=1, prompt_tokens=7, output_tokens=3, instants=at, attempts=[attempt, attempt])
    return report(record, finish="stop", second_token_s=1.0)


def test_an_ended_request_is_counted_once_in_every_family():
    recorder = Recorder()
    metrics = Metrics(recorder, "m")
    metrics.ended(timeline(), state="finished", reason="stop", ttft_s=None, tpot_s=None)
    metrics.flush()
    metrics.flush()
    assert recorder.sums["trtpd_requests_total", ("reason", "stop"), ("state", "finished")] == 1
    assert recorder.sums["trtpd_output_tokens_total",] == 3
    assert recorder.sums["trtpd_transfer_bytes_total",] == 100
    assert recorder.sums["trtpd_retries_total",] == 1
    assert recorder.observed == {"trtpd_ttft_seconds": [0.5], "trtpd_tpot_seconds": [0.5]}
    assert not [key for key in recorder.sums if key[0] == "trtpd_requests_judged_total"]


@pytest.mark.parametrize(
    ("state", "ttft_s", "tpot_s", "inside"),
    [
        ("finished", 0.6, 0.6, "true"),
        ("finished", 0.4, None, "false"),
        ("finished", None, 0.4, "false"),
        ("finished", 0.6, None, "true"),
        ("failed", 0.6, 0.6, "false"),
    ],
)
def test_goodput_counts_finished_requests_inside_all_their_targets(state, ttft_s, tpot_s, inside):
    recorder = Recorder()
    metrics = Metrics(recorder, "m")
    metrics.ended(timeline(), state=state, reason="stop", ttft_s=ttft_s, tpot_s=tpot_s)
    metrics.flush()
    judged = {key: value for key, value in recorder.sums.items() if key[0] == "trtpd_requests_judged_total"}
    assert judged == {("trtpd_requests_judged_total", ("inside", inside)): 1}


def test_strangers_at_a_data_port_are_counted_across_restarts_of_the_instance():
    recorder, core = Recorder(), RouterCore()
    metrics = Metrics(recorder, "m")
    core.handle(1.0, WorkerSpec(name="a", role="mixed").hello("1"))
    (view,) = core.snapshot()["instances"]
    for generation, strangers in (("1", 0), ("1", 2), ("1", 2), ("2", 1), ("2", 4)):
        now = view | {"generation": generation, "strangers": strangers}
        metrics.gauges(core.snapshot() | {"instances": [now]}, up=["a"])
    metrics.flush()
    assert [value for key, value in recorder.sums.items() if key[0] == "trtpd_data_plane_visits_total"] == [6]


def test_a_gauge_goes_out_only_when_it_changed():
    recorder = Recorder()
    metrics = Metrics(recorder, "m")
    core = RouterCore()
    core.handle(1.0, WorkerSpec(name="a", role="mixed").hello("1"))
    for _ in range(3):
        metrics.gauges(core.snapshot() | {"requests": {"decoding": 2}}, up=["a"])
        metrics.flush()
    assert recorder.gauges["trtpd_requests_in_flight",] == 2
    assert recorder.gauges["trtpd_instance_up", ("instance", "a")] == 1
    assert recorder.sets == len(recorder.gauges)


def test_what_the_router_counts_goes_out_once_as_it_grows():
    recorder = Recorder()
    metrics = Metrics(recorder, "m")
    core = RouterCore()
    core.handle(1.0, WorkerSpec(name="a", role="mixed").hello("1"))
    for request_id in range(3):
        core.handle(1.0, Arrived(request_id=request_id, prompt_tokens=8, max_tokens=8, deadline_s=9.0))
        metrics.gauges(core.snapshot(), up=["a"])
        metrics.gauges(core.snapshot(), up=["a"])
    metrics.flush()
    assert recorder.sums["trtpd_placements_total", ("reason", "mixed")] == 3
