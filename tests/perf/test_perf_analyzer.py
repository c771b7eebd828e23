from __future__ import annotations

import json
import sys

import pytest

from trtpd.errors import BuildError, InputError, ServeError
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.perf_analyzer import (
    Analyzer,
    Load,
    at_load,
    check_extra,
    dealt,
    input_data,
    latencies,
    read_export,
    with_new_text,
)
from trtpd.perf.perf_analyzer_tool import Tool, find_tool

LOAD = Load(concurrency=2)

SCRIPT = """
import json, pathlib, sys
args = sys.argv[1:]
if "--version" in args:
    sys.exit(0)
if args[args.index("-m") + 1] == "broken":
    sys.exit("error: no such model\\n --model-kind: a kind\\n and is used to identify\\n the RPC.")
if args[args.index("-m") + 1] == "help":
    sys.exit("Usage: perf_analyzer\\n kind and is used to identify\\n the RPC.\\nError: Failed to parse -m.\\n")
count = int(args[args.index("--request-count") + 1])
requests = [
    {"timestamp": n * 10**9, "response_timestamps": [n * 10**9 + ms * 10**6 for ms in (50, 60, 80, 81)],
     "response_outputs": [{"output_ids": "1"}] * 3 + [{}]}
    for n in range(count)
]
path = pathlib.Path(args[args.index("--profile-export-file") + 1])
if path.exists():
    sys.exit("error: Path must not already exist.")
path.write_text(json.dumps({"experiments": [{"requests": requests}]}))
"""


@pytest.fixture
def analyzer(tmp_path):
    """The stand-in writes an export as perf_analyzer 2.60 does: a last, empty response behind the tokens."""
    script = tmp_path / "perf_analyzer.py"
    script.write_text(SCRIPT)

    def make_one(model: str) -> Analyzer:
        tool = Tool(command=(sys.executable, str(script)), origin="a stand-in")
        return Analyzer(tool=tool, url="127.0.0.1:1", model=model, data=tmp_path / "in.json", folder=tmp_path)

    return make_one


def test_an_exports_times_are_read_and_the_empty_last_response_is_no_token(analyzer):
    analyzer("pd").run(LOAD, 3, "one")
    found = analyzer("pd").run(LOAD, 7, "one")  # in place of the former export
    assert found.requests == 7 - LOAD.opening
    assert (found.ttft_p50_s, found.itl_p50_s) == (pytest.approx(0.05), pytest.approx(0.015))


def test_a_tool_that_fails_is_quoted(analyzer):
    for model, words in (("broken", "error: no such model"), ("help", "Error: Failed to parse -m.")):
        with pytest.raises(ServeError) as found:
            analyzer(model).run(LOAD, 7, "one")
        assert str(found.value) == f"perf_analyzer failed (1) at concurrency 2: {words}"


@pytest.mark.parametrize("content", ["", "{}", '{"experiments": []}', '{"experiments": [{"requests": [{}]}]}'])
def test_a_file_that_is_no_export_is_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ServeError, match=r"x\.json: not a profile export"):
        read_export(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("pd", {"text_input", "max_tokens", "end_id", "stream"}),
        ("prefill_0", {"text_input"}),
        ("decode_3", {"kv_tokens", "max_tokens"}),
    ],
)
def test_each_model_gets_the_tensors_it_takes(model, names):
    workload = make(Wanted(name="chat", requests=3, rate=1.0))
    rows = json.loads(input_data(workload, model))["data"]
    assert len(rows) == 3
    assert all(row.keys() == names for row in rows)


def test_what_comes_all_at_once_when_a_closed_loop_begins_is_left_out():
    burst, later = [(0.001 * n, [0.5]) for n in range(4)], [(1.0 + n, [1.1 + n]) for n in range(4)]
    found = latencies([*later, *burst], opening=Load(concurrency=4).opening)
    assert (found.requests, found.ttft_p50_s) == (4, pytest.approx(0.1))
    assert Load(rate=1.0).opening == 0


def test_each_run_has_words_of_its_own_and_the_same_lengths_and_sharing():
    workload = make(Wanted(name="rag", requests=6, rate=1.0, fit=LengthFit(scale=0.1)))
    texts = [json.loads(input_data(with_new_text(workload, run), "pd"))["data"] for run in (1, 2)]
    words = [[row["text_input"][0].split() for row in rows] for rows in texts]
    assert [len(one) for one in words[0]] == [len(one) for one in words[1]]
    assert all(one[:8] != other[:8] for one, other in zip(*words, strict=True))
    assert all(len({tuple(one[:8]) for one in run}) == 1 for run in words)  # the instruction all requests share


