"""An instance takes the other role of its pair: drained by its worker, loaded anew by its launcher, seen in status."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trtpd_testing.harness import Server, ask, nothing_is_held, serving

from trtpd.runtime.worker import roles

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

POOLS = {
    "elastic": True,
    "prefill": {"instances": 1, "kv_tokens": 8192},
    "decode": {"instances": 2, "kv_tokens": 8192},
}


def roles_of(status: dict) -> dict[str, str]:
    return {name: one["role"] for name, one in status["instances"].items() if one["state"] == "ready"}


def answers(server: Server) -> int:
    return len(ask(server, text_input="The sea is", max_tokens=12, end_id=-1).ids)


def test_an_instance_takes_the_other_role_goes_back_and_keeps_its_own_when_it_cannot(
    make_emulated: Callable[..., Path], tmp_path: Path
) -> None:
    build, log = make_emulated("elastic", POOLS), tmp_path / "serve.log"
    with serving(build, log) as server:
        roles.wish(server.run_dir, "decode_1", "prefill")
        as_prefill = {"prefill_0": "prefill", "decode_0": "decode", "decode_1": "prefill"}
        server.until(lambda s: roles_of(s) == as_prefill)
        assert answers(server) == 12

        roles.wish(server.run_dir, "decode_1", "decode")
        at_home = as_prefill | {"decode_1": "decode"}
        server.until(lambda s: roles_of(s) == at_home)

        shutil.move(build / "prefill", build / "elsewhere")
        before = server.status()["instances"]["decode_1"]["generation"]
        roles.wish(server.run_dir, "decode_1", "prefill")
        server.until(lambda s: roles_of(s) == at_home and s["instances"]["decode_1"]["generation"] != before)
        assert answers(server) == 12
        nothing_is_held(server)
    assert "can't take the prefill role and goes back" in log.read_text()
