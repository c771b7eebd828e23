"""What a benchmark keeps, refuses, and makes again without its server."""

from __future__ import annotations

import argparse
import html
import json
import shlex
import sys
from dataclasses import replace

import msgspec
import pytest
from trtpd_testing.fake_servers import ScriptedTransport, fake_openai, fixed
from trtpd_testing.virtual_loop import run_virtually

from trtpd import bench_cli, perf_cli
from trtpd.cli import main
from trtpd.errors import ServeError
from trtpd.perf import bench as room
from trtpd.perf.bench_folder import keep, load, replay_command
from trtpd.perf.bench_report import HAND_OFF, lines, stage_bars
from trtpd.perf.bench_result import drift_remarks, measured_of, token_remarks
from trtpd.perf.client import Client
from trtpd.perf.client_health import BottleneckError
from trtpd.perf.make_workload import Wanted
from trtpd.perf.prompt_text import Segment
from trtpd.perf.records import Record, ServerTimes, load_records
from trtpd.perf.slo import FixedSlo
from trtpd.perf.transport import Ending
from trtpd.perf.workload import Ask, Workload
from trtpd.perf.workload import load as load_workload
from trtpd.perf.workload_options import bench_wanted


def refuse(health, records):
    raise BottleneckError("the client was the bottleneck")


def bench(address, folder, monkeypatch, *more):
    """As a user types it."""
    arguments = ["bench", "--openai", address, "--workload", "chat", "--requests", "12", "--concurrency", "4"]
    arguments += ["--ttft-ms", "5000", "--tpot-ms", "4000.5", "--warm-up-s", "0", "-o", str(folder), *more]
    monkeypatch.setattr(sys, "argv", ["trtpd", *arguments])
    return main(arguments), shlex.join(["trtpd", *arguments])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run's folder, and the command that made it. The server is gone."""
    folder = tmp_path_factory.mktemp("runs") / "my rep"
    with pytest.MonkeyPatch.context() as patch, fake_openai(fixed(0.01, 0.005, 6)) as server:
        patch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)
        more = ("--cores", "3", "--extra-body", '{"a b": 1}', "--timeout-s", "30")
        code, command = bench(server.address, folder, patch, *more)
    assert code == 0
    return folder, command, server.address


def parsed(command):
    parser = argparse.ArgumentParser()
    bench_cli.add_bench(parser)
    return parser.parse_args(shlex.split(command)[2:])


def test_page_and_figures_hold_the_command_and_one_that_asks_the_same_again(kept):
    folder, command, address = kept
    document = json.loads((folder / "report.json").read_text())
    page = html.unescape((folder / "report.html").read_text())
    assert document["command"] == command
    assert command in page
    assert document["replay"] in page
    again = parsed(document["replay"])
    assert again.workload == str(folder / "workload.jsonl.gz")
    assert (again.openai, again.model, again.cores, again.timeout_s) == (address, None, 3, 30.0)
    assert (again.ttft_ms, again.tpot_ms, again.warm_up_s) == (5000.0, 4000.5, 0.0)
    assert bench_wanted(again).name == again.workload
    assert json.loads(again.extra_body) == {"a b": 1}


def test_a_report_is_made_again_by_other_targets_without_the_server(kept, tmp_path, capsys):
    folder, _, _ = kept
    before = json.loads((folder / "report.json").read_text())
    assert json.loads(msgspec.json.encode(room.bench_again(folder).result.figures)) == before["figures"]
    changed = ["--ttft-ms", "0.001", "--cores", "6"]
    assert main(["bench", "--again", str(folder), "-o", str(tmp_path / "other"), "--json", *changed]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["figures"]["verdicts"] == {"late:ttft": 12}
    assert other["figures"]["deployment"] == {"units": 6, "unit": "core"}
    assert (other["command"], other["again"]) == (before["command"], perf_cli.command_line())
    assert other["slo"]["tpot_s"] == before["slo"]["tpot_s"]
    assert "--ttft-ms 0.001 --tpot-ms 4000.5" in other["replay"]
    for name in ("run.json", "records.jsonl.gz", "workload.jsonl.gz", "report.html", "requests.csv"):
        assert (tmp_path / "other" / name).is_file()
    assert load(tmp_path / "other").run.records == load(folder).run.records
    assert json.loads((folder / "report.json").read_text()) == before


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--again", "FOLDER", "--rate", "2", "--workload", "chat"], "--workload and --again"),
        (["--again", "FOLDER", "--warm-up-s", "1e6"], "leaves nothing"),
        (["--again", "nowhere"], "trtpd bench -o"),
        (["--rate", "2"], "--workload NAME"),
    ],
)
def test_what_can_not_be_made_again_is_bad_input(kept, arguments, fault, capsys):
    assert main(["bench", *[str(kept[0]) if one == "FOLDER" else one for one in arguments]]) == 2
    assert fault in capsys.readouterr().err


