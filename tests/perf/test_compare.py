from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtpd_testing.fake_servers import fake_openai

from trtpd import perf_cli
from trtpd.build.manifest import MANIFEST, read_manifest
from trtpd.cli import main
from trtpd.errors import InputError, ServeError
from trtpd.perf import compare_points, compare_report, compare_targets, interference
from trtpd.perf.arrivals import parse
from trtpd.perf.bench import Target
from trtpd.perf.client import Run
from trtpd.perf.client_health import LATE_FLOOR_S, ClientHealth, late_limit_for
from trtpd.perf.compare import CompareOptions, Comparer
from trtpd.perf.compare_arms import CHUNKED, COLOCATED, OUTSIDE, SPLIT, Variant, cores_of, next_variant, variants
from trtpd.perf.compare_budget import Budget, OutOfBudgetError, Step
from trtpd.perf.compare_folder import Folder
from trtpd.perf.compare_points import Points
from trtpd.perf.compare_runs import DisturbedError, Driven, Runs
from trtpd.perf.compare_search import Search
from trtpd.perf.compare_stretch import stretch, told
from trtpd.perf.comparison import PointFile
from trtpd.perf.goodput import DEFINITIONS, account
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.priority import AUTOGROUP, before_others
from trtpd.perf.records import FORMAT, Record, RunInfo
from trtpd.perf.slo import FixedSlo, LengthSlo
from trtpd.perf.traces import TraceOptions
from trtpd.perf.verdict import best, verdict

POOL = {"instances": 1, "tp": 1, "threads": 1, "max_batch": 8, "kv_tokens": 2048, "chunk_tokens": 256}
POOLS = {"prefill": POOL | {"cores": [0]}, "decode": POOL | {"cores": [1]}, "elastic": False}


def write_manifest(folder, pools):
    from trtpd_testing.emulated_build import write_build

    build = write_build(folder / "build", "prefill", "decode")
    manifest = read_manifest(build)
    settings = {"model": "/none", "engine": "emulated", "pools": pools, "kv": {"max_seq_tokens": 1024}}
    (build / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, settings=settings)))
    return build


def test_arms_share_the_cores_and_the_kv_memory(tmp_path):
    manifest = read_manifest(write_manifest(tmp_path, POOLS))
    found = variants(manifest, chunks=(64, 128, 4096))
    assert cores_of(manifest) == (0, 1)
    for arm in (COLOCATED, CHUNKED):
        for variant in found[arm]:
            pool = variant.pools["mixed"]
            assert pool["cores"] == [0, 1]
            assert pool["threads"] * pool["instances"] == 2
            assert pool["kv_tokens"] * pool["instances"] == 4096
            assert pool["max_step_tokens"] >= pool["chunk_tokens"]
    assert {v.pools["mixed"]["chunk_tokens"] for v in found[COLOCATED]} == {1024}
    assert {v.pools["mixed"]["chunk_tokens"] for v in found[CHUNKED]} == {64, 128}
    assert {(*v.pools["prefill"]["cores"], *v.pools["decode"]["cores"]) for v in found[SPLIT]} == {(0, 1)}
    assert [v.scheduler["local_prompt_tokens"] for v in found[SPLIT]] == [0, 0, 256, 256]


def test_every_split_of_more_cores_is_tried(tmp_path):
    pools = {"prefill": POOL | {"cores": [0, 1]}, "decode": POOL | {"cores": [2, 3]}}
    splits = variants(read_manifest(write_manifest(tmp_path, pools)), chunks=(64,))[SPLIT]
    assert [v.pools["prefill"]["threads"] for v in splits] == [1, 1, 2, 2, 3, 3]
    assert len({v.folder for v in splits}) == 6


def tried(candidates, good):
    """What a tuning tries, in its order, if GOOD says how good a variant is."""
    scores: dict[str, float] = {}
    while (variant := next_variant(candidates, scores)) is not None:
        assert variant.label not in scores
        scores[variant.label] = good(variant)
    return list(scores)


def test_tuning_tries_each_group_once_and_then_climbs_the_best_ones_chunks(tmp_path):
    chunked = variants(read_manifest(write_manifest(tmp_path, POOLS)))[CHUNKED]
    best_at = {"1 x 2 threads": 0.5, "2 x 1 threads": 1.0}
    order = tried(chunked, lambda v: best_at[v.group] - abs(v.pools["mixed"]["chunk_tokens"] - 64) / 1e4)
    assert order == [
        "1 x 2 threads, chunks of 128",
        "2 x 1 threads, chunks of 128",
        "2 x 1 threads, chunks of 256",
        "2 x 1 threads, chunks of 64",
        "2 x 1 threads, chunks of 32",
    ]


