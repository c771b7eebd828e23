"""A soak's load finds what is wrong, its watch sees what is held, and its verdict is the worst of all."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from trtpd_testing.fake_servers import fake_triton, fixed

from trtpd.errors import InputError
from trtpd.perf import soak
from trtpd.perf.environment import this_environment
from trtpd.perf.soak_load import Mix, Seen, SoakLoad
from trtpd.perf.soak_report import Pause, Report, growth_table, judge, verdict_of, write
from trtpd.perf.soak_watch import Processes, Sample, held, read_samples, shared_memory
from trtpd.perf.triton_transport import TritonTransport

MIX = Mix(prompt=(4, 8), output=(5, 5), known=4, repeated=0.5, prefixes=2, prefix_tokens=4, cancelled=0.0)


def loaded(address: str, mix: Mix = MIX, *, seconds: float = 0.5) -> Seen:
    async def run() -> Seen:
        transport = TritonTransport(address)
        await transport.open()
        try:
            load = SoakLoad(transport, mix, seed=1)
            await load.learn()
            await load.drive(80.0, seconds, asyncio.Event())
            return load.seen
        finally:
            await transport.close()

    return asyncio.run(run())


def test_right_answers_are_served_and_those_to_known_prompts_compared() -> None:
    with fake_triton(fixed(0.0, 0.001, 5)) as server:
        seen = loaded(server.address)
    assert set(seen.outcomes) == {"served"}
    assert seen.requests > 10
    assert 0 < seen.checked < seen.requests
    assert seen.tokens == 5 * seen.requests


def test_other_tokens_than_on_the_idle_server_are_wrong() -> None:
    learned = MIX.known
    with fake_triton(fixed(0.0, 0.001, 5), token_at=lambda number, index: index + (number >= learned)) as server:
        seen = loaded(server.address)
    assert seen.wrong == {"wrong tokens": seen.checked}
    assert seen.faults[0].startswith("wrong tokens: [1, 2, 3, 4, 5] is not the beginning of [0, 1, 2, 3, 4]")


def test_missing_tokens_and_errors_are_wrong() -> None:
    errors = {number: "code=transfer_failed gone" for number in range(4, 8)}
    short = lambda number, now_s: [0.001] * (5 if number < 12 else 3)  # noqa: E731
    with fake_triton(short, errors=errors) as server:
        seen = loaded(server.address)
    assert seen.wrong["failed:transfer_failed"] == 4
    assert seen.wrong["wrong count"] > 0


def test_cancelled_requests_have_left_and_are_cancelled_at_the_server() -> None:
    with fake_triton(fixed(0.0, 0.2, 5)) as server:
        seen = loaded(server.address, replace(MIX, cancelled=1.0, longest_s=0.3))
    assert set(seen.outcomes) == {"left"}
    assert 0 < server.cancelled <= seen.outcomes["left"]


def test_a_process_that_comes_or_goes_is_told() -> None:
    processes = Processes(psutil.Process())
    assert {"rss_bytes", "private_bytes", "fds", "threads"} <= {
        what for who, what in processes.look() if who == "client"
    }
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    try:
        assert ("client", "cpu_cores") in processes.look()
    finally:
        child.communicate("\n")
    processes.look()
    assert [change.split("(pid")[1] for change in processes.changes] == [f" {child.pid}) began", f" {child.pid}) ended"]


def test_shared_memory_is_counted_by_who_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtpd.perf.soak_watch.SHM_DIR", tmp_path)
    (tmp_path / f"trtpd-pool.{os.getpid()}.77.0badcafe").write_bytes(bytes(100))
    (tmp_path / "trtpd-mpi.1234567.77.x").mkdir()
    (tmp_path / "trtpd-mpi.1234567.77.x" / "board").write_bytes(bytes(7))
    (tmp_path / f"other.{os.getpid()}.77.0badcafe").write_bytes(bytes(1000))
    assert shared_memory({os.getpid()}) == {("deployment", "shm_files"): 1.0, ("deployment", "shm_bytes"): 100.0}
    assert shared_memory({1234567})["deployment", "shm_files"] == 2.0
    assert shared_memory({77, 8812, 4242})["deployment", "shm_files"] == 0.0


def test_an_idle_server_that_holds_something_is_told_by_name() -> None:
    instance = {"running": 0, "waiting": 0, "requests": 1, "kv_blocks_held": 0, "kv_blocks_cached": 9}
    found = {
        "requests_in_flight": 0,
        "queued": 0,
        "undelivered": 0,
        "instances": {"decode_0": instance | {"kv_blocks": 64, "kv_blocks_free": 62}},
    }
    assert held(found) == {"decode_0 requests": 1, "decode_0 kv_blocks_used": 2}


def samples(mib_per_hour: float) -> list[Sample]:
    return [
        Sample(
            at_s=float(at_s),
            values={
                ("router", "rss_bytes"): (100.0 + mib_per_hour * at_s / 3600.0) * 2**20 + (at_s < 600) * 5e8,
                ("router", "fds"): 40.0,
                ("router", "cpu_cores"): at_s / 100.0,
            },
        )
        for at_s in range(0, 3600, 10)
    ]


def report_of(seen: list[Sample], warm_up_s: float) -> Report:
    found = judge(seen, warm_up_s)
    return Report(
        environment=this_environment(),
        seconds=3600.0,
        warm_up_s=warm_up_s,
        interrupted=False,
        capacity_per_s=10.0,
        rate_per_s=7.0,
        requests=25000,
        outcomes={"served": 24000, "left": 1000},
        tokens=600000,
        checked=12000,
        faults=[],
        pauses=[Pause(at_s=600.0, held={})],
        processes_changed=[],
        status_misses=0,
        growth=found,
        verdict=verdict_of(found, faults=[], pauses=[], changes=[]),
    )


@pytest.mark.parametrize(("mib_per_hour", "verdict"), [(0.0, "flat"), (0.5, "flat"), (7.0, "grows")])
def test_the_verdict_is_about_what_grows_after_the_warm_up(mib_per_hour: float, verdict: str, tmp_path: Path) -> None:
    found = judge(samples(mib_per_hour), 600.0)
    assert {(one.what, one.judged) for one in found} == {("rss_bytes", True), ("fds", True), ("cpu_cores", False)}
    assert verdict_of(found, faults=[], pauses=[], changes=[]) == verdict
    report = report_of(samples(mib_per_hour), 600.0)
    write(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == verdict
    assert len((tmp_path / "growth.csv").read_text().splitlines()) == 1 + len(found)
    assert growth_table(report)[0] == f"verdict: {verdict}"
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == report


def test_a_former_soak_is_judged_again_with_another_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = [replace(one, values={("router", "rss_bytes"): 1e8 + 1e4 * min(one.at_s, 1500.0)}) for one in samples(0.0)]
    write(report_of(filled, 600.0), tmp_path)
    with (tmp_path / "samples.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("at_s", "who", "what", "value"))
        rows.writerows((one.at_s, *column, value) for one in filled for column, value in one.values.items())
    again = ["--again", "--output", str(tmp_path), "--warm-up"]
    assert soak.main([*again, "10"]) == 1
    assert soak.main([*again, "25"]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["warm_up_s"] == 1500.0
    assert soak.main([*again, "90"]) == InputError.exit_code
    assert soak.main(["--again", "--output", str(tmp_path / "absent")]) == InputError.exit_code
    assert "give the folder of a former one" in capsys.readouterr().err


def test_the_worst_is_the_verdict() -> None:
    grown = judge(samples(7.0), 600.0)
    idle, holding = Pause(at_s=1.0, held={}), Pause(at_s=2.0, held={"queued": 1})
    assert verdict_of(grown, faults=["lost"], pauses=[holding], changes=["began"]) == "wrong"
    assert verdict_of(grown, faults=[], pauses=[idle, holding], changes=["began"]) == "held"
    assert verdict_of(grown, faults=[], pauses=[idle], changes=["began"]) == "processes changed"
    assert verdict_of(judge(samples(0.0)[:5], 0.0), faults=[], pauses=[idle], changes=[]) == "too short"


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.parse(["--minutes", "5", "--warm-up", "5"])
    assert "less than --minutes" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.slow
def test_a_short_soak_through_real_triton_is_right_and_lets_go_of_everything(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "CALIBRATION_S", 10.0)
    monkeypatch.setattr(soak, "MIX", replace(soak.MIX, known=8))
    soak.main(
        ["--minutes", "0.5", "--warm-up", "0", "--every", "1", "--output", str(tmp_path), "--model", str(smollm2)]
    )
    found = json.loads((tmp_path / "report.json").read_text())
    assert set(found["outcomes"]) <= {"served", "left"}
    assert found["checked"] > 0
    assert [pause["held"] for pause in found["pauses"]] == [{}, {}, {}]
    assert found["processes_changed"] == []
    names = {one["who"] for one in found["growth"]}
    assert {"client", "router", "Triton", "launcher", "prefill_1", "decode_0 rank 1", "mpirun of decode_1"} <= names
    assert len(read_samples(tmp_path / "samples.csv")) >= 20