@pytest.mark.parametrize("name", ["chat", "agent"])
def test_users_of_a_closed_loop_ask_what_perf_analyzer_would_have_them_ask(name):
    made = make(Wanted(name=name, concurrency=3, requests=11, fit=LengthFit(scale=0.1)))
    workload = dealt(made)
    assert [ask.segments for ask in workload.asks] == [ask.segments for ask in made.asks]
    turns = workload.turns()
    chains = []
    for first in (number for number, ask in enumerate(workload.asks) if ask.after is None):
        chain = [first]
        while followers := turns.get(chain[-1]):
            chain += followers
        chains.append(chain)
    assert chains == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    assert all(ask.at_s is None and ask.think_s == 0.0 for ask in workload.asks)


def test_an_open_loop_is_dealt_to_nobody():
    workload = make(Wanted(name="chat", rate=2.0, requests=5, fit=LengthFit(scale=0.1)))
    assert dealt(workload) is workload


@pytest.mark.parametrize("load", [Load(concurrency=3), Load(rate=5.0)])
@pytest.mark.parametrize("name", ["chat", "agent", "trace:mooncake"])
def test_a_workload_is_the_same_load_for_both_whatever_instants_and_sessions_it_had(name, load):
    fit = LengthFit(scale=0.05)
    for how in ({"rate": 0.5}, {"concurrency": 7}):
        made = make(Wanted(name=name, requests=40, seed=3, fit=fit, **how))
        found = at_load(made, load)
        assert [ask.segments for ask in found.asks] == [ask.segments for ask in made.asks]
        assert found.concurrency == load.concurrency
        if load.rate is not None:
            assert all(ask.after is None for ask in found.asks)
            assert 40 / found.duration_s == pytest.approx(5.0, rel=0.5)
        else:
            assert found == dealt(found)


def test_a_request_that_failed_counts_among_those_that_came_first():
    requests = [(0.0, []), (0.001, [0.5]), (1.0, [1.1]), (2.0, [2.1])]
    assert latencies(requests, opening=2).requests == 2


def test_requests_that_an_export_holds_no_answer_of_are_counted(analyzer, tmp_path):
    analyzer("pd").run(LOAD, 5, "one")
    content = json.loads((tmp_path / "one.json").read_text())
    content["experiments"][0]["requests"][4]["response_outputs"] = [{}] * 4
    (tmp_path / "one.json").write_text(json.dumps(content))
    found = read_export(tmp_path / "one.json", opening=2, asked=7)
    assert (found.requests, found.unfinished) == (2, {"no answer": 1, "not in the export": 2})


def test_a_requests_number_is_known_by_what_it_asked_in_whatever_order_the_export_has_it(tmp_path):
    asked = [(5, 2), (9, 3), (5, 2), (7, 4)]
    rows = [{"kv_tokens": [kv], "max_tokens": [most]} for kv, most in asked]
    (tmp_path / "in.json").write_text(json.dumps({"data": rows}))
    requests = [
        {
            "timestamp": sent_s * 10**9,
            "request_inputs": {"max_tokens": asked[number][1], "kv_tokens": asked[number][0]},
            "response_timestamps": [sent_s * 10**9 + (number + 1) * 10**8],
        }
        for number, sent_s in ((3, 2), (2, 9), (0, 1), (1, 4))
    ]
    (tmp_path / "x.json").write_text(json.dumps({"experiments": [{"requests": requests}]}))
    found = read_export(tmp_path / "x.json", opening=1, asked=4, data=tmp_path / "in.json")
    assert found.ttft_s == {1: pytest.approx(0.2), 2: pytest.approx(0.3), 3: pytest.approx(0.4)}
    assert read_export(tmp_path / "x.json", asked=4).ttft_s.keys() == {0, 1, 2, 3}


@pytest.mark.parametrize("extra", ["--request-count", "--concurrency-range=3", "-p", "--request-intervals"])
def test_an_argument_that_gives_perf_analyzer_another_load_is_refused(extra):
    with pytest.raises(InputError, match="both ask the same"):
        check_extra(["--verbose", extra, "5"])
    check_extra(["--verbose", "--max-threads", "4"])


@pytest.mark.parametrize(
    ("load", "fault"),
    [
        (Load(concurrency=5), "more --requests than 5"),
        (Load(rate=1e8), "above 0"),
        (Load(concurrency=1_000_000), "at most 4096 users"),
    ],
)
def test_a_load_that_leaves_nothing_to_measure_is_refused(load, fault):
    with pytest.raises(InputError, match=fault):
        load.check(5)


def test_a_named_tool_is_taken_if_it_runs_and_refused_if_not(tmp_path):
    good = tmp_path / "good"
    good.write_text("#!/bin/sh\nexit 0\n")
    good.chmod(0o755)
    assert find_tool(lambda *_: None, {"TRTPD_PERF_ANALYZER": str(good)}).command == (str(good),)
    with pytest.raises(BuildError, match="does not run here"):
        find_tool(lambda *_: None, {"TRTPD_PERF_ANALYZER": str(tmp_path / "none")})
