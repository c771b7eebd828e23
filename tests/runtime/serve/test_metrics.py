from __future__ import annotations

from collections import defaultdict

import pytest

from trtpd.runtime.core.lifecycle import AttemptRecord, Instant, Timeline
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


def view_of(**changes):
    view = {"name": "a", "generation": "g1", "kv_blocks_free": 5, "running": 1}
    return view | {"strangers": 0, "stalled": 0, "refused": 0} | changes


def test_strangers_at_a_data_port_are_counted_across_restarts_of_the_instance():
    recorder = Recorder()
    metrics = Metrics(recorder, "m")
    lives = (("g1", 0), ("g1", 2), ("g1", 2), ("g2", 1), ("g2", 4))
    for generation, strangers in lives:
        view = view_of(generation=generation, strangers=strangers)
        metrics.gauges({"requests": {}, "queued": 0, "instances": [view]}, up=["a"])
    metrics.flush()
    assert [value for key, value in recorder.sums.items() if key[0] == "trtpd_data_plane_visits_total"] == [6]


def test_a_gauge_goes_out_only_when_it_changed():
    recorder = Recorder()
    metrics = Metrics(recorder, "m")
    view = view_of()
    for _ in range(3):
        metrics.gauges({"requests": {"decoding": 2}, "queued": 0, "instances": [view]}, up=["a"])
        metrics.flush()
    assert recorder.gauges["trtpd_requests_in_flight",] == 2
    assert recorder.gauges["trtpd_instance_up", ("instance", "a")] == 1
    assert recorder.sets == len(recorder.gauges)
