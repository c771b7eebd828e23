import itertools
import os
import socket
import threading
from dataclasses import replace

import msgspec
import pytest
from trtpd_testing.kv import LAYOUT, make_group

from trtpd.errors import PeerGoneError, TransferError
from trtpd.kv_transfer import tcp_server
from trtpd.kv_transfer.asks import Check, Open, Renew
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.grants import Grants
from trtpd.kv_transfer.host import data_address
from trtpd.kv_transfer.tcp import TcpSource
from trtpd.kv_transfer.tcp_link import TcpLink
from trtpd.kv_transfer.tcp_server import spans_of
from trtpd.kv_transfer.tcp_wire import (
    ANSWER_BYTES,
    GREETING_BYTES,
    LENGTH,
    MAGIC,
    Read,
    TcpAddress,
    mac_of,
    pack_request,
)

KEY = (1, 1)
OF, TO = [3, 4, 9, 1], [5, 6, 7, 2]
TOKENS = 14


@pytest.fixture
def tcp(pairs):
    return pairs("tcp")


def address_of(offer):
    return msgspec.msgpack.decode(offer.address, type=TcpAddress)


def server_of(pair):
    return pair.source._doors[0].server


def dial(pair, offer):
    address = address_of(offer)
    return socket.create_connection((address.host, address.port), timeout=10)


def hangs_up(sock):
    sock.settimeout(10)
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def link_of(pair, offer, **changes):
    options = {"name": "prefill_0", "generation": offer.generation, "fingerprint": offer.layout.fingerprint}
    return TcpLink(address_of(offer), **(options | {"secret": b""} | changes))


JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 8,
    bytes(ANSWER_BYTES),
    MAGIC + bytes(ANSWER_BYTES),
    os.urandom(4096),
    b"\xff" * 100_000,
]


@pytest.mark.parametrize("junk", JUNK)
def test_a_stranger_who_sends_junk_is_dropped_and_counted_and_harms_nobody(tcp, junk):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    tcp.sink.begin(offer, TO)
    with dial(tcp, offer) as stranger:
        stranger.sendall(junk)
        assert hangs_up(stranger)
    assert server_of(tcp).counters["strangers"] == 1
    tcp.seal(offer)
    assert tcp.result().error is None


def test_a_stranger_who_says_nothing_is_dropped(tcp, monkeypatch):
    monkeypatch.setattr(tcp_server, "GREETING_S", 0.1)
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with dial(tcp, offer) as stranger:
        assert hangs_up(stranger)


def test_many_strangers_take_no_more_than_their_share_of_connections(tcp):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    strangers = [dial(tcp, offer) for _ in range(3 * tcp_server.STRANGERS_LIMIT)]
    tcp.sink.begin(offer, TO)
    tcp.seal(offer)
    assert tcp.result().error is None
    assert len(server_of(tcp)._connections) <= tcp_server.STRANGERS_LIMIT + 1
    for stranger in strangers:
        stranger.close()


def greeted(pair, offer):
    """A connection whose other end has shown that it knows the token, and then does as it likes."""
    sock = dial(pair, offer)
    nonce, key = sock.recv(GREETING_BYTES, socket.MSG_WAITALL)[len(MAGIC) :], address_of(offer).token
    sock.sendall(MAGIC + bytes(32) + mac_of(key, b"sink", nonce, bytes(32)))
    assert len(sock.recv(32, socket.MSG_WAITALL)) == 32
    return sock


@pytest.mark.parametrize(
    "data",
    [
        LENGTH.pack(0),
        LENGTH.pack(1 << 30),
        LENGTH.pack(4) + b"junk",
        pack_request(Renew(1, 1)),  # before Open
    ],
)
def test_a_peer_that_breaks_the_protocol_is_dropped_and_counted(tcp, data):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with greeted(tcp, offer) as peer:
        peer.sendall(data)
        assert hangs_up(peer)
    assert server_of(tcp).counters["bad_requests"] == 1


