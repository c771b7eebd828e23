from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtpd.runtime.serve import launcher
from trtpd.runtime.serve.launcher import ServeOptions, serve
from trtpd.runtime.serve.preflight import Ports


@pytest.fixture
def no_triton(monkeypatch):
    """All that serving looks at or starts outside this process, replaced by what does nothing."""

    class Server:
        def __init__(self, plan):
            self.plan = plan

        def nothing(self):
            pass

        start = check = terminate = kill = nothing

    class Control:
        def __init__(self, host, port, *, key=""):
            pass

        def live(self):
            return True

        def load(self, name, *, timeout_s):
            pass

        def unload(self, name, *, timeout_s):
            return True

    role = SimpleNamespace(instances=("prefill_0", "decode_0"))
    monkeypatch.setattr(launcher, "read_manifest", lambda build: SimpleNamespace(roles={"both": role}))
    monkeypatch.setattr(launcher, "check_repository", lambda *_: None)
    monkeypatch.setattr(launcher, "check_shared_memory", lambda *_: None)
    monkeypatch.setattr(launcher, "check_ports", lambda *_: Ports(http=1, grpc=2, metrics=3))
    monkeypatch.setattr(
        launcher,
        "find_server",
        lambda: SimpleNamespace(remark="", link_backend=lambda _: None, environment=dict),
    )
    monkeypatch.setattr(launcher, "TritonServer", Server)
    monkeypatch.setattr(launcher, "TritonControl", Control)


def test_the_start_and_the_first_interrupt_are_told_in_a_line_each(no_triton, tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t.", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        said: list[str] = []
        code = serve(
            ServeOptions(build=tmp_path, drain_s=7),
            on_ready=lambda _: os.kill(os.getpid(), signal.SIGINT),
            say=said.append,
        )
        assert code == 0
        assert said == [
            "starting tritonserver and 3 models",
            "draining up to 7 s; Ctrl-C again stops at once",
        ]
        assert not list(Path(short).iterdir())
