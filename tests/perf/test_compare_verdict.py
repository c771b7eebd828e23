from __future__ import annotations

import csv
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpd.perf import compare_report
from trtpd.perf.client_health import ClientHealth
from trtpd.perf.compare_arms import CHUNKED, COLOCATED, SPLIT
from trtpd.perf.compare_ending import run_states
from trtpd.perf.compare_ratio import LEAST_APART, ratio_at, ratio_of_bests
from trtpd.perf.compare_tables import goodput_table, points_csv
from trtpd.perf.comparison import Choice, Comparison, End, Plan, Point, PointFile
from trtpd.perf.environment import this_environment
from trtpd.perf.goodput import account
from trtpd.perf.records import Record, ServerTimes
from trtpd.perf.slo import LengthSlo
from trtpd.perf.stages import first_token, handed_off
from trtpd.perf.verdict import best, verdict

SLO = LengthSlo(floor_s=1.0, factor=2.5, unloaded=((32, 0.1), (128, 0.2)), tpot_s=0.1)
HEALTH = ClientHealth(
    late_p50_s=0.0, late_p99_s=0.0, late_largest_s=0.0, lag_p99_s=0.0, lag_largest_s=0.0, cpu_share=0.1,
    loop_cpu_share=0.1, wall_s=20.0, responses=40,
)  # fmt: skip
ENVIRONMENT = this_environment()


def record(number: int, at_s: float, good: bool, **more) -> Record:
    ttft_s = 0.5 if good else 5.0
    return Record(
        number=number, kind="chat", scheduled_s=at_s, sent_s=at_s, ended_s=at_s + 9.0, prompt_tokens=16, max_tokens=2,
        state="finished", at_s=(at_s + ttft_s, at_s + ttft_s + 0.01), tokens=(1, 1), **more,
    )  # fmt: skip


def point(arm, rate, repeat, flags, *, fault="", figures=None) -> Point:
    """A run whose counted requests are served well as `flags` say; those of the warm-up before them never are. Of
    `figures` that are given only the warm-up and the window are made to fit."""
    counted, cut = len(flags), max(1, len(flags) // 9)
    due = [n / rate for n in range(counted + cut)]
    until_s = due[-1] + 0.5 / rate
    warm_up_s = due[cut] - 0.5 / rate
    records = tuple(record(n, at, n >= cut and bool(flags[n - cut])) for n, at in enumerate(due))
    file = PointFile(
        arm=arm, variant="v", rate=rate, repeat=repeat, until_s=until_s, health=HEALTH, cpu_s={}, fault=fault
    )
    if figures is None:
        figures = account(records, SLO, until_s=until_s, warm_up_s=warm_up_s)
    else:
        figures = msgspec.structs.replace(figures, warm_up_s=warm_up_s, window_s=until_s - warm_up_s)
    return Point(file=file, records=records, figures=figures)


FIGURES = account([], SLO, until_s=1.0)
ARMS = (COLOCATED, CHUNKED, SPLIT)


def comparison(*points: Point, definition="trtpd") -> Comparison:
    plan = Plan(
        fingerprint="f", workload="chat", seed=0, point_s=20.0, cores=(0, 1), chunks=(64,), definition=definition
    )
    points = tuple(replace(one, figures=msgspec.structs.replace(one.figures, definition=definition)) for one in points)
    rates = tuple(sorted({one.file.rate for one in points}))
    choices = tuple(Choice(arm=arm, variant="v", tried={}) for arm in ARMS)
    return Comparison(
        plan=plan,
        slo=SLO,
        rates=rates,
        choices=choices,
        points=points,
        interference={},
        environment=ENVIRONMENT,
        notes=(),
        runs=run_states(ARMS, choices, points, rates, 1, searched=False, how="complete"),
    )


def flags(seed: int, share: float, count: int = 60) -> list[bool]:
    return [bool(one) for one in np.random.default_rng(seed).random(count) < share]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=3, max_size=80), st.integers(1, 3))
