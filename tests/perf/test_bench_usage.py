"""What `trtpd bench` says before it runs, refuses, and exits with."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from trtpd_testing.fake_servers import fake_openai, fake_triton, fixed

from trtpd.cli import main
from trtpd.errors import InputError, ServeError
from trtpd.perf import bench as room
from trtpd.perf.bench_folder import check_ours
from trtpd.perf.bench_plan import clamped, duration, how_long, latest_end_s
from trtpd.perf.bench_report import lines
from trtpd.perf.client_health import LATE_FLOOR_S
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.triton_transport import TritonTransport


@pytest.fixture
def calm(monkeypatch):
    """On a busy test machine the client may be late: what it would refuse is not what is tested here."""
    monkeypatch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)


@pytest.fixture(scope="module")
def address():
    with fake_openai(fixed(0.05, 0.02, 6)) as server:
        yield server.address


def bench(address, *more):
    return main(["bench", "--openai", address, "--workload", "chat", *more])


def test_how_long_a_run_takes_is_said_before_it():
    slow = make(Wanted(name="chat", requests=2, rate=1e-6))
    assert latest_end_s(slow, 120.0) == pytest.approx(slow.duration_s + 120.0)
    text = how_long(slow, 120.0)
    assert text.startswith("2 requests, the last due ")
    assert text.count("days after the start") == 2
    assert text.endswith("as each is given up after 2 min")
    assert "1 request of 1 user," in how_long(make(Wanted(name="chat", requests=1, concurrency=1)), 9.0)


def test_the_latest_end_of_users_and_sessions_is_that_of_the_longest_way():
    assert latest_end_s(make(Wanted(name="chat", requests=10, concurrency=4)), 2.0) == pytest.approx(6.0)
    agent = make(Wanted(name="agent", requests=8, rate=100.0))
    depth: list[int] = []
    ends: list[float] = []
    for ask in agent.asks:
        depth.append(1 if ask.after is None else depth[ask.after] + 1)
        ends.append((ask.at_s or 0.0) + 2.0 if ask.after is None else ends[ask.after] + ask.think_s + 2.0)
    assert latest_end_s(agent, 2.0) == pytest.approx(max(ends))
    assert max(ends) > 2.0 * max(depth)
    assert "the last session begins" in how_long(agent, 2.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (58.3, "58 s"), (178.0, "3 min"), (3600.0, "60 min"), (9000.0, "2.5 h"), (2e6, "23 days")],
)
def test_durations_are_words_of_people(seconds, text):
    assert duration(seconds) == text


@pytest.mark.usefixtures("calm")
def test_more_users_than_requests_are_as_many_as_requests_and_all_of_them_count(address, capsys):
    assert clamped(Wanted(name="chat", requests=5, concurrency=5))[1] == ""
    assert bench(address, "--concurrency", "1000000000", "--requests", "2", "--json") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["figures"]["offered"] == 2
    assert found["notes"][-1] == "closed loop of 2"
    assert "--concurrency is 1,000,000,000 and there are 2 requests" in said.err
    assert "2 requests of 2 users, all ended at the latest 2 min after the start" in said.err


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--timeout-s", "0.01", "--rate", "50", "--requests", "10"], "no request was served: failed:client_timeout"),
        (["--concurrency", "2", "--requests", "2", "--warm-up-s", "0.001"], "no request was counted: all 2 were due"),
    ],
)
def test_a_run_in_which_nothing_was_served_or_counted_exits_1_and_says_why(arguments, fault, address, capsys):
    assert bench(address, *arguments) == 1
    assert fault in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("calm")
def test_a_folder_with_files_of_somebody_else_is_left_alone(address, tmp_path, capsys):
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    assert bench(address, "--concurrency", "1", "--requests", "2", "-o", str(tmp_path)) == 2
    assert "holds files and no run of `trtpd bench`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    mine.rename(tmp_path / "run.json")  # nor is a file of ours by its name alone
    assert bench(address, "--concurrency", "1", "--requests", "2", "-o", str(tmp_path)) == 2


@pytest.mark.usefixtures("calm")
def test_an_earlier_run_may_be_replaced_and_that_is_said(address, tmp_path):
    folder = tmp_path / "r"
    assert check_ours(folder) == ""
    folder.mkdir()
    assert check_ours(folder) == ""
    target = room.Target(url=address, openai=True)
    room.bench(room.BenchOptions(target=target, wanted=Wanted(name="chat", requests=2, concurrency=1)), folder=folder)
    made_at = json.loads((folder / "run.json").read_text())["environment"]["made_at"]
    assert check_ours(folder) == f"the run of {made_at} in {folder} is replaced when this one is over"
    (folder / "run.json").unlink()  # as one leaves it that was killed while it wrote
    assert check_ours(folder).startswith("the run in ")


@pytest.mark.usefixtures("calm")
def test_the_definition_that_was_chosen_comes_first_and_all_three_are_there(address, tmp_path, capsys):
    arguments = ["--rate", "20", "--requests", "10", "--ttft-ms", "5000", "--tpot-ms", "5000"]
    assert bench(address, *arguments, "--definition", "mooncake", "-o", str(tmp_path / "m")) == 0
    assert ", by mooncake's definition; targets:" in capsys.readouterr().out.splitlines()[0]
    page = (tmp_path / "m" / "report.html").read_text()
    places = [page.index(f"<td>{name}:") if f"<td>{name}:" in page else page.index(f"{name}: ") for name in
              ("mooncake", "trtpd", "distserve")]  # fmt: skip
    assert places[0] < min(places[1:])
    document = json.loads((tmp_path / "m" / "report.json").read_text())
    assert document["figures"]["definition"] == "mooncake"
    assert list(document["figures"]["goodput"]) == ["trtpd", "distserve", "mooncake"]
    assert "--definition mooncake" in document["replay"]
    again = room.bench_again(
        tmp_path / "m", lambda about: msgspec.structs.replace(about, definition="distserve", warm_up_s=0.0)
    )
    assert lines(again.result)[0].count("by distserve's definition") == 1


@pytest.mark.usefixtures("calm")
def test_how_late_the_client_may_be_stands_beside_how_late_it_was(address, capsys):
    assert bench(address, "--rate", "20", "--requests", "10", "--json") == 0
    limit_s = json.loads(capsys.readouterr().out)["late_limit_s"]
    assert limit_s >= LATE_FLOOR_S
    assert bench(address, "--rate", "20", "--requests", "10") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("client ")]
    assert line.endswith("ms (at most 10.0 ms each)")


def opened(address, model):
    async def run():
        transport = TritonTransport(address, model=model)
        try:
            await transport.open()
        finally:
            await transport.close()

    asyncio.run(run())


def test_a_model_that_the_server_has_not_is_bad_input_and_those_it_has_are_named(capsys):
    with fake_triton(fixed(0.01, 0.005, 6)) as server:
        assert main(["bench", "--url", server.address, "--workload", "chat", "--rate", "1", "--model", "absent"]) == 2
        opened(server.address, "decode_0")
    assert "no model 'absent'; --model takes decode_0, pd" in capsys.readouterr().err
    with pytest.raises(ServeError, match="no server at"):
        opened(server.address, "absent")


def test_a_server_that_keeps_its_index_to_itself_is_asked_for_its_instances(monkeypatch):
    monkeypatch.setattr("trtpd.perf.model_names.status", lambda url, **_: {"instances": {"prefill_0": {}, "d": {}}})
    with fake_triton(fixed(0.01, 0.005, 6), index=False) as server:
        with pytest.raises(InputError, match="--model takes pd, d, prefill_0"):
            opened(server.address, "absent")
        monkeypatch.setattr("trtpd.perf.model_names.status", lambda url, **_: {"instances": {"absent": {}}})
        with pytest.raises(ServeError, match="does not serve absent now"):
            opened(server.address, "absent")
