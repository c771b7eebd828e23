"""Source and sink in network namespaces of their own, which reach each other by one link only."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

NETWORK = "10.231.77.0/24"
FOLDER = f"trtpd{os.getpid() % 10000}"

SIDE = textwrap.dedent("""
    import sys, threading
    from trtpd.kv_transfer.base import TransferSettings
    from trtpd.kv_transfer.factory import make_sink, make_source
    from trtpd.kv_transfer.offer import decode_offer, decode_seal, encode
    from trtpd_testing.kv import LAYOUT, fill_group, make_group, whole
    role, path, network = sys.argv[1:]
    settings = TransferSettings(
        instance=role, generation="g", path=path, listen=network, secret=b"shared", one_piece_tokens=0
    )
    pools, woken = make_group(f"netns-{role}", LAYOUT, "g"), threading.Event()
    if role == "source":
        fill_group(pools)
        source = make_source(pools, settings)
        offer = source.offer((1, 1), prompt_tokens=14, blocks=[3, 4, 9, 1])
        seal = source.seal((1, 1), first_token=5, first_log_prob=None, seed=0)
        print(encode(offer).hex(), encode(seal).hex(), flush=True)
        for line in sys.stdin:
            pass
        source.close()
    else:
        sink = make_sink(pools, settings, wake=woken.set)
        for line in sys.stdin:
            offer, seal = line.split()
            sink.begin(decode_offer(bytes.fromhex(offer)), [5, 6, 7, 2])
            sink.sealed(decode_seal(bytes.fromhex(seal)))
            while not (results := sink.progress()):
                woken.wait(1)
                woken.clear()
            print(results[0].code or "done", results[0].path, bool(whole(pools)[:, [5, 6, 7, 2]].all()), flush=True)
        sink.close()
    for pool in pools:
        pool.close()
""")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def hosts():
    """Names of two namespaces joined by a link."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces can't be made here")
    names = [f"{FOLDER}a", f"{FOLDER}b"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.231.77.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start(host, role, path, **environment):
    code_path = ":".join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-P", "-c", SIDE, role, path, NETWORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": code_path, "PATH": os.environ["PATH"]} | environment,
    )


@pytest.mark.parametrize(
    ("path", "environment"),
    [("tcp", {}), ("nixl", {}), ("nixl", {"UCX_TLS": "tcp,self"})],
    ids=["tcp", "nixl", "nixl over tcp"],
)
def test_kv_crosses_from_host_to_host_and_a_cut_link_ends_a_pull_in_bounded_time(hosts, path, environment):
    if path == "nixl":
        pytest.importorskip("nixl_cu12")
    with (
        start(hosts[0], "source", path, **environment) as source,
        start(hosts[1], "sink", path, **environment) as sink,
    ):
        try:
            told = source.stdout.readline()
            sink.stdin.write(told)
            sink.stdin.flush()
            assert sink.stdout.readline().split() == ["done", path, "True"]
            if path == "tcp" or environment:
                ip("-n", hosts[0], "link", "set", hosts[0], "down")
                sink.stdin.write(told)
                sink.stdin.flush()
                assert sink.stdout.readline().split()[0] in ("transfer_timeout", "peer_gone", "lease_lost")
        finally:
            subprocess.run(["ip", "-n", hosts[0], "link", "set", hosts[0], "up"], check=False, capture_output=True)
            for process in (source, sink):
                process.stdin.close()
                process.wait(30)