def test_the_client_is_held_to_the_targets_and_not_to_what_a_slow_arm_took():
    assert late_limit_for(FixedSlo(ttft_s=1.0, tpot_s=0.08)) == pytest.approx(0.02)
    assert late_limit_for(FixedSlo(ttft_s=0.3, tpot_s=0.2)) == pytest.approx(0.015)
    assert late_limit_for(FixedSlo(ttft_s=1.0, tpot_s=0.02)) == LATE_FLOOR_S
    assert late_limit_for(FixedSlo()) == LATE_FLOOR_S


def test_the_client_goes_back_to_its_own_priority():
    def now() -> tuple[int, str]:
        return os.getpriority(os.PRIO_PROCESS, 0), AUTOGROUP.read_text() if AUTOGROUP.exists() else ""

    before = now()
    with before_others() as nice:
        assert nice == now()[0] <= before[0]
    assert now() == before


def test_an_outside_server_is_called_by_what_it_runs(tmp_path):
    manifest = read_manifest(write_manifest(tmp_path, POOLS))
    labels = {
        "/opt/llama-server -m x.gguf --port {port}": "llama-server",
        "/venv/bin/python -P -m trtpd.perf.llama_server --port {port}": "llama_server",
    }
    folders = set()
    for command, label in labels.items():
        (found,) = variants(manifest, outside=command)[OUTSIDE]
        assert found.label == label
        folders |= {found.folder, *(one.folder for one in variants(manifest, outside=command + " -v")[OUTSIDE])}
    assert len(folders) == 4
    with pytest.raises(InputError, match=r"no \{port\}"):
        variants(manifest, outside="llama-server")


@pytest.mark.parametrize(
    ("pools", "fault"),
    [
        ({"mixed": POOL | {"cores": [0, 1]}}, "needs one with prefill and decode"),
        ({"prefill": POOL, "decode": POOL}, "names no cores"),
        ({"prefill": POOL | {"cores": [0]}, "decode": POOL | {"cores": [0]}}, "at least two"),
    ],
)
def test_a_build_that_cannot_be_compared_says_why(tmp_path, pools, fault):
    with pytest.raises(InputError, match=fault):
        variants(read_manifest(write_manifest(tmp_path, pools)))


HEALTH = ClientHealth(
    late_p50_s=0.0,
    late_p99_s=0.0,
    late_largest_s=0.0,
    lag_p99_s=0.0,
    lag_largest_s=0.0,
    cpu_share=0.1,
    loop_cpu_share=0.1,
    wall_s=20.0,
    responses=40,
)
VARIANT = Variant(arm=SPLIT, label="1 prefill : 1 decode", pools={})
FILE = PointFile(arm=SPLIT, variant=VARIANT.label, rate=1.0, repeat=0, until_s=20.0, health=HEALTH, cpu_s={})


def run_with(ttft_s: float) -> Run:
    records = tuple(
        Record(
            number=number,
            kind="chat",
            scheduled_s=float(number),
            sent_s=float(number),
            ended_s=number + ttft_s + 0.01,
            prompt_tokens=16,
            max_tokens=2,
            state="finished",
            at_s=(number + ttft_s, number + ttft_s + 0.01),
            tokens=(1, 1),
        )
        for number in range(20)
    )
    info = RunInfo(trtpd_records=FORMAT, workload="x", seed=0, open_loop=True, offered_until_s=20.0, interrupted=False)
    return Run(info=info, records=records, health=HEALTH)


def test_a_run_is_accounted_for_once_and_again_if_it_was_made_anew(tmp_path, monkeypatch):
    accounted = []

    def counted(records, *args, **named):
        accounted.append(records)
        return account(records, *args, **named)

    monkeypatch.setattr(compare_points, "account", counted)
    runs = Runs(
        build=tmp_path,
        folder=tmp_path,
        wanted=Wanted(name="chat"),
        point_s=20.0,
        longest_tokens=1024,
        budget=Budget(seconds=0.0),
        cores=2,
        progress=lambda *_: None,
    )
    slo = LengthSlo(floor_s=1.0, factor=2.5, unloaded=((32, 0.1), (128, 0.2)), tpot_s=0.1)
    points = Points(runs=runs, folder=Folder(tmp_path), slo=slo)
    points.keep("points", VARIANT, FILE, run_with(0.5))
    first = points.of("points", VARIANT, 1.0, 0)
    assert list(points.measured(VARIANT)) == [first]
    assert points.of("tuning", VARIANT, 1.0, 0) is None
    assert len(accounted) == 1
    points.keep("points", VARIANT, FILE, run_with(5.0))
    assert points.of("points", VARIANT, 1.0, 0).good_per_s == 0.0 < first.good_per_s
    assert len(accounted) == 2


GAPS_S = {SPLIT: 0.001, COLOCATED: 0.04, CHUNKED: 0.01}