def test_a_refused_run_leaves_what_was_seen_and_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)
    with fake_openai(fixed(0.01, 0.005, 6)) as server:
        assert bench(server.address, tmp_path, monkeypatch)[0] == 0
    for name in ("report.html", "report.json", "plots/latency.png", "plots/mine.png"):
        (tmp_path / name).write_text("of a former run")
    capsys.readouterr()
    monkeypatch.setattr(room, "refuse_if_bottleneck", refuse)
    with fake_openai(fixed(0.01, 0.005, 6)) as server:
        assert bench(server.address, tmp_path, monkeypatch)[0] == 1
    said = capsys.readouterr().err
    assert "is replaced when this one is over" in said
    assert f"what was seen is in {tmp_path}" in said
    assert "the client was the bottleneck" in (tmp_path / "refused.txt").read_text()
    assert len(load_records(tmp_path / "records.jsonl.gz")[1]) == len(
        load_workload(tmp_path / "workload.jsonl.gz").asks
    )
    assert not any((tmp_path / name).exists() for name in ("report.html", "report.json", "plots/latency.png"))
    assert (tmp_path / "plots" / "mine.png").read_text() == "of a former run"
    assert main(["bench", "--again", str(tmp_path)]) == 1
    assert "the client was the bottleneck" in capsys.readouterr().err
    taken = load(tmp_path)
    keep(tmp_path, replace(taken, about=msgspec.structs.replace(taken.about, refused="")))
    assert not (tmp_path / "refused.txt").exists()


def test_a_server_that_went_before_it_was_asked_again_takes_no_record_along(tmp_path, monkeypatch):
    def gone(target):
        monkeypatch.setattr(room, "_status", refuse_status)

    def refuse_status(target):
        raise ServeError("nobody there")

    monkeypatch.setattr(room, "_status", gone)
    monkeypatch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)
    with fake_openai(fixed(0.0, 0.0, 2)) as server:
        options = room.BenchOptions(
            target=room.Target(url=server.address, openai=True), wanted=Wanted(name="chat", requests=4, concurrency=2)
        )
        found = room.bench(options, folder=tmp_path)
    assert any("nobody there" in remark for remark in found.result.remarks)
    assert len(load(tmp_path).run.records) == 4


def test_cores_that_are_not_known_are_a_dash(kept):
    taken = load(kept[0])
    taken = replace(taken, about=msgspec.structs.replace(taken.about, deployment=None))
    assert "– per core (the server's are not known" in lines(measured_of(taken).result)[0]


def test_the_targets_of_a_replay_are_those_the_server_gave(kept, tmp_path):
    about = msgspec.structs.replace(load(kept[0]).about, slo=FixedSlo(ttft_s=0.9), arguments=("--url", "h:1"))
    again = parsed(replay_command(about, tmp_path / "it's", 2.5))
    assert (again.url, again.ttft_ms, again.tpot_ms, again.warm_up_s) == ("h:1", 900.0, None, 2.5)
    assert again.workload == str(tmp_path / "it's" / "workload.jsonl.gz")


def record(number, *, server=None, state="finished", **more):
    return Record(
        number=number, kind="chat", scheduled_s=float(number), prompt_tokens=9, max_tokens=9, state=state,
        at_s=(number + 0.1, number + 0.2), tokens=(1, 1), server=server, **more,
    )  # fmt: skip


def test_stages_up_to_the_first_token_are_as_long_as_the_mean_ttft_and_the_hand_off_comes_behind():
    local = ServerTimes(ttft_s=0.1)
    moved = ServerTimes(queue_s=0.04, prefill_s=0.05, ttft_s=0.09, exposed_s=0.1, transfer_bytes=7)
    bars = stage_bars([record(n, server=local if n < 90 else moved) for n in range(100)])
    first = bars["mean of all"]
    assert sum(first.values()) == pytest.approx(100.0)
    assert first == {
        "queue": pytest.approx(4.0),
        "prefill": pytest.approx(95.0),
        "front and client": pytest.approx(1.0),
    }
    assert bars["then, mean of all"] == {HAND_OFF: pytest.approx(10.0)}
    assert list(stage_bars([record(0, server=local)])) == ["mean of all", "mean of the slowest 10 %"]
    assert stage_bars([record(0)]) == stage_bars([]) == {}


def test_tokens_that_are_guessed_and_answers_without_a_pace_are_said():
    assert token_remarks([record(0)]) == []
    whole = msgspec.structs.replace(record(1, tokens_guessed=True), at_s=(1.1,), tokens=(1,))
    guessed, one = token_remarks([record(0), whole])
    assert "tokens of 1 of 2 answers" in guessed
    assert "1 of 2 answers came in one response" in one


def test_a_server_that_counts_no_tokens_is_noted_in_the_records():
    asks = tuple(Ask(segments=(Segment(seed=n, tokens=3),), max_tokens=4, kind="chat", at_s=0.1 * n) for n in range(2))
    client = Client(
        Workload(name="w", seed=0, asks=asks),
        ScriptedTransport(fixed(0.1, 0.1, 4), ends={0: Ending(state="finished")}),
    )
    assert [one.tokens_guessed for one in run_virtually(client.run()).records] == [True, False]


def test_an_attainment_that_drifted_is_said(kept):
    taken = load(kept[0])
    broken = [record(n) if n < 60 else record(n, state="failed", reason="x") for n in range(120)]
    run = replace(taken.run, info=msgspec.structs.replace(taken.run.info, offered_until_s=120.0), records=tuple(broken))
    result = measured_of(replace(taken, run=run)).result
    (said,) = drift_remarks(result.figures)
    assert said in result.remarks
    assert said.startswith("Attainment drifted: 100% of the first third of the requests were served well and 0% of")
