"""Golden tokens through real Triton whatever the TP sizes of the two sides and the path between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trtpd_testing.harness import Server, ask, nothing_is_held, serving

pytestmark = pytest.mark.e2e

PATHS = ("shm", "nixl", "tcp")
SIZES = ((1, 1), (2, 1), (1, 2), (3, 2), (3, 3))
FAST = {((1, 1), "nixl"), ((2, 1), "tcp"), ((1, 2), "shm")}
PROMPTS = ("chat", "story")


def every_case() -> list:
    """All pairs of sizes and paths; those not in FAST only with scripts/test --all."""
    return [
        pytest.param(
            *sizes, path, marks=() if (sizes, path) in FAST else pytest.mark.slow, id=f"{sizes[0]}to{sizes[1]}-{path}"
        )
        for sizes in SIZES
        for path in PATHS
    ]


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "path"), every_case())
def test_a_pair_of_any_sizes_gives_the_reference_tokens_over_any_path(
    make_build: Callable[..., Path], golden: dict, tmp_path: Path, prefill_tp: int, decode_tp: int, path: str
) -> None:
    build = make_build(
        f"p{prefill_tp}d{decode_tp}{path}",
        f"{{prefill: {{tp: {prefill_tp}, kv_tokens: 4096}}, decode: {{tp: {decode_tp}, kv_tokens: 4096}}}}",
        extra=f"transfer: {{path: {path}}}\nkv: {{max_seq_tokens: 2048}}\n",
    )
    with serving(build, tmp_path / "serve.log") as server:
        for name in PROMPTS:
            check(server, golden["prompts"][name], path)
        if path == "shm" or (prefill_tp, decode_tp) == (1, 1):
            check(server, golden["prompts"]["long"], path, max_tokens=16)
        nothing_is_held(server)


def check(server: Server, entry: dict, path: str, *, max_tokens: int = 32) -> None:
    prompt = {"messages": json.dumps(entry["messages"])} if entry["messages"] else {"text_input": entry["text_input"]}
    answer = ask(server, **prompt, max_tokens=max_tokens, exclude_input_in_output=True)
    assert answer.error is None
    assert answer.ids == entry["output_ids"][:max_tokens]
    assert answer.timeline["transfer"]["path"] == path