def test_a_greeting_that_comes_byte_by_byte_gets_in(tcp):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with dial(tcp, offer) as peer:
        nonce = peer.recv(GREETING_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
        answer = MAGIC + bytes(32) + mac_of(address_of(offer).token, b"sink", nonce, bytes(32))
        for byte in answer:
            peer.send(bytes([byte]))
        assert len(peer.recv(32, socket.MSG_WAITALL)) == 32


@pytest.mark.parametrize("changes", [{"secret": b"other"}, {"token": bytes(32)}])
def test_who_has_another_key_or_token_is_not_let_in(tcp, changes):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    if "token" in changes:
        address = msgspec.structs.replace(address_of(offer), **changes)
        offer, changes = msgspec.structs.replace(offer, address=msgspec.msgpack.encode(address)), {}
    link = link_of(tcp, offer, **changes)
    with pytest.raises(PeerGoneError, match="restarted, or the two have different keys"):
        link.connect()


def test_who_can_not_prove_that_it_is_the_source_is_not_believed(tcp):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = msgspec.structs.replace(address_of(offer), port=impostor.getsockname()[1])

        def pretend():
            peer, _ = impostor.accept()
            with peer:
                peer.sendall(MAGIC + bytes(32))
                peer.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                peer.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        link = link_of(tcp, msgspec.structs.replace(offer, address=msgspec.msgpack.encode(address)))
        with pytest.raises(TransferError, match="does not know the key"):
            link.connect()
        thread.join()


def test_a_source_of_another_protocol_is_named(tcp):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = msgspec.structs.replace(address_of(offer), port=other.getsockname()[1])

        def speak():
            peer, _ = other.accept()
            with peer:
                peer.sendall(b"trtpdKV9" + bytes(32))
                peer.recv(1)

        thread = threading.Thread(target=speak)
        thread.start()
        link = link_of(tcp, msgspec.structs.replace(offer, address=msgspec.msgpack.encode(address)))
        with pytest.raises(TransferError, match="another protocol"):
            link.connect()
        thread.join()


def read(blocks=((3, 2),), *, rank=(0, 0), arrays=(0, 4), heads=(0, 3), key=KEY):
    (tp_rank, pp_rank), (first, end), (low, high) = rank, arrays, heads
    return Read(key[0], key[1], tp_rank, pp_rank, first, end, low, high, blocks)


@pytest.mark.parametrize(
    "request_",
    [
        read(((3, 3),)),  # block 5 is not held
        read(((100, 1),)),
        read(((3, 1 << 40),)),
        read(()),
        read(rank=(1, 0)),
        read(arrays=(0, 5)),
        read(arrays=(2, 2)),
        read(heads=(1, 4)),
        read(heads=(2, 1)),
    ],
)
def test_nobody_reads_what_is_not_in_his_hold(tcp, request_):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    link = link_of(tcp, offer)
    with pytest.raises(TransferError):
        link.ask(request_, 1 << 20)
    assert server_of(tcp).counters["bad_requests"] >= 1
    link.close()


def test_a_hold_that_is_over_is_neither_renewed_nor_read(tcp):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    link = link_of(tcp, offer)
    assert link.ask(Renew(*KEY)) == b""
    assert len(link.ask(Check(*KEY), 32)) == 32
    tcp.source.end(KEY)
    assert [link.ask(Renew(*KEY)), link.ask(Check(*KEY), 32), link.ask(read(), 768)] == [None, None, None]
    link.close()


def test_a_connection_that_was_cut_is_made_anew(tcp):
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    link = link_of(tcp, offer)
    assert link.ask(Renew(*KEY)) == b""
    for connection in list(server_of(tcp)._connections):
        connection.sock.shutdown(socket.SHUT_RDWR)
    assert link.ask(Renew(*KEY)) == b""
    assert not link.gone()
    link.close()


def test_a_sink_that_stops_reading_is_dropped_in_the_end(pairs, monkeypatch):
    monkeypatch.setattr(tcp_server, "STALL_S", 0.2)
    tcp = pairs("tcp", layout=replace(LAYOUT, num_layers=16, head_dim=1024))
    offer = tcp.source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    with greeted(tcp, offer) as peer:
        whole_hold = read(((3, 2), (9, 1), (1, 1)), arrays=(0, 32))
        peer.sendall(pack_request(Open(offer.generation, offer.layout.fingerprint)) + pack_request(whole_hold))
        wait_for(lambda: server_of(tcp).counters["stalled"] == 1)


def test_a_suspended_grant_confirms_no_renewal():
    grants = Grants()
    grants.open(KEY, (1, 2))
    grants.suspend(KEY, suspended=True)
    assert not grants.renew(KEY, 5.0)
    assert grants.renewed_s(KEY) is None
    grants.suspend(KEY, suspended=False)
    assert grants.renew(KEY, 6.0)
    assert grants.renewed_s(KEY) == 6.0
    grants.shut(KEY)
    assert not grants.renew(KEY, 7.0)


def test_spans_cover_the_heads_asked_for_in_order():
    runs = [(4, 2), (1, 1)]
    assert spans_of(runs, range(3), 3, 10) == [slice(120, 180), slice(30, 60)]
    found = [(s.start, s.stop) for s in spans_of(runs, range(1, 3), 3, 10)]
    assert found == [(130, 150), (160, 180), (40, 60)]


def test_other_addresses_than_loopback_need_keys(monkeypatch):
    monkeypatch.setattr("trtpd.kv_transfer.host._addresses", lambda: [("127.0.0.1", "lo"), ("10.1.2.3", "eth0")])
    settings = TransferSettings(instance="x", generation="g", listen="10.0.0.0/8")
    with pytest.raises(TransferError, match="no keys"):
        data_address(settings)
    with_keys = TransferSettings(instance="x", generation="g", listen="10.0.0.0/8", secret=b"s")
    assert data_address(with_keys) == "10.1.2.3"
    with pytest.raises(TransferError, match="no such address"):
        data_address(TransferSettings(instance="x", generation="g", listen="10.9.9.9", secret=b"s"))
    with pytest.raises(TransferError, match="neither an IP address"):
        data_address(TransferSettings(instance="x", generation="g", listen="myhost"))


def test_secrets_do_not_show_when_settings_are_printed():
    assert "s3cret" not in repr(TransferSettings(instance="x", generation="g", secret=b"s3cret"))


def wait_for(condition):
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it has not come to pass")


def test_a_closed_source_hangs_up_on_its_sinks():
    pools = make_group("closing", LAYOUT, "g")
    source = TcpSource(pools, TransferSettings(instance="prefill_0", generation="g"))
    offer = source.offer(KEY, prompt_tokens=TOKENS, blocks=OF)
    link = TcpLink(address_of(offer), name="prefill_0", generation="g", fingerprint=LAYOUT.fingerprint, secret=b"")
    link.connect()
    source.close()
    wait_for(link.gone)
    with pytest.raises(PeerGoneError, match="not there"):
        link.connect()
    for pool in itertools.chain(pools):
        pool.close()
