from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpd.errors import InputError
from trtpd.perf.bench_report import counted_text
from trtpd.perf.goodput import DEFINITIONS, Deployment, account, attainment_over_scale
from trtpd.perf.records import Record, RunInfo, load_records, save_records
from trtpd.perf.resampling import distribution, drift, grouped_distribution, share, share_drift
from trtpd.perf.slo import FixedSlo, LengthSlo

STATES = ["finished", "refused", "failed", "cancelled", "unmeasured"]
SLO = FixedSlo(ttft_s=1.0, tpot_s=0.1)


def record(number: int, *, at=(0.5, 0.55, 0.6), tokens=None, due=0.0, state="finished", **more) -> Record:
    at_s = tuple(due + one for one in at)
    return Record(
        number=number,
        kind="chat",
        scheduled_s=due,
        sent_s=due,
        prompt_tokens=100,
        max_tokens=10,
        state=state,
        at_s=at_s,
        tokens=tuple(tokens or (1,) * len(at_s)),
        **more,
    )


@st.composite
def records(draw) -> list[Record]:
    found = []
    for number in range(draw(st.integers(1, 40))):
        gaps = draw(st.lists(st.floats(0.0, 0.4), max_size=12))
        found.append(
            record(
                number,
                at=tuple(np.cumsum(gaps).tolist()),
                tokens=tuple(draw(st.integers(1, 3)) for _ in gaps),
                due=draw(st.floats(0.0, 59.0)),
                state=draw(st.sampled_from(STATES)),
                reason="r",
            )
        )
    return found


@settings(deadline=None, max_examples=30)
@given(found=records())
def test_every_offered_request_has_one_verdict_and_goodput_counts_the_good_of_all(found):
    figures = account(found, SLO, until_s=60.0, warm_up_s=0.0, deployment=Deployment(units=4))
    assert figures.offered == len(found) == sum(figures.verdicts.values())
    assert sum(sum(kind.values()) for kind in figures.kinds.values()) == len(found)
    by_hand = [
        r
        for r in found
        if r.state == "finished" and r.at_s and r.ttft_s <= 1.0
        if r.output_tokens < 2 or (len(r.at_s) > 1 and r.tpot_s <= 0.1)
    ]
    goodput = figures.goodput["trtpd"]
    assert figures.verdicts.get("good", 0) == goodput.good == len(by_hand)
    assert goodput.per_s.value == pytest.approx(len(by_hand) / 60.0)
    assert goodput.per_unit == pytest.approx(len(by_hand) / 60.0 / 4)
    assert goodput.attainment.value <= figures.completion.value + 1e-12
    for state in STATES[1:]:
        assert figures.verdicts.get(f"{state}:r", 0) == sum(r.state == state for r in found)
    in_one = sum(r.state == "finished" and r.output_tokens > 1 == len(r.at_s) and r.ttft_s <= 1.0 for r in found)
    assert figures.verdicts.get("unmeasured:one_response", 0) == in_one


@settings(deadline=None, max_examples=20)
@given(found=records())
def test_the_definitions_differ_only_as_they_say(found):
    figures = account(found, SLO, until_s=60.0, warm_up_s=0.0)
    ours, distserve, mooncake = (figures.goodput[name] for name in ("trtpd", "distserve", "mooncake"))
    assert ours.good == distserve.good
    assert mooncake.good <= ours.good
    assert (distserve.per_s is None) == (ours.good / len(found) < 0.9)
    if distserve.per_s is not None:
        assert distserve.per_s.value == pytest.approx(figures.offered_per_s)


@settings(deadline=None, max_examples=20)
@given(found=records(), scales=st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6))
def test_looser_targets_never_serve_fewer(found, scales):
    for definition in DEFINITIONS:
        curve = attainment_over_scale(found, SLO, sorted(scales), warm_up_s=0.0, definition=definition)
        shares = [one for _, one in curve]
        assert shares == sorted(shares)


def test_mooncakes_pace_is_the_mean_of_the_longest_tenth_of_the_gaps():
    gaps = [0.01] * 18 + [0.5, 0.3]
    one = record(0, at=tuple(np.cumsum([0.2, *gaps])))
    assert one.longest_gaps_s == pytest.approx(0.4)
    assert DEFINITIONS["trtpd"].verdict(one, SLO) == "good"
    assert DEFINITIONS["mooncake"].verdict(one, SLO) == "late:tpot"


