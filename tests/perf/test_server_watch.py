"""A server that goes away in the middle of a run."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys

import pytest
from trtpd_testing.fake_servers import Script, ScriptedTransport, fixed
from trtpd_testing.virtual_loop import run_virtually

from trtpd.cli import main
from trtpd.perf import bench as room
from trtpd.perf.bench_folder import load
from trtpd.perf.client import Client, ClientOptions
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.server_watch import GONE_AFTER_S, WatchedTransport, listener
from trtpd.perf.transport import Arrived, Ending

REFUSED = Ending(state="failed", reason="connection", message="refused")


class GoingTransport(ScriptedTransport):
    """Its server is away in these spans (s): new requests are refused. Streams live on if `streams_live`, else end."""

    def __init__(self, script: Script, *away: tuple[float, float], streams_live: bool = False) -> None:
        super().__init__(script)
        self._away = away
        self._streams_live = streams_live

    def there(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return not any(begin <= now_s < end for begin, end in self._away)

    async def listens(self) -> bool:
        return self.there()

    async def send(self, request: bytes, arrived: Arrived) -> Ending:
        if not self.there():
            return REFUSED
        ending = await super().send(request, arrived)
        return ending if self._streams_live or self.there() else REFUSED


def watched_run(transport, wanted, timeout_s=300.0):
    watched = WatchedTransport(transport, transport.listens, patient=wanted.concurrency is not None)
    client = Client(make(wanted), watched, ClientOptions(timeout_s=timeout_s))
    watched.watch(client)
    return watched, run_virtually(client.run())


def test_a_run_whose_server_has_gone_ends_early_and_what_was_not_due_was_not_offered():
    transport = GoingTransport(fixed(0.2, 0.01, 4), (20.0, 1e9))
    watched, run = watched_run(transport, Wanted(name="chat", requests=600, rate=10.0))
    assert watched.gone
    assert watched.away_since_s == pytest.approx(20.0, abs=1.0)
    assert run.info.offered_until_s == pytest.approx(watched.away_since_s + GONE_AFTER_S, abs=1.0)
    assert len(run.records) < 300
    states = {(record.state, record.reason) for record in run.records if record.scheduled_s >= 20.0}
    assert states == {("failed", "connection")}
    assert transport.closed


def test_a_server_that_comes_back_soon_has_not_gone():
    away = ((20.0, 20.0 + GONE_AFTER_S - 1.0), (30.0, 30.0 + GONE_AFTER_S - 1.0))
    watched, run = watched_run(GoingTransport(fixed(0.2, 0.01, 4), *away), Wanted(name="chat", requests=600, rate=10.0))
    assert not watched.gone
    assert watched.away_since_s is None
    assert len(run.records) == 600


def test_a_run_goes_on_while_a_stream_from_before_is_alive():
    long = GoingTransport(lambda n, now_s: [100.0 if n == 0 else 0.1], (20.0, 1e9), streams_live=True)
    watched, run = watched_run(long, Wanted(name="chat", requests=1200, rate=10.0))
    assert watched.gone
    assert run.info.offered_until_s > 99.0
    assert run.records[0].state == "finished"


def test_a_server_that_is_away_when_the_run_ends_is_known_to_be():
    watched, run = watched_run(
        GoingTransport(fixed(0.2, 0.01, 4), (6.0, 1e9)), Wanted(name="chat", requests=100, rate=10.0)
    )
    assert not watched.gone
    assert watched.away_since_s is not None
    assert not run.info.interrupted


def test_users_of_a_closed_loop_do_not_run_through_their_requests_while_nobody_is_there():
    watched, run = watched_run(
        GoingTransport(fixed(0.2, 0.01, 4), (20.0, 1e9)), Wanted(name="chat", requests=5000, concurrency=4)
    )
    assert watched.gone
    assert sum(record.state == "failed" for record in run.records) == 4
    assert {record.reason for record in run.records if record.state == "failed"} == {"connection"}


def test_users_of_a_closed_loop_do_not_run_through_their_requests_while_a_server_stops():
    class Stopping(GoingTransport):
        async def listens(self) -> bool:
            return asyncio.get_running_loop().time() < 40.0

    wanted = Wanted(name="chat", requests=5000, concurrency=4)
    watched, run = watched_run(Stopping(fixed(0.2, 0.01, 4), (20.0, 1e9)), wanted)
    assert watched.gone
    assert watched.away_since_s == pytest.approx(40.0, abs=1.0)
    assert 100 < sum(record.state == "failed" for record in run.records) < 200


def test_only_a_refused_connection_says_that_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert asyncio.run(listener(address)())
        assert asyncio.run(listener(f"http://{address}/v1")())
    assert not asyncio.run(listener(address)())
    assert asyncio.run(listener("no-such-host.invalid:1")())


SERVER = """
import asyncio, json, time
from aiohttp import web
async def models(request):
    return web.json_response({"data": [{"id": "toy"}]})
async def complete(request):
    await request.json()
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for n in range(3):
        await stream.write(b'data: {"choices": [{"text": " word", "finish_reason": "length"}]}\\n\\n')
        await asyncio.sleep(0.01)
    await stream.write(b'data: [DONE]\\n\\n')
    return stream
async def run():
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.sleep(1.0)
asyncio.run(run())
"""


def test_a_bench_whose_server_dies_reports_what_was_measured_and_exits_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(room, "refuse_if_bottleneck", lambda health, records: None)
    monkeypatch.setattr("trtpd.perf.server_watch.GONE_AFTER_S", 0.6)
    monkeypatch.setattr("trtpd.perf.server_watch.LOOK_EVERY_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        arguments = ["bench", "--openai", address, "--workload", "chat", "--rate", "20", "--requests", "2000"]
        code = main([*arguments, "-o", str(tmp_path / "r")])
    said = capsys.readouterr()
    assert code == 1
    assert "trtpd bench: the server went away at" in said.err
    assert "not yet due when the server was gone" in said.out
    assert "were never offered and count nowhere" in said.out
    assert "failed:connection" in said.out
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["figures"]["goodput"]["trtpd"]["good"] > 0
    assert report["interrupted"] is False
    assert load(tmp_path / "r").about.server_gone
