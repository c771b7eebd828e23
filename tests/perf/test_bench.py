from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from trtpd_testing.fake_servers import fake_openai, fixed

from trtpd.cli import main
from trtpd.errors import InputError
from trtpd.perf import bench as room
from trtpd.perf import bench_report
from trtpd.perf.bench import BenchOptions, Target, bench
from trtpd.perf.bench_folder import keep
from trtpd.perf.goodput import Deployment
from trtpd.perf.make_workload import Wanted
from trtpd.perf.process_cpu import cpu_times, label_of, server_process, usable_cores
from trtpd.perf.records import load_records
from trtpd.perf.slo import FixedSlo
from trtpd.perf.workload import load

SLO = FixedSlo(ttft_s=5.0, tpot_s=5.0)


@pytest.fixture
def calm(monkeypatch):
    """On a busy test machine the client may be late: what it would refuse is not what is tested here."""
    monkeypatch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)


def measured(address: str, **more):
    options = BenchOptions(
        target=Target(url=address, openai=True), wanted=Wanted(name="mixed", requests=40, rate=80.0), slo=SLO, **more
    )
    return bench(options)


@pytest.mark.usefixtures("calm")
def test_a_report_holds_page_figures_requests_plots_and_what_is_needed_to_do_it_again(tmp_path):
    with fake_openai(fixed(0.01, 0.005, 6), statuses={3: 429}) as server:
        found = measured(server.address, deployment=Deployment(units=2, unit="GPU"))
    found = replace(found, result=msgspec.structs.replace(found.result, workload="<script>alert(1)</script>"))
    keep(tmp_path / "report", found.taken)
    page = bench_report.write(tmp_path / "report", found)
    folder = page.parent
    figures = json.loads((folder / "report.json").read_text())["figures"]
    assert figures["offered"] + figures["cut"] == 40
    assert f"40 in all, {figures['offered']} counted; not counted: {figures['cut']} due in" in page.read_text()
    assert figures["goodput"]["trtpd"]["per_unit"] == pytest.approx(figures["goodput"]["trtpd"]["per_s"]["value"] / 2)
    rows = list(csv.DictReader(io.StringIO((folder / "requests.csv").read_text())))
    assert len(rows) == 40
    assert [row["verdict"] for row in rows].count("refused:saturated") == 1
    assert load(folder / "workload.jsonl.gz") == found.workload
    assert tuple(load_records(folder / "records.jsonl.gz")[1]) == found.run.records
    for name in ("latency", "over_time", "slo_scale"):
        assert (folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    html = page.read_text()
    assert html.count("<svg") == 3
    assert "<script" not in html  # what a user named is text
    assert not re.search(r"(src|href)=\"https?:", html)  # and the page needs no network


def test_a_command_measures_an_openai_server_and_prints_one_json_object(capsys, monkeypatch):
    monkeypatch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)
    with fake_openai(fixed(0.01, 0.005, 6)) as server:
        code = main(
            ["bench", "--openai", server.address, "--workload", "chat", "--requests", "20", "--concurrency", "4",
             "--ttft-ms", "5000", "--json"]
        )  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["figures"]["verdicts"] == {"good": found["figures"]["offered"]}
    assert found["health"]["responses"] == 120
    assert "client" in found["cpu_s"]


