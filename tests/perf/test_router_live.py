"""The router's live measurement runs through real Triton and counts what went through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtpd.perf import router_live
from trtpd.perf.served import build, tiny_model


@pytest.mark.e2e
@pytest.mark.slow
def test_tokens_first_tokens_and_readers_are_measured(capsys: pytest.CaptureFixture[str], smollm2: Path) -> None:
    code = router_live.main(["--json", "--streams", "16", "--tokens", "40", "--interval", "4", "--model", str(smollm2)])
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"]["errors"] == 0
    assert 1 < found["tokens"]["tokens_per_response"] <= 8
    assert {"router", "Triton", "decode_0", "client"} <= found["tokens"]["cpu_cores"].keys()
    assert 0 < found["first_token"]["router_p50_ms"] < found["first_token"]["client_p50_ms"]
    assert found["readers"]["beside_p50_ms"] > 0


def test_a_pipeline_that_states_no_targets_builds_and_its_router_finds_none(tmp_path: Path, smollm2: Path) -> None:
    from trtpd.build.manifest import read_manifest
    from trtpd.runtime.serve.pipeline_model import limits_of
    from trtpd.runtime.serve.text import TextLayer

    plan = router_live.pipeline(
        tiny_model(tmp_path / "model", model=smollm2), streams=4, interval_tokens=8, decode_step_ms=1.0
    )
    made = build(tmp_path, plan)
    limits = limits_of(made, read_manifest(made), TextLayer(made / "tokenizer"))
    assert (limits.ttft_s, limits.tpot_s) == (None, None)
