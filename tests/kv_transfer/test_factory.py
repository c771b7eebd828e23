from typing import Any

import msgspec
import pytest
from trtpd_testing.kv import LAYOUT, fill_group, make_group

from trtpd.errors import InternalError, TransferError
from trtpd.kv_transfer import host, nixl, shm, tcp
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.factory import TRANSPORTS, make_sink, make_source, transport, transports_of

KEY = (1, 1)
OUTSIDE = {"listen": "10.0.0.0/8", "secret": b"s"}


def settings(**changes):
    return TransferSettings(instance="prefill_0", generation="g", **changes)


@pytest.fixture
def make():
    """make(source's settings, sink's settings) -> (source, sink)"""
    pools = [make_group(name, LAYOUT, "g") for name in ("of", "to")]
    closing: list[Any] = []
    fill_group(pools[0])

    def both(of, to):
        closing.extend([make_source(pools[0], of), make_sink(pools[1], to, wake=lambda: None)])
        return closing

    yield both
    for end in closing:
        end.close()
    for pool in (pool for group in pools for pool in group):
        pool.close()


@pytest.fixture
def outside(monkeypatch):
    """This host has an address that is not loopback, and listens on loopback for it."""
    monkeypatch.setattr(host, "_addresses", lambda: [("127.0.0.1", "lo"), ("10.1.2.3", "eth0")])
    for module in (tcp, nixl):
        monkeypatch.setattr(module, "data_address", lambda settings: "127.0.0.1")


def pulled(source, sink, offer):
    sink.begin(offer, [2])
    sink.sealed(source.seal(KEY, first_token=0, first_log_prob=None, seed=0))
    while not (results := sink.progress()):
        pass
    return results[0]


@pytest.mark.parametrize("path", TRANSPORTS)
def test_a_path_that_was_asked_for_is_the_only_one(make, path):
    source, sink = make(settings(path=path), settings(path=path))
    assert (source.transports, sink.transports) == ((path,), (path,))
    result = pulled(source, sink, source.offer(KEY, prompt_tokens=3, blocks=[1]))
    assert (result.error, result.path) == (None, path)


def test_on_one_host_shared_memory_is_enough():
    assert transports_of(settings()) == ("shm",)


def test_where_kv_may_leave_the_host_everything_is_offered_and_shared_memory_taken_if_it_reaches(make, outside):
    source, sink = make(settings(**OUTSIDE), settings(**OUTSIDE))
    offer = source.offer(KEY, prompt_tokens=3, blocks=[1])
    assert [way.transport for way in offer.ways] == [name for name in TRANSPORTS if name in source.transports]
    assert pulled(source, sink, offer).path == "shm"


def test_a_source_on_another_host_is_reached_by_network(make, outside, monkeypatch):
    source, sink = make(settings(**OUTSIDE, path="tcp"), settings(**OUTSIDE))
    monkeypatch.setattr(shm, "host_id", lambda: "elsewhere")
    assert pulled(source, sink, source.offer(KEY, prompt_tokens=3, blocks=[1])).path == "tcp"


def test_the_host_shows_in_the_address_of_shared_memory(make, monkeypatch):
    source, sink = make(settings(), settings())
    offer = source.offer(KEY, prompt_tokens=3, blocks=[1])
    monkeypatch.setattr(shm, "host_id", lambda: "elsewhere")
    with pytest.raises(TransferError, match="no common transport: prefill offers shm, decode accepts shm"):
        sink.begin(offer, [2])


def test_a_pair_without_a_common_transport_is_refused_with_both_lists(make):
    source, sink = make(settings(path="shm"), settings(path="tcp"))
    offer = source.offer(KEY, prompt_tokens=3, blocks=[1])
    with pytest.raises(TransferError, match="prefill offers shm, decode accepts tcp") as caught:
        sink.begin(offer, [2])
    assert not caught.value.retryable


def test_an_offer_keeps_to_the_transport_it_began_with_until_its_end(make):
    source, sink = make(settings(), settings())
    offer = source.offer(KEY, prompt_tokens=3, blocks=[1])
    sink.begin(offer, [2])
    with pytest.raises(InternalError, match="already"):
        sink.begin(msgspec.structs.replace(offer), [2])


def test_an_unknown_transport_is_refused_with_those_there_are():
    with pytest.raises(TransferError, match=r"'pigeon': use one of .*shm"):
        transport("pigeon")
    with pytest.raises(TransferError, match="pigeon"):
        transports_of(settings(path="pigeon"))


@pytest.mark.parametrize("wrong", [{"lease_s": 0.0}, {"lease_s": 1e9}, {"digest_every": -1}, {"one_piece_tokens": -1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(InternalError):
        settings(**wrong)