def test_nothing_known_is_none_and_not_zero():
    refused = [record(n, at=(), state="refused", reason="saturated") for n in range(3)]
    figures = account(refused, SLO, until_s=10.0, warm_up_s=0.0)
    assert figures.ttft is figures.tpot is figures.itl is figures.second_token is figures.tpot_spread is None
    assert figures.goodput["trtpd"].per_s.value == 0.0
    assert figures.goodput["trtpd"].per_unit is None
    assert figures.goodput["distserve"].per_s is None
    assert figures.verdicts == {"refused:saturated": 3}
    empty = account([], SLO, until_s=0.0)
    assert empty.completion is empty.offered_per_s is empty.goodput["trtpd"].per_s is None


def test_a_finished_request_without_a_token_is_unmeasured_and_one_with_a_single_token_has_no_pace():
    assert DEFINITIONS["trtpd"].verdict(record(0, at=()), SLO) == "unmeasured:no_token"
    single = record(0, at=(0.4,))
    assert single.tpot_s is None
    assert DEFINITIONS["trtpd"].verdict(single, SLO) == "good"


def test_latency_runs_from_the_instant_a_request_was_due():
    late = msgspec.structs.replace(record(0, at=(3.0, 3.05), due=0.0), sent_s=2.9)
    assert late.ttft_s == pytest.approx(3.0)
    assert late.lateness_s == pytest.approx(2.9)
    assert DEFINITIONS["trtpd"].verdict(late, SLO) == "late:ttft"


def test_tokens_of_one_response_came_at_one_instant():
    one = record(0, at=(1.0, 2.0, 4.0), tokens=(1, 3, 2))
    assert one.gaps_s() == [1.0, 0.0, 0.0, 2.0, 0.0]
    assert one.tpot_s == pytest.approx(3.0 / 5)
    assert one.second_token_s == 1.0


def test_an_answer_that_came_in_one_response_has_no_pace_and_is_not_good_by_a_target_for_it():
    found = [record(n, due=float(n), at=(0.5,), tokens=(100,)) for n in range(20)]
    for one in (found[0], record(0, at=(0.5,), tokens_guessed=True)):
        assert one.tpot_s is one.second_token_s is one.longest_gaps_s is None
        assert one.gaps_s() == []
        for definition in DEFINITIONS.values():
            assert definition.verdict(one, SLO) == "unmeasured:one_response"
            assert definition.verdict(one, FixedSlo(ttft_s=0.4, tpot_s=0.1)) == "late:ttft"
            assert definition.verdict(one, FixedSlo(ttft_s=1.0)) == "good"
    figures = account(found, SLO, until_s=20.0, warm_up_s=0.0)
    assert figures.tpot is figures.itl is figures.second_token is figures.response_gap is None
    assert figures.goodput["trtpd"].good == 0
    assert figures.ttft.p50.value == pytest.approx(0.5)


def test_the_warm_up_is_cut_and_counted():
    found = [record(n, due=float(n)) for n in range(20)]
    figures = account(found, SLO, until_s=20.0, warm_up_s=5.0)
    assert (figures.cut, figures.offered, figures.window_s) == (5, 15, 15.0)
    assert account(found, SLO, until_s=20.0).warm_up_s == 2.0
    with pytest.raises(InputError, match="leaves nothing"):
        account(found, SLO, until_s=20.0, warm_up_s=20.0)


def test_even_arrivals_are_counted_at_the_rate_they_came_at():
    found = [record(n, due=float(n)) for n in range(20)]
    for due in (0.0, 1.0):  # the gap before the first is in the run, or one behind the last is missing
        moved = [msgspec.structs.replace(one, scheduled_s=one.scheduled_s + due) for one in found]
        figures = account(moved, SLO, until_s=19.0 + due, warm_up_s=0.0)
        assert figures.window_s == 20.0
        assert figures.offered_per_s == 1.0
        assert figures.goodput["distserve"].per_s.value == 1.0
    assert account(found, SLO, until_s=19.0, warm_up_s=5.0).offered_per_s == 1.0
    assert account(found, SLO, until_s=40.0, warm_up_s=0.0).window_s == 40.0  # a closed loop's last answer
    assert account(found[:1], SLO, until_s=0.0, warm_up_s=0.0).offered_per_s is None


def test_a_report_says_how_many_requests_there_were_and_why_some_are_not_counted():
    found = [record(n, due=float(n)) for n in range(20)]
    assert counted_text(20, account(found, SLO, until_s=20.0, warm_up_s=0.0)) == "20, all counted"
    cut = counted_text(23, account(found, SLO, until_s=20.0, warm_up_s=5.0))
    assert cut.startswith("23 in all, 15 counted; not counted: 5 due in the warm-up, the first 5 s (--warm-up-s 0")
    assert cut.endswith("3 not yet due when the run was interrupted")