def test_arms_that_serve_the_same_are_never_told_apart(good, repeats):
    both = [point(arm, 1.0, n, good, figures=FIGURES) for arm in (SPLIT, COLOCATED) for n in range(repeats)]
    ratio = ratio_at(comparison(*both), SPLIT, COLOCATED, 1.0)
    assert ratio.low == ratio.value == ratio.high == 1.0
    assert ratio.word == "not shown"


def test_arms_alike_but_for_chance_are_seldom_told_apart():
    """Two repeats of 60 requests, each served well or not by itself: the interval holds 1 about 19 times in 20."""
    words = []
    for seed in range(100):
        runs = [
            point(arm, 1.0, n, flags(4 * seed + 2 * n + number, 0.6), figures=FIGURES)
            for number, arm in enumerate((SPLIT, COLOCATED))
            for n in range(2)
        ]
        words.append(ratio_at(comparison(*runs), SPLIT, COLOCATED, 1.0).word)
    assert words.count("not shown") >= 90


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([1.0, 1.5]))
def test_a_clear_difference_is_seen_from_both_sides(seed, split_rate):
    """At one rate, and between best rates that differ."""
    runs = [point(SPLIT, split_rate, n, flags(seed + n, 0.9), figures=FIGURES) for n in range(2)]
    runs += [point(COLOCATED, 1.0, n, flags(seed + 9 + n, 0.3), figures=FIGURES) for n in range(2)]
    rates = [split_rate], [1.0]
    ratio = ratio_of_bests(comparison(*runs), SPLIT, COLOCATED, rates)
    assert ratio.word == "ahead"
    assert 1.0 < ratio.low <= ratio.value <= ratio.high
    back = ratio_of_bests(comparison(*runs), COLOCATED, SPLIT, rates[::-1])
    assert back.word == "behind"
    assert back.value == pytest.approx(1.0 / ratio.value)


@given(st.integers(1, LEAST_APART - 1))
@settings(deadline=None)
def test_too_few_requests_show_nothing_however_clear_they_look(alone):
    runs = [point(SPLIT, 1.0, 0, [True] * alone + [False] * 20), point(COLOCATED, 1.0, 0, [False] * (alone + 20))]
    assert ratio_at(comparison(*runs), SPLIT, COLOCATED, 1.0).word == "not shown"


def test_the_same_requests_weigh_alike_for_both_arms():
    """Where one arm serves all the other does and a few more, chance in which requests there were does not blur it."""
    other = flags(1, 0.5, 90)
    mine = [good or number % 5 == 0 for number, good in enumerate(other)]
    runs = [point(SPLIT, 1.0, 0, mine), point(COLOCATED, 1.0, 0, other)]
    assert ratio_at(comparison(*runs), SPLIT, COLOCATED, 1.0).low > 1.0
    apart = [point(SPLIT, 1.0, 0, mine), point(COLOCATED, 1.1, 0, other)]
    assert ratio_of_bests(comparison(*apart), SPLIT, COLOCATED, ([1.0], [1.1])).low < 1.0


def text_of(*points: Point, definition="trtpd") -> str:
    return "\n".join(verdict(comparison(*points, definition=definition)))


def test_only_arms_that_were_measured_at_a_rate_are_compared_there():
    good, bad = [True] * 30, [False] * 25 + [True] * 5
    text = text_of(
        point(SPLIT, 1.0, 0, good), point(COLOCATED, 1.0, 0, bad), point(CHUNKED, 0.5, 0, [True] * 20)
    )  # fmt: skip
    assert "both" not in text
    assert re.search(r"disaggregated beside colocated: ahead at 1 requests/s, 6 times", text)
    assert "Beside colocated, chunked: measured at no rate in common." in text