@pytest.fixture
def arms(monkeypatch):
    """Each arm is served by a real server whose token gaps are those of GAPS_S."""
    starts = []

    @contextmanager
    def serve(runs, variant):
        starts.append((variant.arm, variant.label))
        with fake_openai(lambda number, now_s: [0.005 + GAPS_S[variant.arm] * i for i in range(8)]) as server:
            yield Target(url=server.address, openai=True)

    monkeypatch.setattr(Runs, "serve", serve)
    monkeypatch.setattr(Runs, "fault", lambda *_: "")
    monkeypatch.setattr(interference, "FIRST_PROMPT_S", 0.2)
    monkeypatch.setattr(interference, "LEAST_PAUSE_S", 0.2)
    monkeypatch.setattr(compare_targets, "FACTOR", 0.625)  # of a colocated gap: between the other two
    return starts


def options(tmp_path, **more) -> CompareOptions:
    defaults: dict[str, Any] = {
        "build": tmp_path / "build",
        "folder": tmp_path / "cmp",
        "wanted": Wanted(name="mixed", fit=LengthFit(scale=0.02)),
        "rates": (20.0, 40.0),
        "repeats": 1,
        "point_s": 0.5,
        "budget_s": 600.0,
        "chunks": (64,),
    }
    return CompareOptions(**(defaults | more))


BEGIN = Budget.begin


def interrupted_at(runs):
    """What Ctrl-C does as the run behind so many begins."""

    def begun(budget, step, *, start):
        if budget.begun == runs:
            raise KeyboardInterrupt
        BEGIN(budget, step, start=start)

    return begun


def only_the_targets(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        there = (tmp_path / "cmp" / "slo.json").exists()
        patch.setattr(Budget, "begin", interrupted_at(0 if there else 1))
        return Comparer(options(tmp_path), lambda *_: None).run()


@pytest.mark.slow
def test_a_comparison_measures_all_arms_says_what_it_found_and_goes_on_where_it_stopped(tmp_path, arms):
    write_manifest(tmp_path, POOLS)
    first = only_the_targets(tmp_path)
    assert not first.complete
    assert not first.points
    whole = Comparer(options(tmp_path), lambda *_: None).run()
    assert whole.complete
    assert {point.file.arm for point in whole.points} == {SPLIT, COLOCATED, CHUNKED}
    assert len(whole.points) == 6
    assert best(whole, SPLIT).goodput > best(whole, COLOCATED).goodput
    assert set(whole.interference) == {SPLIT, COLOCATED, CHUNKED}
    assert any("disaggregat" in line for line in verdict(whole))
    served = len(arms)
    again = Comparer(options(tmp_path), lambda *_: None).run()
    assert len(arms) == served
    assert again.points == whole.points
    page = compare_report.write(tmp_path / "cmp", whole, command="trtpd compare")
    drawn = {path.stem for path in (page.parent / "plots").iterdir()}
    assert {"goodput", "slo_scale", "interference", "cpu"} <= drawn
    assert len(json.loads((page.parent / "report.json").read_text())["points"]) == 6
    for text in (page.read_text(), json.dumps(compare_report.document(whole))):
        assert "disaggregated" in text


@pytest.mark.slow
def test_a_run_that_other_work_disturbed_is_made_again_before_anything_follows_from_it(tmp_path, arms, monkeypatch):
    """Here that is the first run of each kind, arm and rate."""
    made: set[tuple[object, ...]] = set()
    calm = [True]
    measure, interfere = Points.measure, Search._interfere

    def noted(run):
        calm.append(run in made)
        made.add(run)

    def measured(points, kind, variant, target, rate, repeat):
        noted((kind, variant.label, rate, repeat))
        return measure(points, kind, variant, target, rate, repeat)

    def interfered(comparer, variant, target_of):
        noted(("interference", variant.label))
        interfere(comparer, variant, target_of)

    monkeypatch.setattr(Points, "measure", measured)
    monkeypatch.setattr(Search, "_interfere", interfered)
    monkeypatch.setattr(Runs, "fault", lambda *_: "" if calm[-1] else "other work took a core meanwhile")
    write_manifest(tmp_path, POOLS)
    whole = Comparer(options(tmp_path), lambda *_: None).run()
    assert whole.complete
    assert len(whole.points) == 6
    assert [point.file.fault for point in whole.points] == [""] * 6
    assert [aside.fault for aside in whole.asides.values()] == [""] * 4
    tuned = {run for run in made if run[0] == "tuning"}
    assert tuned
    assert len(calm) - 1 == 2 * len(made) == 2 * (6 + 3 + len(tuned))


def refused(tmp_path, **more) -> str:
    with pytest.raises(InputError) as error:
        Comparer(options(tmp_path, **more), lambda *_: None)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fit": LengthFit(scale=0.04)}, "requests.length_scale is 0.02 there and 0.04 here"),
        ({"arrivals": parse("gamma:5")}, "requests.arrivals is poisson there and gamma:5 here"),
        ({"seed": 3}, "seed is 0 there and 3 here"),
        ({"name": "chat"}, "workload is mixed there and chat here"),
        ({"fit": LengthFit(scale=0.02, max_prompt_tokens=9)}, "max_prompt_tokens is nothing there and 9 here"),
    ],
)
def test_a_folder_goes_on_with_the_same_requests_only(tmp_path, change, said):
    write_manifest(tmp_path, POOLS)
    first = options(tmp_path)
    for rates in ((20.0,), (30.0, 50.0)):
        Comparer(replace(first, rates=rates, repeats=len(rates)), lambda *_: None)
    message = refused(tmp_path, wanted=replace(first.wanted, **change))
    assert said in message
    assert "-o" in message