def test_a_run_that_gets_slower_is_flagged_and_a_steady_one_is_not():
    rng = np.random.default_rng(0)
    noise = rng.uniform(0.9, 1.1, 300)
    assert not drift(list(noise), rng).flagged
    growing = drift(list(noise * np.linspace(1, 4, 300)), rng)
    assert growing.flagged
    assert growing.change.low > 1.25
    assert (growing.first, growing.last) == (pytest.approx(1.5, rel=0.1), pytest.approx(3.5, rel=0.1))
    assert drift(list(noise[:10]), rng) is None


def test_a_run_that_stops_serving_is_flagged_although_those_that_finished_look_steady():
    found = [record(n, due=float(n)) for n in range(100)]
    found += [record(n, due=float(n), at=(), state="failed", reason="x") for n in range(100, 200)]
    figures = account(found, SLO, until_s=200.0, warm_up_s=0.0)
    assert not figures.drift["ttft"].flagged
    drifted = figures.drift["attainment"]
    assert (drifted.first, drifted.last, drifted.flagged) == (1.0, 0.0, True)
    assert drifted.change.value == -1.0
    assert drifted.change.high < -0.9


def test_a_share_that_stays_is_hardly_ever_called_drifting():
    drifts = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        drifts.append(share_drift(list(rng.random(90) < 0.8), rng))
    assert sum(one.flagged for one in drifts) <= 2
    assert sum(one.change.low <= 0.0 <= one.change.high for one in drifts) >= 93
    assert share_drift([True] * 29, np.random.default_rng(0)) is None


@given(values=st.lists(st.floats(0.001, 100.0), min_size=1, max_size=200))
def test_percentiles_are_numpys_and_lie_in_their_intervals(values):
    found = distribution(values, np.random.default_rng(1))
    for percent, interval in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert interval.value == pytest.approx(np.percentile(values, percent))
        assert interval.low is None or interval.low <= interval.value
        assert interval.high is None or interval.value <= interval.high
    assert found.largest == max(values)


def test_an_interval_of_the_mean_holds_the_truth_about_as_often_as_it_says():
    inside = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        interval = share(list(rng.random(400) < 0.7), rng)
        inside += interval.low <= 0.7 <= interval.high
    assert 186 <= inside <= 199


def test_gaps_of_a_request_are_drawn_together():
    groups = [[0.1] * 50] * 20 + [[1.0] * 50]
    found = grouped_distribution(groups, np.random.default_rng(0))
    assert found.count == 21 * 50
    assert found.p50.value == 0.1
    assert found.p99.low == 0.1  # a resample without the slow request has no slow gap
    assert found.p99.high is None  # and one slow request in 21 says nothing of how slow others are


def test_targets_by_length_follow_the_measured_points_and_never_fall_below_the_floor():
    slo = LengthSlo(floor_s=1.0, factor=2.5, unloaded=((100, 0.1), (1000, 1.0)), tpot_s=0.2)
    assert slo.ttft_for(50) == 1.0
    assert slo.ttft_for(1000) == pytest.approx(2.5)
    assert slo.ttft_for(2000) == pytest.approx(5.0)
    assert slo.scaled(2.0).ttft_for(1000) == pytest.approx(5.0)
    assert slo.scaled(2.0).tpot_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: FixedSlo(ttft_s=0.0), "above 0"),
        (lambda: FixedSlo(tpot_s=float("inf")), "above 0"),
        (lambda: LengthSlo(floor_s=1.0, factor=2.0, unloaded=((5, 1.0),)), "two or more"),
        (lambda: Deployment(units=0), "at least 1"),
    ],
)
def test_targets_and_deployments_that_make_no_sense_are_refused(make, fault):
    with pytest.raises(InputError, match=fault):
        make()


@settings(deadline=None, max_examples=10)
@given(found=records())
def test_records_survive_their_file(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "r.jsonl.gz"
    info = RunInfo(trtpd_records=1, workload="w", seed=1, open_loop=True, offered_until_s=60.0, interrupted=False)
    save_records(path, info, found)
    assert load_records(path) == (info, found)


def test_figures_are_the_same_for_the_same_records():
    found = [record(n, due=n * 0.1, at=(0.2 + n * 0.01, 0.3 + n * 0.02)) for n in range(50)]
    assert account(found, SLO, until_s=5.0) == account(found, SLO, until_s=5.0)