def test_a_rate_with_fewer_runs_is_told_beside_those_that_count():
    none, good = [False] * 30, [True] * 30
    runs = [point(COLOCATED, 2.0, n, none) for n in range(2)] + [point(COLOCATED, 1.0, 0, good)]
    text = text_of(*runs, *(point(SPLIT, 2.0, n, good) for n in range(2)))
    assert "any rate" not in text
    assert "no request within the targets of 2 requests/s offered (2 runs), though 1 of 1 (1 run)" in text


def swapped(one: Point) -> Point:
    arm = SPLIT if one.file.arm == COLOCATED else COLOCATED
    return replace(one, file=msgspec.structs.replace(one.file, arm=arm))


def test_one_run_each_pays_only_if_its_requests_show_it():
    little = [point(SPLIT, 1.0, 0, flags(1, 0.5, 40)), point(COLOCATED, 1.0, 0, flags(2, 0.45, 40))]
    assert "Against colocated, it is not shown whether disaggregation pays here" in text_of(*little)
    much = [point(SPLIT, 1.0, 0, flags(1, 0.95, 40)), point(COLOCATED, 1.0, 0, flags(2, 0.3, 40))]
    assert "Against colocated, disaggregation pays here" in text_of(*much)
    assert "Against colocated, disaggregation does not pay here" in text_of(*(swapped(one) for one in much))
    assert re.search(r"times \(95 %: [\d.]+ to [\d.]+\); aim 2:", text_of(*much))


def test_faulted_runs_count_nowhere():
    runs = [point(SPLIT, 1.0, 0, [True] * 30), point(COLOCATED, 1.0, 0, [True] * 30, fault="other work")]
    assert "No verdict yet: colocated has no usable run" in text_of(*runs)


def test_a_run_that_was_not_made_one_left_out_and_one_that_served_nothing_are_told_apart():
    runs = [
        point(SPLIT, 1.0, 0, [True] * 30), point(SPLIT, 2.0, 0, [False] * 30),
        point(COLOCATED, 1.0, 0, [True] * 30, fault="other work"),
    ]  # fmt: skip
    found = comparison(*runs)
    states = {
        (SPLIT, 1.0): ("measured", ""),
        (SPLIT, 2.0): ("served nothing", ""),
        (COLOCATED, 1.0): ("left out", "other work"),
        (COLOCATED, 2.0): ("not run", "away from this arm's best"),
    }
    listed = {(run["arm"], run["rate"]): run for run in compare_report.document(found)["runs"]}
    lines = {
        (line["arm"], float(line["rate"])): line for line in csv.DictReader(points_csv(found).decode().splitlines())
    }
    for run, (state, reason) in states.items():
        for told in (listed[run], lines[run]):
            assert (told["state"], told["reason"]) == (state, reason)
    assert lines[SPLIT, 2.0]["good"] == "0"
    assert lines[COLOCATED, 2.0]["good"] == ""
    assert {row[0]: row[1:] for row in goodput_table(found).rows}["1"][0] == "left out"


def test_six_lines_say_who_wins_by_how_much_where_and_why():
    good, bad = [True] * 30, [False] * 25 + [True] * 5
    runs = [point(SPLIT, rate, n, good) for rate in (1.0, 2.0) for n in range(2)]
    runs += [point(arm, 1.0, n, good) for arm in (COLOCATED, CHUNKED) for n in range(2)]
    runs += [point(arm, 2.0, n, bad) for arm in (COLOCATED, CHUNKED) for n in range(2)]
    lines = verdict(replace(comparison(*runs), end=End(how="budget")))
    assert len(lines) <= 6
    assert lines[0].startswith("Against colocated, disaggregation pays here: 2 times (95 %: ")
    assert "At best 2 requests/s within targets of 2 offered (2 runs) against 1" in lines[0]
    assert "disaggregated beside colocated: no difference shown at 1 requests/s, 1 times" in lines[2]
    assert "ahead at 2 requests/s, 6 times" in lines[2]
    assert "disaggregated none of 60 at 2 requests/s" in lines[3]
    assert "colocated 50 of 60 at 2 requests/s (first token late 50)" in lines[3]
    assert "may change when the same command goes on" in lines[-1]


