from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from trtpd.perf import plots


def test_a_run_that_was_interrupted_before_anything_was_asked_has_its_plot():
    nothing = plots.Requests(due_s=[], ended_s=[], ttft_s=[], verdict=[])
    assert "<svg" in plots.svg(plots.run_over_time(nothing, warm_up_s=0.0))
