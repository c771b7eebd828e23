from __future__ import annotations

import pytest

from trtpd.cli import main
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.workload import save


@pytest.fixture
def saved(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    save(make(Wanted(name="chat", requests=3, rate=1.0)), tmp_path / "s.jsonl")
    return "s.jsonl"


BENCH = "bench --workload"
OF_SAVED = [
    "--requests 3", "--seed 0", "--scale-lengths auto", "--max-prompt-tokens 9", "--max-total-tokens 9",
    "--trace-offset 1", "--columns time=a",
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "first", "second"),
    [
        *((f"{BENCH} s.jsonl {one}", one.split()[0], "--workload s.jsonl") for one in OF_SAVED),
        *((f"{BENCH} s.jsonl {one}", one.split()[0], "--workload s.jsonl") for one in ("--rate 1", "--concurrency 2")),
        (f"{BENCH} s.jsonl --arrivals even", "--arrivals", "--workload s.jsonl"),
        (f"{BENCH} s.jsonl --time-scale 1", "--time-scale", "--workload s.jsonl"),
        *((f"perf-analyzer --workload s.jsonl {one}", one.split()[0], "--workload s.jsonl") for one in OF_SAVED),
        ("perf-analyzer --rates 2 --arrivals even", "--arrivals", "perf-analyzer"),
        ("perf-analyzer --workload trace:mooncake --time-scale 2", "--time-scale", "perf-analyzer"),
        ("compare BUILD --workload s.jsonl", "--workload s.jsonl", "compare"),
        ("compare BUILD --workload chat --requests 9", "--requests", "compare"),
        ("compare BUILD --workload trace:mooncake --time-scale 2", "--time-scale", "compare"),
        (f"{BENCH} trace:mooncake --rate 1 --time-scale 2", "--time-scale", "--rate"),
        (f"{BENCH} trace:mooncake --concurrency 1 --time-scale 2", "--time-scale", "--concurrency"),
        (f"{BENCH} trace:mooncake --rate 1 --arrivals even --time-scale 2", "--time-scale", "--rate"),
        (f"{BENCH} chat --concurrency 1 --arrivals even", "--arrivals", "--concurrency"),
        (f"{BENCH} chat --rate 1 --columns time=a", "--columns", "--workload chat"),
        (f"{BENCH} chat --rate 1 --openai http://127.0.0.1:1 --url 127.0.0.1:8001", "--url", "--openai"),
        (f"{BENCH} chat --rate 1 --openai http://127.0.0.1:1 --channels 1", "--channels", "--openai"),
        (f"{BENCH} chat --rate 1 --openai http://127.0.0.1:1 --keep-targets", "--keep-targets", "--openai"),
        (f"{BENCH} chat --rate 1 --extra-body {{}}", "--extra-body", "--openai"),
        (f"{BENCH} chat --rate 1 --model decode_0 --keep-targets", "--keep-targets", "--model decode_0"),
        (f"{BENCH} chat --rate 1 --save w.jsonl --ttft-ms 5", "--ttft-ms", "--save w.jsonl"),
        (f"{BENCH} chat --rate 1 --save w.jsonl --url 127.0.0.1:8001", "--url", "--save w.jsonl"),
        (f"{BENCH} chat --rate 1 --save w.jsonl -o report", "--output", "--save w.jsonl"),
        (f"{BENCH} chat --rate 1 --save w.jsonl --timeout-s 120", "--timeout-s", "--save w.jsonl"),
    ],
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_bad_usage_that_names_both(command, first, second, saved, capsys):
    assert main(command.split()) == 2
    said = capsys.readouterr().err.strip()
    assert first in said
    assert second in said
    assert "\n" not in said


def test_a_name_that_could_not_be_replayed_is_bad_usage(saved, capsys):
    assert main(f"{BENCH} chat --rate 1 --save w.json".split()) == 2
    assert ".jsonl" in capsys.readouterr().err


def test_a_traces_own_instants_may_be_scaled(saved, capsys):
    assert main(f"{BENCH} trace:mooncake --requests 5 --time-scale 2 --trace-offset 1 --save t.jsonl".split()) == 0
    assert "times 2" in capsys.readouterr().out
