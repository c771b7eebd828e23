"""`trtpd perf-analyzer` with a stand-in for the tool, and our client against a real gRPC server."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.fake_servers import fake_triton, fixed

from trtpd.errors import InputError, ServeError
from trtpd.perf import analyze as room
from trtpd.perf.analyze import AnalyzeOptions, analyze
from trtpd.perf.analyze_report import AnalyzeResult, table
from trtpd.perf.bench import drive
from trtpd.perf.client_health import BottleneckError
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.perf_analyzer import Load
from trtpd.perf.workload import save

TOOL = """#!{python}
import json, pathlib, sys
args = sys.argv[1:]
if "--version" in args:
    sys.exit(0)
value = lambda name: args[args.index(name) + 1]
asked = json.loads(pathlib.Path(value("--input-data")).read_text())["data"]
with open({log!r}, "a") as log:
    log.write(json.dumps([len(asked), args]) + "\\n")
requests = [
    {{"timestamp": n * 10**9, "response_timestamps": [n * 10**9 + ms * 10**6 for ms in (20, 30, 40)]}}
    for n in range(int(value("--request-count")))
]
pathlib.Path(value("--profile-export-file")).write_text(json.dumps({{"experiments": [{{"requests": requests}}]}}))
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives where it notes how many requests it was given, and its arguments."""
    script, log = tmp_path / "tool", tmp_path / "tool.log"
    script.write_text(TOOL.format(python=sys.executable, log=str(log)))
    script.chmod(0o755)
    monkeypatch.setenv("TRTPD_PERF_ANALYZER", str(script))
    monkeypatch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)
    return log


def silent(stage: str, done: int, total: int) -> None:
    """Says nothing."""


def options(url: str, folder: Path, *loads: Load, **more: Any) -> AnalyzeOptions:
    wanted = more.pop("wanted", Wanted(name="chat", requests=12))
    return AnalyzeOptions(
        url=url,
        model="decode_0",
        wanted=wanted,
        loads=loads or (Load(concurrency=2),),
        folder=folder,
        repeats=1,
        **more,
    )


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return found


def of_load(result: AnalyzeResult) -> list[tuple[str, int, int]]:
    return [(one.load, one.theirs.requests, one.ours.requests) for one in result.loads]


@pytest.mark.parametrize("name", ["saved", "trace:mooncake"])
def test_both_instruments_ask_all_requests_of_a_saved_workload_or_a_trace_at_the_load(name, tool, tmp_path):
    wanted = Wanted(name="trace:mooncake", requests=15)
    if name == "saved":
        save(make(Wanted(name="agent", requests=15, rate=0.001)), tmp_path / "s.jsonl")
        wanted = Wanted(name=str(tmp_path / "s.jsonl"), requests=60)
    with fake_triton(fixed(0.005, 0.002, 3)) as server:
        result = analyze(
            options(server.address, tmp_path / "out", Load(concurrency=4), Load(rate=100.0), wanted=wanted),
            progress=silent,
        )
        assert len(server.bodies) == 30
        came_s = [server.came_s[number] for number in sorted(server.came_s)][15:]
    assert of_load(result) == [("concurrency 4", 11, 11), ("100 requests/s", 15, 15)]
    assert came_s[-1] - came_s[0] < 1.0, "not the instants of the file"
    given = [json.loads(line) for line in tool.read_text().splitlines()]
    assert [count for count, _ in given] == [15, 15]
    assert all(args[args.index("--request-count") + 1] == "15" for _, args in given)


def test_figures_lie_in_the_folder_as_json_csv_and_a_page(tool, tmp_path):
    with fake_triton(fixed(0.005, 0.002, 3)) as server:
        result = analyze(options(server.address, tmp_path / "out", command="trtpd perf-analyzer"), progress=silent)
    assert result.complete
    assert summary(tmp_path / "out")["complete"]
    with (tmp_path / "out" / "loads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["load"], row["instrument"], row["requests"]) for row in rows] == [
        ("concurrency 2", "perf_analyzer", "10"),
        ("concurrency 2", "trtpd", "10"),
    ]
    assert [row["ttft_ratio_low"] == "" for row in rows] == [True, False]
    assert [row["agree"] for row in rows] == ["", "not shown"]
    assert result.remarks[-1].startswith(
        "concurrency 2: whether both agree within 10% is not shown with 10 requests in one run of each"
    )
    assert table(result).rows[0][11] == "not shown with 10 requests"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "concurrency 2" in page
    assert "not shown with 10 requests" in page
    assert "http" not in page


def test_a_ratio_that_is_not_shown_is_said_with_its_bounds(tool, tmp_path):
    with fake_triton(lambda number, now_s: [0.02 + 0.002 * (number % 7), 0.03, 0.04]) as server:
        result = analyze(replace(options(server.address, tmp_path / "out"), repeats=2), progress=silent)
    (one,) = result.loads
    assert (one.turns, one.pairs) == (2, 20)
    ratios = summary(tmp_path / "out")["loads"][0]
    assert ratios["ttft_ratio"]["low"] <= ratios["ttft_ratio"]["value"] <= ratios["ttft_ratio"]["high"]
    assert one.agree == ratios["agree"]
    assert table(result).rows[0][3].startswith(f"{one.ttft_ratio.value:.3f} (")


def test_our_failures_are_shown_and_nothing_is_said_to_agree(tool, tmp_path):
    with fake_triton(fixed(0.02, 0.01, 3), errors={3: "code=transfer_failed gone", 5: "boom"}) as server:
        result = analyze(options(server.address, tmp_path / "out"), progress=silent)
    (one,) = result.loads
    assert one.ours.unfinished == {"failed:transfer_failed": 1, "failed:server_error": 1}
    assert one.agree == "not compared"
    assert "2 of our requests did not finish" in result.remarks[0]
    assert table(result).rows[0][-2:] == ("0", "2")
    assert summary(tmp_path / "out")["remarks"] == list(result.remarks)


def test_an_error_at_the_second_load_leaves_the_first_ones_figures(tool, tmp_path):
    errors = {number: "boom" for number in range(12, 24)}
    with fake_triton(fixed(0.005, 0.002, 3), errors=errors) as server:
        asked = options(server.address, tmp_path / "out", Load(concurrency=2), Load(concurrency=3))
        with pytest.raises(ServeError, match=r"none of our requests.*boom; what was measured until then is in"):
            analyze(asked, progress=silent)
    found = summary(tmp_path / "out")
    assert [one["load"] for one in found["loads"]] == ["concurrency 2", "concurrency 3"]
    assert found["loads"][0]["ours"]["requests"] == 10
    assert found["loads"][1]["ours"]["requests"] == 0
    assert not found["complete"]
    assert "none of our requests" in found["stopped"]


def test_a_client_that_was_the_bottleneck_is_refused_as_bench_does(tool, tmp_path, monkeypatch):
    def slow(health: object, records: object) -> None:
        raise BottleneckError("the client was the bottleneck")

    monkeypatch.setattr(room, "refuse_if_bottleneck", slow)
    with fake_triton(fixed(0.005, 0.002, 3)) as server, pytest.raises(BottleneckError):
        analyze(options(server.address, tmp_path / "out"), progress=silent)
    assert summary(tmp_path / "out")["loads"][0]["ours"]["requests"] == 0


def test_an_interrupted_run_is_left_out_and_said(tool, tmp_path, monkeypatch):
    def cut_short(options, workload, progress):
        run, cpu_s = drive(options, workload, progress)
        info = msgspec.structs.replace(run.info, interrupted=workload.concurrency == 2)
        return replace(run, info=info, records=run.records[:3] if info.interrupted else run.records), cpu_s

    monkeypatch.setattr(room, "drive", cut_short)
    loads = (Load(concurrency=3), Load(concurrency=2), Load(concurrency=1))
    with fake_triton(fixed(0.005, 0.002, 3)) as server:
        result = analyze(options(server.address, tmp_path / "out", *loads), progress=silent)
    assert of_load(result) == [("concurrency 3", 9, 9), ("concurrency 2", 10, 0)]
    assert (result.stopped, result.complete) == ("interrupted", False)
    assert result.remarks[0].startswith("Interrupted")
    assert summary(tmp_path / "out")["stopped"] == "interrupted"


def test_what_an_earlier_run_left_is_not_taken_for_this_ones(tool, tmp_path):
    with fake_triton(fixed(0.005, 0.002, 3)) as server:
        analyze(options(server.address, tmp_path / "out"), progress=silent)
    with (
        fake_triton(fixed(0.0, 0.0, 1), errors=dict.fromkeys(range(12), "boom")) as server,
        pytest.raises(ServeError, match="boom"),
    ):
        analyze(options(server.address, tmp_path / "out", Load(concurrency=3)), progress=silent)
    assert [one["load"] for one in summary(tmp_path / "out")["loads"]] == ["concurrency 3"]


def test_the_server_and_the_model_are_looked_at_before_the_tool_is_got(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "find_tool", lambda progress: pytest.fail("it would be downloaded"))
    with fake_triton(fixed(0.005, 0.002, 3)) as server:
        asked = options(server.address, tmp_path / "out")
        with pytest.raises(InputError, match="no model 'absent'; --model takes decode_0, pd"):
            analyze(replace(asked, model="absent"), progress=silent)
        with pytest.raises(InputError, match="name of the model is empty"):
            analyze(replace(asked, model=""), progress=silent)
    with pytest.raises(ServeError, match="no server at"):
        analyze(asked, progress=silent)
    assert not (tmp_path / "out").exists()


def test_loads_that_cannot_be_are_refused_before_anything_is_asked(tool, tmp_path):
    with pytest.raises(InputError, match="more --requests"):
        analyze(options("127.0.0.1:1", tmp_path / "out", Load(concurrency=12)), progress=silent)
    assert not (tmp_path / "out").exists()
