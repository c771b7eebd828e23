"""A group whose ranks run on two hosts: networks and names of their own, one /dev/shm, launched through an agent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from trtpd_testing.harness import TRTPD

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]

NETWORK = "10.78.0"
HERE, THERE = f"{NETWORK}.1", f"{NETWORK}.2"
AGENT = """#!/bin/sh
# What mpirun takes for ssh: AGENT HOST COMMAND...
shift
exec ip netns exec {there} unshare --uts sh -c "hostname {there} && $*"
"""


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them."""
    here, there = (f"tg{os.getpid()}{side}" for side in "ab")
    try:
        for name in (here, there):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", here, "type", "veth", "peer", "eth0", "netns", there)
        for name, address in ((here, HERE), (there, THERE)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield here, there
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "del", name], check=False)


def generate(host: str, url: str, entry: dict) -> dict:
    command = ["ip", "netns", "exec", host, sys.executable, "-P", "-m", "trtpd.cli", "generate", "--raw"]
    command += ["--max-tokens", "16", "--url", url, "--json", entry["text_input"]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_group_over_two_hosts_gives_the_reference_tokens_and_comes_back_after_a_death(
    hosts: tuple[str, str], make_build: Callable[..., Path], golden: dict, tmp_path: Path
) -> None:
    here, there = hosts
    agent = tmp_path / "agent"
    agent.write_text(AGENT.format(there=there))
    agent.chmod(0o755)
    build = make_build(
        "host-groups",
        f"{{prefill: {{tp: 2, hosts: ['{HERE}:1', '{THERE}:1'], kv_tokens: 2048}}, decode: {{kv_tokens: 2048}}}}",
        extra="kv: {max_seq_tokens: 1024}\n",
    )
    own_name = ["ip", "netns", "exec", here, "unshare", "--uts", "sh", "-c", f'hostname {here} && exec "$@"', "sh"]
    serve = [*own_name, *TRTPD, "serve", str(build), "--http", "0", "--grpc", "0", "--metrics", "0", "--json"]
    log = tmp_path / "serve.log"
    with log.open("w") as errors:
        environment = os.environ | {"PRTE_MCA_plm_ssh_agent": str(agent)}
        process = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert '"grpc"' in line, f"{line} {log.read_text()[-3000:]}"
        url, entry = json.loads(line)["grpc"], golden["prompts"]["story"]
        assert generate(here, url, entry)["ids"] == entry["output_ids"][:16]
        away = rank_away(there)
        assert away.environ()["OMPI_COMM_WORLD_RANK"] == "1"
        away.send_signal(signal.SIGKILL)
        assert generate(here, url, entry)["ids"] == entry["output_ids"][:16]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
    assert not subprocess.run(["ip", "netns", "pids", there], check=True, capture_output=True, text=True).stdout


def rank_away(host: str) -> psutil.Process:
    """The one process of ours that runs on that host."""
    pids = subprocess.run(["ip", "netns", "pids", host], check=True, capture_output=True, text=True).stdout.split()
    lines = {pid: psutil.Process(int(pid)).cmdline() for pid in pids}
    (rank,) = [pid for pid, line in lines.items() if "trtpd.runtime.worker" in line and "mpirun" not in line[0]]
    return psutil.Process(int(rank))