def test_a_workload_can_be_saved_without_a_server(tmp_path, capsys):
    path = tmp_path / "w.jsonl"
    assert main(["bench", "--workload", "rag", "--rate", "2", "--requests", "7", "--save", str(path)]) == 0
    assert len(load(path).asks) == 7
    assert "7 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--workload", "chat"], "needs a rate"),
        (["--workload", "nope", "--rate", "1"], "not known"),
        (["--workload", "chat", "--rate", "1", "--arrivals", "wave"], "no shape"),
        (["--workload", "chat", "--rate", "1", "--scale-lengths", "big"], "give a number or auto"),
        (["--workload", "chat", "--rate", "1", "--openai", "x", "--extra-body", "{"], "no JSON"),
        (["--workload", "chat", "--rate", "1", "--channels", "0"], "'0' is not a whole number above 0"),
        (["--workload", "chat", "--rate", "1", "--channels", "1000000"], "1000000 gRPC connections"),
        (["--workload", "chat", "--rate", "1", "--cores", "0"], "'0' is not a whole number above 0"),
        (["--workload", "chat", "--rate", "1", "--timeout-s", "nan"], "'nan' is not a number of seconds"),
        (["--workload", "chat", "--rate", "1", "--openai", "http://x:99999"], "write http://HOST:PORT"),
        (["--workload", "chat", "--rate", "1", "--ttft-ms", "0"], "above 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, fault, capsys):
    url = [] if "--openai" in arguments else ["--url", "127.0.0.1:1"]
    assert main(["bench", *url, *arguments]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert fault in said or "no server" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (["/x/tritonserver", "--http"], "Triton"),
        (["/x/triton_python_backend_stub", "/run/model_repo/pd/1/model.py", "trtpd"], "router"),
        (["/x/triton_python_backend_stub", "/run/model_repo/decode_1/1/model.py", "trtpd"], "stub of decode_1"),
        (["python", "-m", "trtpd.runtime.worker", "--build", "b", "--instance", "prefill_0"], "prefill_0"),
        (["python", "-m", "trtpd.cli", "serve", "BUILD"], "launcher"),
        (["/usr/bin/llama-server"], "llama-server"),
        ([], "other"),
    ],
)
def test_processes_are_named_by_what_they_are(command, label):
    assert label_of(command) == label


def test_cpu_of_a_server_on_this_host_is_found_by_its_port():
    with fake_openai(fixed(0.0, 0.0, 1)) as server:
        root = server_process(server.address)
        assert root is not None
        assert root.pid == os.getpid()
        earlier = cpu_times(root)
        used = cpu_times(root).since(earlier)
    assert sum(used.values()) >= 0.0
    assert server_process("192.0.2.1:8001") is None
    with pytest.raises(InputError, match="HOST:PORT"):
        server_process("localhost:http")


def test_the_cores_of_a_server_are_those_it_may_use_and_not_those_of_the_client():
    listen = (
        "import os, socket, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", listen]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        target = Target(url=f"127.0.0.1:{server.stdout.readline().strip()}")
        assert usable_cores(server_process(target.url)) == 1
        assert room._this_host(target) == Deployment(units=1, unit="core")
        server.stdin.close()
    assert room._this_host(target) is None
    assert usable_cores(None) is None


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:8001", "127.0.0.1:99999"])
def test_a_server_whose_address_can_not_be_is_bad_input(url):
    with pytest.raises(InputError):
        Target(url=url)


def test_targets_that_are_not_given_are_those_of_the_servers_pipeline_file():
    told = {"slo": {"ttft_ms": 900.0, "tpot_ms": None}}
    options = BenchOptions(target=Target(url="127.0.0.1:1"), wanted=Wanted(name="chat", rate=1.0))
    found = room.with_servers_targets(options, told)
    assert found.slo == FixedSlo(ttft_s=0.9)
    assert "pipeline file" in found.targets_remark
    given = room.with_servers_targets(replace(options, slo=FixedSlo(ttft_s=0.1, tpot_s=0.2)), told)
    assert given.slo == FixedSlo(ttft_s=0.1, tpot_s=0.2)
    assert given.targets_remark == ""
    assert room.with_servers_targets(options, None) == options


@pytest.mark.parametrize("command", [["bench", "--rate", "1"], ["perf-analyzer"], ["compare", "BUILD"]])
def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(command, capsys):
    assert main([*command, "--workload", "chat", "-o", "/proc/trtpd/report"]) == 2
    assert "choose another place with -o" in capsys.readouterr().err


def test_what_happens_again_during_a_run_is_shown_although_it_had_happened_before():
    def said(*texts):
        notes = [{"ago_s": 1.0, "code": "lost", "what": text} for text in texts]
        about = {"model": "m", "fingerprint": "f", "trtpd": "0", "max_seq_tokens": 1}
        return {**about, "instances": {}, "counters": {}, "faults": notes, "events": []}

    look = room._look(
        said("d0 was lost", "p0 was lost"), said("d1 was lost", "d0 was lost", "p0 was lost", "d0 was lost")
    )
    assert look is not None
    assert sorted(look.faults) == ["d0 was lost", "d1 was lost"]
