from __future__ import annotations

import msgspec
import pytest
from trtpd_testing.emulated_build import write_build

from trtpd.build.manifest import read_manifest
from trtpd.build.spec import parse_spec
from trtpd.runtime.serve.pipeline_model import limits_of, policy_of
from trtpd.runtime.serve.text import TextLayer


@pytest.mark.parametrize(
    ("slo", "expected"), [({}, (None, None)), ({"ttft_ms": 500.0}, (0.5, None)), ({"tpot_ms": 20.0}, (None, 0.02))]
)
def test_targets_that_a_pipeline_file_leaves_open_are_none(tmp_path, smollm2, slo, expected):
    build = write_build(tmp_path / "build", "mixed")
    spec = parse_spec({"model": "m", "pools": {"mixed": {}}, "slo": slo})
    settings = spec.model_dump(exclude_none=True)
    manifest = msgspec.structs.replace(read_manifest(build), settings=settings)
    limits = limits_of(build, manifest, TextLayer(smollm2))
    assert (limits.ttft_s, limits.tpot_s) == expected
    assert policy_of(manifest).queue_limit == spec.scheduler.max_queue
