"""Many slow streams: what is asked, what is made of it, and a small one through real Triton."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtpd.perf import many_streams
from trtpd.perf.client import Run
from trtpd.perf.client_health import ClientHealth
from trtpd.perf.records import FORMAT, Record, RunInfo

HEALTH = ClientHealth(
    late_p50_s=0.001,
    late_p99_s=0.004,
    late_largest_s=0.02,
    lag_p99_s=0.005,
    lag_largest_s=0.03,
    cpu_share=0.25,
    loop_cpu_share=0.2,
    wall_s=40.0,
    responses=1000,
)


def record(number: int, sent_s: float, ended_s: float) -> Record:
    return Record(
        number=number,
        kind="stream",
        scheduled_s=sent_s,
        sent_s=sent_s,
        ended_s=ended_s,
        prompt_tokens=16,
        max_tokens=3,
        state="finished",
        reason="length",
        at_s=(sent_s + 0.5, sent_s + 1.5, sent_s + 2.5),
        tokens=(1, 1, 1),
    )


def test_all_streams_open_within_the_opening_each_with_its_own_prompt() -> None:
    asks = many_streams.workload(500).asks
    assert len({ask.segments for ask in asks}) == len(asks) == 500
    assert 0.0 == asks[0].at_s < asks[-1].at_s < many_streams.OPENING_S
    assert many_streams.OPENING_S < many_streams.TOKENS * many_streams.STEP_S


def test_the_figures_are_those_of_the_run() -> None:
    records = (record(0, 1.0, 4.0), record(1, 2.0, 5.0), record(2, 4.5, 8.0))
    info = RunInfo(trtpd_records=FORMAT, workload="x", seed=0, open_loop=True, offered_until_s=4.5, interrupted=False)
    run = Run(info=info, records=records, health=HEALTH)
    found = many_streams.found_of(run, {"router": 10.0, "launcher": 0.004}, 3)
    assert (found.most_at_once, found.ended, found.tpot_p50_ms) == (2, {"finished:length": 3}, 1000.0)
    assert found.cores == {"client": 0.25, "router": 0.25}
    assert (found.late_p99_ms, found.lag_p99_ms, found.limit_ms) == (4.0, 5.0, 25.0)
    assert (found.responses_per_s, found.client_us_per_response) == (25.0, 10000.0)


@pytest.mark.e2e
@pytest.mark.slow
def test_streams_through_real_triton_are_all_open_at_once(capsys: pytest.CaptureFixture[str], smollm2: Path) -> None:
    assert many_streams.main(["--json", "--streams", "100", "--decodes", "2", "--model", str(smollm2)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ended"] == {"finished:length": 100}
    assert found["most_at_once"] == 100
    assert found["tpot_p50_ms"] >= 1000.0
    assert {"client", "router", "Triton"} <= found["cores"].keys()
