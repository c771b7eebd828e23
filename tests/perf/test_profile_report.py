"""What `trtpd profile` prints of a profile."""

from __future__ import annotations

from trtpd_testing.profiles import profile_data

from trtpd.build.cost_profile import CostProfile
from trtpd.perf.profile_report import HEADINGS, lines, rows


def test_every_point_stands_beside_its_fit_and_every_fit_with_its_errors() -> None:
    data = profile_data() | {"unavailable": {"transfer nixl": "it isn't installed"}}
    profile = CostProfile.model_validate(data)
    table = rows(profile)
    assert {len(row) for row in table} == {len(HEADINGS)}
    assert table[1] == ("decode", "decode 64x2", "12.00", "12.00", "+0.0%", "0.0%", "3")
    said = "\n".join(lines(profile))
    assert "decode: prefill step 0.0 ms + 1000 us a token" in said
    assert "error p50 1.0%, p95 5.0%, worst 6.0% over 6 points" in said
    assert "shm: 1.00 ms + 2.00 GB/s" in said
    assert "transfer nixl: not measured, it isn't installed" in said
    assert "both in one step" not in said


def test_what_has_too_few_points_has_no_fit_and_says_how_many_it_has_and_needs() -> None:
    data = profile_data()
    data["engines"]["decode"]["fit"] = None
    profile = CostProfile.model_validate(data)
    assert rows(profile)[1].fitted == "-"
    assert "decode: no fit: 0 of prefill and 1 of decode measured, and it needs 3 of each" in lines(profile)


def test_a_path_without_a_rate_says_so() -> None:
    data = profile_data()
    data["transfers"]["shm"]["fit"] = None
    said = lines(CostProfile.model_validate(data))
    assert "shm: no rate: 1 size was measured, and it needs 2" in said
    (point,) = data["transfers"]["shm"]["points"]
    data["transfers"]["shm"]["points"] = [point, point | {"bytes": 8192}]
    assert "shm: no rate: larger hand-offs took no longer" in lines(CostProfile.model_validate(data))
