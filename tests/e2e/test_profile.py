"""A profile from the command line to the running router."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trtpd_testing.harness import ask, serving, trtpd

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_real_build_is_profiled_and_served_by_its_profile(make_build: Callable[..., Path], tmp_path: Path) -> None:
    pools = "{prefill: {threads: 1, kv_tokens: 2048}, decode: {threads: 1, kv_tokens: 2048, max_batch: 4}}"
    build = make_build("profiled", pools, extra="kv: {max_seq_tokens: 1024}\n")
    run = trtpd("profile", build, "--paths", "shm", "--roles", "prefill,decode", "--budget-s", "240", "--json")
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    for role in ("prefill", "decode"):
        assert told["engines"][role]["fit"]["residuals"]["p50"] < 0.25
    with serving(build, tmp_path / "serve.log") as server:
        answer = ask(server, text_input="The sea is blue because", max_tokens=8)
        assert answer.error is None
        assert "first token in about" in answer.timeline["attempts"][0]["why"]
        used = server.status()["profile"]
    assert used["path"] == str(build / "profile.json")
    assert used["roles"].keys() == {"prefill", "decode"}


def test_serve_says_that_there_is_no_profile_and_refuses_one_that_is_named_and_does_not_fit(
    make_build: Callable[..., Path], tmp_path: Path
) -> None:
    pools = "{prefill: {kv_tokens: 2048}, decode: {kv_tokens: 2048}}"
    bare = make_build("bare", pools, engine="emulated")
    with serving(bare, tmp_path / "serve.log") as server:
        assert server.status()["profile"]["path"] is None
    assert "no profile.json in" in (tmp_path / "serve.log").read_text()
    named = make_build("named", pools, engine="emulated", extra="scheduler: {profile: nowhere.json}\n")
    run = trtpd("serve", named, "--http", "0", "--grpc", "0", "--metrics", "0", "--json")
    assert run.returncode == 2
    assert "nowhere.json" in json.loads(run.stdout)["error"]