def test_a_folder_goes_on_with_the_same_pools_settings_and_definition_only(tmp_path):
    write_manifest(tmp_path, POOLS)
    Comparer(options(tmp_path), lambda *_: None)
    assert "point_s is 0.5 there and 0.7 here" in refused(tmp_path, point_s=0.7)
    assert "definition is trtpd there and distserve here" in refused(tmp_path, definition="distserve")
    Comparer(options(tmp_path, outside="server {port}"), lambda *_: None)
    shutil.rmtree(tmp_path / "build")
    write_manifest(tmp_path, POOLS | {"decode": POOL | {"cores": [1], "max_batch": 16}})
    assert "max_batch is 8 there and 16 here" in refused(tmp_path)


def test_another_trace_file_of_the_same_name_is_another_comparison(tmp_path):
    write_manifest(tmp_path, POOLS)
    trace = tmp_path / "t.csv"
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{n},{n + 1},3\n" for n in range(50))
    trace.write_text(rows)
    wanted = Wanted(name=f"trace:{trace}")
    Comparer(options(tmp_path, wanted=wanted), lambda *_: None)
    assert "trace_offset is 0 there and 5 here" in refused(
        tmp_path, wanted=replace(wanted, trace=TraceOptions(offset=5))
    )
    assert "--time-scale 2 and --rate" in refused(tmp_path, wanted=replace(wanted, trace=TraceOptions(time_scale=2.0)))
    trace.write_text(rows + "51,7,7\n")
    assert "requests.trace is" in refused(tmp_path, wanted=wanted)


OLD_PLAN = {
    "fingerprint": "f", "workload": "mixed", "seed": 0, "point_s": 0.5, "cores": [0, 1], "chunks": [64],
}  # fmt: skip


def older(folder) -> LengthSlo:
    """What an older trtpd left: no word of requests, settings or variants."""
    slo = LengthSlo(floor_s=1.0, factor=2.5, unloaded=((32, 0.1), (128, 0.2)), tpot_s=0.1)
    (folder / "tuning").mkdir(parents=True)
    (folder / "plan.json").write_bytes(msgspec.json.encode(OLD_PLAN))
    (folder / "slo.json").write_bytes(msgspec.json.encode(slo))
    choices = {
        "colocated": (COLOCATED, "1 x 2 threads"),
        "colocated-chunked": (CHUNKED, "2 x 1 threads, chunks of 64"),
        "disaggregated": (SPLIT, "1 prefill : 1 decode, chunks of 64"),
    }
    for name, (arm, variant) in choices.items():
        old = {"arm": arm, "variant": variant, "tried": {variant: 0.5}, "untried": []}
        (folder / "tuning" / f"choice.{name}.json").write_bytes(msgspec.json.encode(old))
    return slo


