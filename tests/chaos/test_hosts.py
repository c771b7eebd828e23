"""Three hosts, as network namespaces with a /dev/shm of their own: router, prefill, decode, over tcp and nixl."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from trtpd_testing.harness import TRTPD, trtpd

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2"),
]

NETWORK = "10.77.0"
HOSTS = {"pd": 1, "prefill_0": 2, "decode_0": 3}
MID_TRANSFER_BYTES = 10_000_000  # of 70 MB
ROUTER = f"tcp://{NETWORK}.1:5577"
SLOW_LINK = ["tbf", "rate", "100mbit", "burst", "128kb", "latency", "100ms"]


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


class Network:
    """A switch and a host per model, all in namespaces of their own."""

    def __init__(self) -> None:
        self.prefix = f"tt{os.getpid()}"
        self.made: list[str] = []

    def make(self) -> None:
        self._namespace("sw")
        ip("-n", self.name("sw"), "link", "add", "br0", "type", "bridge")
        ip("-n", self.name("sw"), "link", "set", "br0", "up")
        for host, number in HOSTS.items():
            self._namespace(host)
            port = f"p{number}"
            ip("link", "add", port, "netns", self.name("sw"), "type", "veth", "peer", "eth0", "netns", self.name(host))
            ip("-n", self.name("sw"), "link", "set", port, "master", "br0", "up")
            ip("-n", self.name(host), "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            ip("-n", self.name(host), "link", "set", "eth0", "up")

    def name(self, host: str) -> str:
        return f"{self.prefix}{host}"

    def link(self, host: str, state: str) -> None:
        """Plugs the host's cable in ("up") or out ("down"), at the switch."""
        ip("-n", self.name("sw"), "link", "set", f"p{HOSTS[host]}", state)

    def slow_down(self, host: str) -> None:
        command = ["tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0", "root", *SLOW_LINK]
        subprocess.run(command, check=True)

    def wait_until_sent(self, count: int, *, by: str, timeout_s: float = 90.0) -> None:
        """Until the host has sent that many bytes more than it has now."""
        statistics = ["ip", "-n", self.name(by), "-j", "-s", "link", "show", "eth0"]

        def sent() -> int:
            shown = json.loads(subprocess.run(statistics, check=True, capture_output=True).stdout)
            return shown[0]["stats64"]["tx"]["bytes"]

        enough, end_s = sent() + count, time.monotonic() + timeout_s
        while sent() < enough:
            assert time.monotonic() < end_s, f"{by} sent {sent() - enough + count} of {count} bytes"
            time.sleep(0.02)

    def inside(self, host: str, *command: str) -> list[str]:
        """The command line that runs `command` on that host, with a /dev/shm that no other host sees."""
        script = 'mount -t tmpfs -o size=3g tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name(host), "unshare", "-m", "sh", "-c", script, "sh", *command]

    def remove(self) -> None:
        for name in self.made:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def _namespace(self, host: str) -> None:
        ip("netns", "add", self.name(host))
        self.made.append(self.name(host))
        ip("-n", self.name(host), "link", "set", "lo", "up")


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.make()
        yield made
    finally:
        made.remove()


@contextmanager
def host(network: Network, name: str, build: Path, keys: Path, log: Path) -> Iterator[dict]:
    """`trtpd serve --only NAME` on its host; what it said when ready."""
    ports = ["--http", "0", "--grpc", "0", "--metrics", "0"]
    serve = [*TRTPD, "serve", str(build), "--only", name, "--router", ROUTER, "--keys", str(keys), *ports, "--json"]
    with log.open("w") as errors:
        process = subprocess.Popen(network.inside(name, *serve), stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"{name} did not start: {log.read_text()[-3000:]}"
        yield json.loads(line)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


class Client:
    """`trtpd generate` and `trtpd status`, run on the router's host."""

    def __init__(self, network: Network, url: str) -> None:
        self._network, self._url = network, url

    def run(self, *args: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self._network.name("pd"), sys.executable, "-P", "-m", "trtpd.cli", *args]
        return subprocess.Popen([*command, "--url", self._url, "--json"], stdout=subprocess.PIPE, text=True)

    def answer(self, asking: subprocess.Popen[str]) -> dict:
        out, _ = asking.communicate(timeout=150)
        return json.loads(out)

    def generate(self, entry: dict, max_tokens: int) -> subprocess.Popen[str]:
        return self.run("generate", "--raw", "--max-tokens", str(max_tokens), entry["text_input"])

    def status(self) -> dict:
        return self.answer(self.run("status"))

    def until(self, condition: Callable[[dict], bool], *, timeout_s: float) -> dict:
        end_s = time.monotonic() + timeout_s
        while True:
            found = self.status()
            if condition(found):
                return found
            assert time.monotonic() < end_s, json.dumps(found, indent=1)
            time.sleep(0.1)


def idle(status: dict) -> bool:
    return status["requests_in_flight"] == 0 and all(
        i["state"] == "ready" and i["kv_blocks_free"] == i["kv_blocks"] and i["requests"] == 0
        for i in status["instances"].values()
    )


@pytest.mark.parametrize("path", ["tcp", "nixl"])
def test_three_hosts_give_the_reference_tokens_and_survive_a_cut_link(
    network: Network, make_build: Callable[..., Path], golden: dict, tmp_path: Path, path: str
) -> None:
    build = make_build(
        f"hosts-{path}",
        "{prefill: {kv_tokens: 4096}, decode: {kv_tokens: 4096}}",
        extra=f"transfer: {{path: {path}, listen: {NETWORK}.0/24}}\nkv: {{max_seq_tokens: 2048}}\n",
    )
    keys = tmp_path / "keys"
    assert trtpd("keys", "-o", keys).returncode == 0
    story, long = golden["prompts"]["story"], golden["prompts"]["long"]
    with ExitStack() as stack:
        for name in ("prefill_0", "decode_0"):
            stack.enter_context(host(network, name, build, keys, tmp_path / f"{name}.log"))
        router = stack.enter_context(host(network, "pd", build, keys, tmp_path / "pd.log"))
        client = Client(network, router["grpc"])

        answer = client.answer(client.generate(story, 32))
        assert answer["ids"] == story["output_ids"][:32]
        assert answer["timeline"]["transfer"]["path"] == path

        network.slow_down("prefill_0")
        asking = client.generate(long, 16)
        network.wait_until_sent(MID_TRANSFER_BYTES, by="prefill_0")
        network.link("prefill_0", "down")
        cut_s = time.monotonic()
        answer = client.answer(asking)
        assert answer["ids"] == long["output_ids"][:16]
        assert len(answer["timeline"]["attempts"]) >= 2
        assert time.monotonic() - cut_s < 120

        network.link("prefill_0", "up")
        # Under load short prompts may stay on decode; what was cut off is to be used again after that.
        client.until(lambda status: idle(status) and status["ladder"]["rung"] == 0, timeout_s=90)
        answer = client.answer(client.generate(story, 8))
        assert answer["ids"] == story["output_ids"][:8]
        moved = answer["timeline"]["transfer"]
        assert moved is not None, answer["timeline"]["attempts"]
        assert moved["path"] == path
