from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from trtpd_testing.fake_servers import fake_openai

from trtpd.build.manifest import MANIFEST, read_manifest
from trtpd.errors import InputError
from trtpd.perf import compare_points, compare_report, compare_targets, interference
from trtpd.perf.bench import Target
from trtpd.perf.client import Run
from trtpd.perf.client_health import LATE_FLOOR_S, ClientHealth, late_limit_for
from trtpd.perf.compare import CompareOptions, Comparer
from trtpd.perf.compare_arms import CHUNKED, COLOCATED, OUTSIDE, SPLIT, Variant, cores_of, next_variant, variants
from trtpd.perf.compare_folder import Folder
from trtpd.perf.compare_points import Points
from trtpd.perf.compare_runs import Runs
from trtpd.perf.comparison import PointFile
from trtpd.perf.goodput import account
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import Wanted
from trtpd.perf.priority import AUTOGROUP, before_others
from trtpd.perf.records import FORMAT, Record, RunInfo
from trtpd.perf.slo import FixedSlo, LengthSlo
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
        end_s=0.0,
        progress=lambda *_: None,
    )
    slo = LengthSlo(floor_s=1.0, factor=2.5, unloaded=((32, 0.1), (128, 0.2)), tpot_s=0.1)
    points = Points(runs=runs, folder=Folder(tmp_path), slo=slo, cores=2)
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
    monkeypatch.setattr(compare_points, "refuse_if_bottleneck", lambda *_: None)
    monkeypatch.setattr(compare_points, "OTHERS_SHARE", 99.0)
    monkeypatch.setattr(interference, "FIRST_PROMPT_S", 0.2)
    monkeypatch.setattr(interference, "LEAST_PAUSE_S", 0.2)
    monkeypatch.setattr(compare_targets, "FACTOR", 0.625)  # of a colocated gap: between the other two
    return starts


def options(tmp_path, **more) -> CompareOptions:
    wanted = Wanted(name="mixed", fit=LengthFit(scale=0.02))
    defaults: dict[str, Any] = {"rates": (20.0, 40.0), "repeats": 1, "point_s": 0.5, "budget_s": 600.0, "chunks": (64,)}
    return CompareOptions(build=tmp_path / "build", wanted=wanted, folder=tmp_path / "cmp", **(defaults | more))


@pytest.mark.slow
def test_a_comparison_measures_all_arms_says_what_it_found_and_goes_on_where_it_stopped(tmp_path, arms):
    write_manifest(tmp_path, POOLS)
    first = Comparer(options(tmp_path, budget_s=1.0), lambda *_: None).run()
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
    with pytest.raises(InputError, match="another comparison"):
        Comparer(options(tmp_path, point_s=0.7), lambda *_: None)


@pytest.mark.slow
def test_a_run_that_other_work_disturbed_is_made_again_before_anything_follows_from_it(tmp_path, arms, monkeypatch):
    """Here that is the first run of each kind, arm and rate."""
    made: set[tuple[object, ...]] = set()
    calm = []
    measure = Points.measure

    def measured(points, kind, variant, target, rate, repeat):
        calm.append((kind, variant.label, rate, repeat) in made)
        made.add((kind, variant.label, rate, repeat))
        return measure(points, kind, variant, target, rate, repeat)

    monkeypatch.setattr(Points, "measure", measured)
    monkeypatch.setattr(Points, "_fault", lambda *_: "" if calm[-1] else "other work took a core meanwhile")
    write_manifest(tmp_path, POOLS)
    whole = Comparer(options(tmp_path), lambda *_: None).run()
    assert whole.complete
    assert len(whole.points) == 6
    assert [point.file.fault for point in whole.points] == [""] * 6
    tuned = {run for run in made if run[0] == "tuning"}
    assert tuned
    assert len(calm) == 2 * len(made) == 2 * (6 + len(tuned))


def test_the_targets_come_from_an_unloaded_server_and_stay(tmp_path, arms):
    write_manifest(tmp_path, POOLS)
    found = Comparer(options(tmp_path, budget_s=1.0), lambda *_: None).run()
    assert arms == [(COLOCATED, "1 x 2 threads")]
    assert found.slo.floor_s == 1.0
    assert found.slo.tpot_s > 0.625 * 0.039  # no gap of that server is shorter than its sleep
    assert Comparer(options(tmp_path, budget_s=1.0), lambda *_: None).run().slo == found.slo