def test_an_older_comparison_gives_its_targets_and_tuning_but_does_not_go_on(tmp_path, arms, monkeypatch):
    write_manifest(tmp_path, POOLS)
    slo = older(tmp_path / "old")
    assert "--like" in refused(tmp_path, folder=tmp_path / "old")
    with pytest.raises(InputError, match=r"too short for anything"):
        Comparer(options(tmp_path, like=tmp_path / "old", budget_s=1.0), lambda *_: None).run()
    assert arms == []
    monkeypatch.setattr(Budget, "begin", interrupted_at(0))
    like = options(tmp_path, like=tmp_path / "old")
    found = Comparer(like, lambda *_: None).run()
    assert found.slo == slo
    assert arms == []
    assert {choice.variant for choice in found.choices} == {
        "1 x 2 threads", "2 x 1 threads, chunks of 64", "1 prefill : 1 decode, chunks of 64",
    }  # fmt: skip
    assert all("old (mixed, by trtpd)" in choice.origin for choice in found.choices)
    assert any("another build" in line for line in compare_report.remarks(found))
    assert Comparer(options(tmp_path), lambda *_: None).run().choices == found.choices
    other = older(tmp_path / "other")
    (tmp_path / "other" / "slo.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(other, tpot_s=0.2)))
    with pytest.raises(InputError, match=r"has its own targets.*-o"):
        Comparer(options(tmp_path, like=tmp_path / "other"), lambda *_: None).run()


def test_what_has_no_other_requests_to_tune_by_is_refused(tmp_path):
    write_manifest(tmp_path, POOLS)
    for name in ("/none/x.jsonl", "x.jsonl.gz"):
        message = refused(tmp_path, wanted=Wanted(name=name))
        assert "saved workload" in message
        assert "trtpd bench" in message
    assert "closed loop of 4" in refused(tmp_path, wanted=Wanted(name="chat", concurrency=4))


def runs_of(tmp_path, wanted, **more) -> Runs:
    return Runs(
        build=tmp_path, folder=tmp_path, wanted=wanted, point_s=20.0, longest_tokens=1024, cores=2,
        budget=Budget(seconds=0.0), progress=lambda *_: None, **more,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["trace:azure-conv", "trace:mooncake", "mixed"])
def test_tuning_and_each_repeat_have_requests_of_their_own(tmp_path, name):
    runs = runs_of(tmp_path, Wanted(name=name, fit=LengthFit(scale=0.1)))
    asked = [make(runs.asked(2.0, repeat)).asks for repeat in (None, 0, 1, 2)]
    lengths = [tuple(ask.total_tokens for ask in asks) for asks in asked]
    assert len(set(lengths)) == 4
    assert {len(asks) for asks in asked} == {40}
    assert make(runs.asked(2.0, 1)).asks == asked[2]
    if name != "mixed":
        longest = max(ask.total_tokens for ask in runs.sample)
        assert all(ask.total_tokens <= longest for asks in asked for ask in asks)
        rows = [one for repeat in (None, 0, 1, 2) if (one := runs.stretch(40, repeat)) is not None]
        assert len(rows) == 4
        assert not any(a.meets(b) for a, b in combinations(rows, 2))


@pytest.mark.parametrize("name", ["rag", "trace:mooncake"])
def test_no_run_asks_what_another_asked_the_same_server(tmp_path, name):
    """A prefix cache would answer faster at the second rate. What is shared within a run stays shared."""
    made = make(runs_of(tmp_path, Wanted(name=name)).asked(2.0, 0))
    found = [compare_points.with_own_text(made, "points", rate, repeat) for rate in (1.0, 2.0) for repeat in (0, 1)]
    seeds = [{one.seed for ask in workload.asks for one in ask.segments} for workload in found]
    assert all(a.isdisjoint(b) for a, b in combinations(seeds, 2))
    assert {len(one) for one in seeds} == {len({one.seed for ask in made.asks for one in ask.segments})}
    assert [ask.prompt_tokens for ask in found[0].asks] == [ask.prompt_tokens for ask in made.asks]
    assert compare_points.with_own_text(made, "points", 2.0, 1) == found[3]


@pytest.mark.parametrize("name", ["trace:mooncake", "mixed"])
def test_lengths_are_scaled_alike_in_all_runs(tmp_path, name):
    """Left open, the factor would be each run's own."""
    runs = runs_of(tmp_path, Wanted(name=name))
    notes = {make(runs.asked(rate, repeat)).notes[0] for rate in (1.0, 3.0) for repeat in (None, 0, 1)}
    assert len(notes) == 1
    assert notes.pop().startswith("all lengths times 0.")
    assert max(ask.total_tokens for ask in runs.sample) <= 1024


def test_a_seed_can_never_be_the_tunings(tmp_path):
    runs = runs_of(tmp_path, Wanted(name="chat", seed=7919))
    assert len({runs.asked(1.0, repeat).seed for repeat in (None, 0, 1, 2)}) == 4


@given(st.integers(1, 5000), st.integers(1, 400), st.integers(0, 15))
def test_a_stretch_lies_inside_the_trace(rows, count, run):
    found = stretch(rows, count, run)
    assert found.first >= 0
    assert found.count == min(count, rows)
    assert found.first + found.count <= rows


@given(st.integers(1, 400), st.integers(1, 16))
def test_stretches_are_apart_where_the_trace_has_twice_what_is_asked(count, runs):
    rows = 2 * count * runs
    found = [(str(run), stretch(rows, count, run)) for run in range(runs)]
    assert not any(a.meets(b) for (_, a), (_, b) in combinations(found, 2))
    assert "of its own" in told(rows, found)


def test_a_trace_that_is_too_short_is_said_to_be():
    text = told(50, [("tuning", stretch(50, 20, 0)), ("repeat 1", stretch(50, 40, 1))])
    assert "not long enough" in text
    assert "tuning and repeat 1 share" in text


def test_the_targets_come_from_an_unloaded_server_and_stay(tmp_path, arms):
    write_manifest(tmp_path, POOLS)
    found = only_the_targets(tmp_path)
    assert arms == [(COLOCATED, "1 x 2 threads")]
    assert found.slo.floor_s == 1.0
    assert found.slo.tpot_s > 0.625 * 0.039  # no gap of that server is shorter than its sleep
    assert only_the_targets(tmp_path).slo == found.slo


@pytest.fixture
def instant(monkeypatch):
    """Runs that take no time: every request is served within its targets, but those whose kind is in `failing`."""
    starts: list[str] = []
    failing: list[str] = []

    @contextmanager
    def serve(runs, variant):
        starts.append(variant.label)
        yield Target(url="http://127.0.0.1:1", openai=True)

    def driven(runs, target, workload, name, **more):
        records = tuple(
            Record(
                number=number, kind=ask.kind, scheduled_s=ask.at_s or 0.0, prompt_tokens=ask.prompt_tokens,
                max_tokens=ask.max_tokens, state="failed" if ask.kind in failing else "finished",
                reason="worker_died" if ask.kind in failing else "",
                at_s=() if ask.kind in failing else tuple((ask.at_s or 0.0) + 0.1 + 0.01 * i for i in range(2)),
                tokens=() if ask.kind in failing else (1, 1),
            )
            for number, ask in enumerate(workload.asks)
        )  # fmt: skip
        info = RunInfo(
            trtpd_records=FORMAT, workload=workload.name, seed=0, open_loop=True,
            offered_until_s=workload.duration_s or 1.0, interrupted=False,
        )  # fmt: skip
        return Driven(run=Run(info=info, records=records, health=HEALTH), cpu_s={}, client_nice=0, others_cores=0.0)

    monkeypatch.setattr(Runs, "serve", serve)
    monkeypatch.setattr(Runs, "drive", driven)
    return starts, failing


@pytest.mark.parametrize("lengths", [("32", "128"), ("128",)])
def test_no_target_comes_from_requests_that_failed(tmp_path, instant, lengths):
    write_manifest(tmp_path, POOLS)
    instant[1].extend(lengths)
    with pytest.raises(ServeError, match=rf"prompts of {lengths[0]} tokens in none of 3.*worker_died"):
        Comparer(options(tmp_path, wanted=Wanted(name="mixed", fit=LengthFit(scale=0.1))), lambda *_: None).run()
    assert not (tmp_path / "cmp" / "slo.json").exists()


def test_targets_of_a_disturbed_run_are_fixed_again_and_then_said_to_be(tmp_path, instant, monkeypatch):
    write_manifest(tmp_path, POOLS)
    with monkeypatch.context() as busy:
        busy.setattr(Runs, "fault", lambda *_: "other work took 1.00 of the 2 cores meanwhile")
        with pytest.raises(DisturbedError, match=r"no tuning run of colocated .*1 x 2 threads: other.*same command"):
            Comparer(options(tmp_path), lambda *_: None).run()
    assert instant[0] == ["1 x 2 threads"] * 4 + ["2 x 1 threads"] * 2  # two for the targets, two for each tuning
    found = Comparer(options(tmp_path), lambda *_: None).run()
    assert found.complete
    assert not any(choice.unusable for choice in found.choices)
    assert any("fixed the targets: disturbed" in line for line in compare_report.remarks(found))


def test_a_variant_whose_tuning_was_disturbed_twice_is_not_ranked_and_said_to_be(tmp_path, instant, monkeypatch):
    write_manifest(tmp_path, POOLS)
    monkeypatch.setattr(Runs, "fault", lambda *_: "other work" if instant[0][-1] == "1 x 2 threads" else "")
    found = Comparer(options(tmp_path), lambda *_: None).run()
    choice = found.choices[0]
    assert choice.variant == "2 x 1 threads"
    assert set(choice.tried) == {"2 x 1 threads"}
    assert choice.unusable == {"1 x 2 threads": "other work"}
    assert any("not ranked in tuning" in line and "1 x 2 threads" in line for line in compare_report.remarks(found))


@pytest.mark.parametrize("sent", [False, True])
def test_requests_carry_their_targets_in_loaded_runs_where_that_is_asked_for(tmp_path, instant, monkeypatch, sent):
    write_manifest(tmp_path, POOLS)
    seen: dict[str, set[bool]] = {}
    drive = Runs.drive

    def driven(runs, target, workload, name, **more):
        seen.setdefault(name.split()[-1], set()).add(more.get("targets") is not None)
        return drive(runs, target, workload, name, **more)

    monkeypatch.setattr(Runs, "drive", driven)
    found = Comparer(options(tmp_path, rates=(20.0,), repeats=1, send_targets=sent), lambda *_: None).run()
    assert found.plan.targets_sent is sent
    assert seen.pop("targets") == {False}  # the unloaded run fixes them
    assert seen.pop("written", {False}) == {False}
    assert seen
    assert all(one == {sent} for one in seen.values())
    with pytest.raises(InputError, match="targets_sent"):
        Comparer(options(tmp_path, rates=(20.0,), repeats=1, send_targets=not sent), lambda *_: None)


@pytest.mark.parametrize("rates", [(), (20.0, 40.0)])
def test_a_search_passes_over_what_cannot_be_used(tmp_path, instant, monkeypatch, rates):
    write_manifest(tmp_path, POOLS)
    names: list[str] = []
    drive = Runs.drive

    def driven(runs, target, workload, name, **more):
        names.append(name)
        return drive(runs, target, workload, name, **more)

    monkeypatch.setattr(Runs, "drive", driven)
    monkeypatch.setattr(Runs, "fault", lambda *_: "other work" * ("chunk" not in names[-1] and "repeat" in names[-1]))
    found = Comparer(options(tmp_path, rates=rates, repeats=2), lambda *_: None).run()
    assert found.complete
    assert all(bool(point.file.fault) == (point.file.arm == COLOCATED) for point in found.points)
    assert any(line.startswith("No usable run of colocated yet (") for line in verdict(found))


@pytest.mark.parametrize(("definition", "top"), [("trtpd", 40.0), ("mooncake", 40.0), ("distserve", 20.0)])
def test_a_comparison_is_by_the_definition_that_was_chosen(tmp_path, instant, monkeypatch, definition, top):
    """At the higher rate every sixth request fails: DistServe's goal of 90 % is missed, and nothing is gained there."""
    write_manifest(tmp_path, POOLS)
    drive = Runs.drive

    def driven(runs, target, workload, name, **more):
        found = drive(runs, target, workload, name, **more)
        hurt = (
            msgspec.structs.replace(one, state="failed") if " at 40" in name and one.number % 6 == 0 else one
            for one in found.run.records
        )
        return replace(found, run=replace(found.run, records=tuple(hurt)))

    monkeypatch.setattr(Runs, "drive", driven)
    found = Comparer(options(tmp_path, definition=definition), lambda *_: None).run()
    assert {point.definition for point in found.points} == {definition}
    assert best(found, SPLIT).rate == top
    missed = [point.good_per_s is None for point in found.points if point.file.rate == 40.0]
    assert missed == [definition == "distserve"] * 3


def command(tmp_path, *more) -> list[str]:
    build, folder = str(tmp_path / "build"), str(tmp_path / "cmp")
    usual = ["--workload", "chat", "--rates", "20", "--repeats", "1", "--point-s", "1", "--chunks", "64", "-o", folder]
    return ["compare", build, *usual, *more]


def test_ctrl_c_leaves_what_there_is_and_says_that_the_same_command_goes_on(tmp_path, instant, monkeypatch, capsys):
    write_manifest(tmp_path, POOLS)
    with monkeypatch.context() as patch:
        patch.setattr(Budget, "begin", interrupted_at(0))
        assert main(command(tmp_path)) == 130
        said = capsys.readouterr().err.splitlines()[-1]
        assert "interrupted before the targets were fixed" in said
        assert "the same command begins again" in said
        patch.setattr(Budget, "begin", interrupted_at(3))
        assert main(command(tmp_path, "--json")) == 130
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["end"]["how"] == "interrupted"
    assert "trtpd compare: interrupted after 0 s" in err
    assert "the same command goes on" in err
    assert "colocated, chunked: not tuned yet (no tuning runs there), not run at 20" in err
    assert {run["state"] for run in document["runs"]} == {"not run"}
    assert main(command(tmp_path)) == 0


def test_an_ended_budget_says_what_was_not_run_and_what_to_do(tmp_path, instant, monkeypatch, capsys):
    """Each run takes 100 s here; the tenth, the last point, does not fit."""
    write_manifest(tmp_path, POOLS)
    with monkeypatch.context() as patch:
        patch.setattr(Budget, "spent_s", property(lambda budget: 100.0 * budget.begun))
        assert main(command(tmp_path, "--budget-s", "910")) == 1
    out, err = capsys.readouterr()
    assert "the budget of 910 s ended after 900 s: the next run, disaggregated (" in err
    assert "with a larger --budget-s" in err
    assert "disaggregated: not run at 20" in err
    assert "No verdict yet: disaggregated has no usable run (the budget ended first)." in out
    runs = json.loads((tmp_path / "cmp" / "report.json").read_text())["runs"]
    assert [(run["arm"], run["state"]) for run in runs][2] == (SPLIT, "not run")
    assert "not run,the budget ended first" in (tmp_path / "cmp" / "points.csv").read_text()


def test_points_that_were_all_left_out_are_told_with_their_reasons(tmp_path, instant, monkeypatch, capsys):
    write_manifest(tmp_path, POOLS)
    tuned = len({"unloaded", *range(6)})
    monkeypatch.setattr(Runs, "fault", lambda *_: "other work took a core" if len(instant[0]) > tuned else "")
    assert main(command(tmp_path)) == 1
    out, err = capsys.readouterr()
    for arm in (COLOCATED, CHUNKED, SPLIT):
        assert f"left out: {arm} at 20 requests/s, repeat 1: other work took a core" in err
    assert "the same command makes what was left out once more" in err
    assert "No verdict yet: disaggregated has no usable run (1 left out: other work took a core)." in out


def test_a_budget_that_the_first_run_does_not_fit_into_is_refused_before_anything_runs(tmp_path, instant, capsys):
    write_manifest(tmp_path, POOLS)
    assert main(command(tmp_path, "--budget-s", "1")) == 2
    assert "--budget-s 1 is too short for anything: unloaded requests on colocated" in capsys.readouterr().err
    assert instant[0] == []
    assert main(command(tmp_path, "--budget-s", "25")) == 1  # the targets
    assert "to do at least: 1 unloaded run (4 s each), 6 tuning runs (1 s each)" in capsys.readouterr().err


def test_what_a_run_lasts_follows_from_its_requests(tmp_path):
    """Eight seconds at 0.8 requests/s would be six."""
    runs = replace(runs_of(tmp_path, Wanted(name="chat", fit=LengthFit(scale=0.05))), point_s=8.0)
    slo = LengthSlo(floor_s=1.0, factor=2.5, unloaded=((32, 0.1), (128, 0.2)), tpot_s=0.1)
    points = Points(runs=runs, folder=Folder(tmp_path), slo=slo)
    for kind in ("tuning", "points"):
        step = points.step(kind, VARIANT, 0.8, 0)
        assert step.arrive_s == pytest.approx(25.0)
        assert step.drain_s == points.patience_s
    assert points.step("tuning", VARIANT, 10.0, 0).arrive_s == pytest.approx(4.0)
    assert points.step("points", VARIANT, 10.0, 0).arrive_s == pytest.approx(8.0)


def test_runs_longer_than_was_asked_for_are_announced(tmp_path, instant):
    write_manifest(tmp_path, POOLS)
    said: list[str] = []
    Comparer(options(tmp_path, rates=(0.8,), point_s=8.0), lambda *_: None, say=said.append).run()
    assert "at 0.8 requests/s it lasts 25 s and not --point-s 8" in "\n".join(said[:4])
    steps = [line for line in said if line.startswith("[run ")]
    assert steps[1].startswith("[run 2 of at least 10; 0 of 600 s spent] colocated (1 x 2 threads)")
    assert "25 s of requests, then up to" in steps[1]


def test_no_server_is_started_for_a_run_that_does_not_fit(tmp_path, monkeypatch):
    starts = []
    monkeypatch.setattr(Runs, "serve", lambda runs, variant: starts.append(variant))
    runs = replace(runs_of(tmp_path, Wanted(name="chat")), budget=Budget(seconds=20.0))
    with runs.served_when_needed(VARIANT) as target_of, pytest.raises(OutOfBudgetError):
        target_of(Step(name="a run", arrive_s=8.0))  # it alone would fit, and so would the start of a server
    assert starts == []


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20), st.floats(0, 1), st.booleans()), max_size=30))
def test_a_budget_is_never_overrun_by_runs_that_keep_to_what_they_may_take(steps):
    now_s = [0.0]
    budget = Budget(seconds=100.0, clock=lambda: now_s[0])
    for arrive_s, drain_s, share, start in steps:
        step = Step(name="run", arrive_s=arrive_s, drain_s=drain_s)
        if now_s[0] + budget.needs_s(step, start=start) > 100.0:
            with pytest.raises(OutOfBudgetError):
                budget.begin(step, start=start)
            continue
        budget.begin(step, start=start)
        now_s[0] += share * budget.needs_s(step, start=start)
        assert now_s[0] <= 100.0 + 1e-9


