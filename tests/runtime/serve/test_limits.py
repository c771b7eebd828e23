"""What the router reads from a manifest's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from trtpd_testing.emulated_build import write_build

from trtpd.build.manifest import read_manifest
from trtpd.build.spec import parse_spec
from trtpd.runtime.serve.pipeline_model import limits_of

POOLS: dict[str, Any] = {"prefill": {}, "decode": {}}


@pytest.mark.parametrize(
    ("slo", "targets"), [({}, (None, None)), ({"ttft_ms": 500}, (0.5, None)), ({"tpot_ms": 80}, (None, 0.08))]
)
def test_targets_may_be_left_out_of_a_pipeline_file(tmp_path, slo, targets):
    build = write_build(tmp_path / "build", "prefill", "decode")
    spec = parse_spec({"model": "m", "pools": POOLS, "slo": slo})
    manifest = msgspec.structs.replace(read_manifest(build), settings=spec.model_dump(exclude_none=True))
    text: Any = SimpleNamespace(vocab_size=10)
    limits = limits_of(build, manifest, text)
    assert (limits.ttft_s, limits.tpot_s) == targets