@pytest.mark.parametrize(("served", "hint"), [(29, "only higher ones"), (1, "only lower ones"), (15, "")])
def test_rates_that_can_tell_nothing_apart_are_said_to_be_too_low_or_too_high(served, hint):
    text = text_of(*(point(arm, 1.0, 0, [n < served for n in range(30)]) for arm in ARMS))
    assert ("could tell them apart" in text) == bool(hint)
    assert hint in text


def distserve_runs():
    served = {SPLIT: {1.0: 1.0, 2.0: 0.95, 3.0: 0.5}, COLOCATED: {1.0: 0.95, 2.0: 0.6, 3.0: 0.2}}
    return [
        point(arm, rate, 0, [n >= 60 * (1 - share) for n in range(60)])
        for arm, rates in served.items()
        for rate, share in rates.items()
    ]


def test_by_a_definition_with_a_goal_only_rates_that_meet_it_count():
    found = comparison(*distserve_runs(), definition="distserve")
    assert best(found, SPLIT).rate == 2.0
    assert best(found, COLOCATED).rate == 1.0
    assert "against 1 requests/s within targets of 1 offered (1 run)" in "\n".join(verdict(found))
    missed = [one for one in distserve_runs() if one.file.arm == SPLIT or one.file.rate > 1.0]
    assert "less than 90% within the targets of 2, 3 requests/s offered (1 run each)" in text_of(
        *missed, definition="distserve"
    )


def test_a_missed_goal_is_a_dash_in_the_report_and_an_empty_cell_in_the_table(tmp_path):
    found = comparison(*distserve_runs(), definition="distserve")
    page = compare_report.write(tmp_path, found, command="trtpd compare").read_text()
    assert "at least 90% of the requests meet both targets" in page
    rows = dict((row[0], row[1:]) for row in goodput_table(found).rows)
    assert rows["3"] == ("–", "not run", "–")
    assert rows["best"] == ("1", "–", "2")
    lines = csv.DictReader(points_csv(found).decode().splitlines())
    columns = next(line for line in lines if line["arm"] == COLOCATED and line["rate"] == "3.0")
    assert columns["goodput_per_s"] == ""
    assert columns["good"] == "12"


def test_headings_come_only_with_their_plots(tmp_path):
    runs = [point(SPLIT, 1.0, 0, [True] * 30), point(COLOCATED, 1.0, 0, [True] * 30)]
    page = compare_report.write(tmp_path, comparison(*runs), command="trtpd compare").read_text()
    assert "Four answers" not in page
    assert "Where the time to the first token goes" not in page
    assert "Disaggregated beside the others" in page


def test_parts_of_the_first_token_are_means_over_the_same_requests():
    """90 served in one place and 10 handed off, all with a first token after 100 ms."""
    local = ServerTimes(queue_s=0.02, ttft_s=0.1)
    moved = ServerTimes(queue_s=0.02, prefill_s=0.08, ttft_s=0.1, transfer_bytes=1, transfer_s=0.2, exposed_s=0.1)
    records = [
        replace_times(record(n, float(n), True, server=local if n < 90 else moved), 0.1) for n in range(100)
    ]  # fmt: skip
    found = first_token(records)
    assert sum(found.parts_ms.values()) == pytest.approx(100.0)
    assert found.parts_ms["prefill"] == pytest.approx(80.0)
    hand_off = handed_off(records)
    assert (hand_off.moved, hand_off.requests) == (10, 100)
    assert hand_off.mean_ms == pytest.approx(10.0)
    assert hand_off.moved_ms == pytest.approx(100.0)
    assert hand_off.share_of_prefill == pytest.approx(1.25)
    assert first_token([record(0, 0.0, True)]) is None


def replace_times(one: Record, ttft_s: float) -> Record:
    return msgspec.structs.replace(one, at_s=(one.scheduled_s + ttft_s, one.scheduled_s + ttft_s + 0.01))