def test_chunk_sizes_of_which_none_can_be_are_refused(tmp_path):
    manifest = read_manifest(write_manifest(tmp_path, POOLS))
    for chunks in ((), (1024, 4096)):
        with pytest.raises(InputError, match="at least one must be below the 1024 tokens"):
            variants(manifest, chunks=chunks)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--rates", "1e9"), "each must lie between 1e-06 and 1e+06, 1e+09 does not"),
        (("--rates", "0"), "0 does not"),
        (("--chunks", "0"), "each must lie between 1 and 1e+09"),
        (("--budget-s", "1e9"), "'1e9' is too large; it must be below 1e+09"),
        (("--point-s", "-1"), "'-1' is not a number of seconds above 0"),
        (("--repeats", "1234567890123"), "must have at most 12 digits"),
    ],
)
def test_an_option_out_of_bounds_is_told_the_bound_it_broke(tmp_path, capsys, more, said):
    assert main(command(tmp_path, *more)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--ttft-ms", "-1"), "'-1' is not a number of milliseconds above 0"),
        (("--tpot-ms", "1e12"), "must be below 1e+12"),
        (("--warm-up-s", "1e9"), "must be below 1e+09"),
        (("--time-scale", "1e9"), "above 0 and below 1e9"),
    ],
)
def test_a_target_out_of_bounds_is_told_the_bound_it_broke(capsys, more, said):
    assert main(["bench", "--workload", "trace:mooncake", *more]) == 2
    assert said in capsys.readouterr().err


def test_options_that_a_comparison_decides_itself_are_not_offered_and_refused_with_the_reason(tmp_path, capsys):
    assert main(["compare", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--requests", "--time-scale"):
        assert option not in shown
        assert main(command(tmp_path, option, "8")) == 2
        assert f"{option} would do nothing" in capsys.readouterr().err


def test_the_command_knows_all_definitions():
    assert set(perf_cli.DEFINITIONS) == set(DEFINITIONS)
