"""Threads of a source or sink that a bug of ours ends: who relies on them is told, so that the worker restarts."""

import threading

import pytest

from trtpd.errors import InternalError
from trtpd.kv_transfer import tcp_server
from trtpd.kv_transfer.nixl_server import NixlServer
from trtpd.kv_transfer.puller import Puller
from trtpd.kv_transfer.tcp_server import TcpServer

KEY = (1, 1)


def broken(*_):
    raise ZeroDivisionError("told to")


def wait_for(raising):
    """The InternalError that comes of it, within a while."""
    for _ in range(2000):
        try:
            raising()
        except InternalError as error:
            return error
        threading.Event().wait(0.01)
    raise AssertionError("nobody was told")


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
def test_a_pull_thread_that_broke_ends_its_pulls_and_then_says_so(pairs, monkeypatch, transport):
    pair = pairs(transport, still=False)
    monkeypatch.setattr(Puller, "_renew_and_watch", broken)
    pair.sink.begin(pair.source.offer(KEY, prompt_tokens=4, blocks=[0]), [0])
    result = pair.result()
    assert (result.code, result.retryable) == ("internal", False)
    assert "ZeroDivisionError" in str(wait_for(pair.sink.progress))
    assert not pair.sink.busy()


def test_a_tcp_source_whose_thread_broke_says_so(pairs, monkeypatch):
    monkeypatch.setattr(tcp_server, "SWEEP_S", 0.01)
    monkeypatch.setattr(TcpServer, "_sweep", broken)
    pair = pairs("tcp", still=False)
    assert "ZeroDivisionError" in str(wait_for(lambda: pair.source.lapsed(0.0)))


def test_a_nixl_source_whose_thread_broke_says_so(pairs, monkeypatch):
    pair = pairs("nixl", still=False)
    monkeypatch.setattr(NixlServer, "_tend_writes", broken)
    assert "ZeroDivisionError" in str(wait_for(lambda: pair.source.lapsed(0.0)))
