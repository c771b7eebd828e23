from __future__ import annotations

import socket

import pytest
from tritonclient.utils import InferenceServerException
from trtpd_testing.fake_servers import fake_triton, fixed

from trtpd.cli import main
from trtpd.errors import InputError, NoInstanceError, RequestError, SaturatedError, ServeError
from trtpd.runtime.serve.address import server_address
from trtpd.runtime.serve.client import _translated, generate, status


@pytest.fixture
def closed_url():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"127.0.0.1:{port}"


def test_a_refused_connection_names_the_url_and_the_mend(closed_url):
    with pytest.raises(ServeError, match=rf"no server at {closed_url}.*trtpd serve BUILD"):
        status(closed_url)
    with pytest.raises(ServeError, match=closed_url):
        next(iter(generate(closed_url, prompt="x")))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("code=saturated retry_after_s=2.5 queue full", SaturatedError),
        ("code=no_instance no prefill instance", NoInstanceError),
        ("code=deadline took too long", ServeError),
        ("something else\nTraceback", ServeError),
    ],
)
def test_codes_in_the_servers_message_become_errors_of_ours(message, kind):
    error = _translated(InferenceServerException(message), "host:1")
    assert type(error) is kind
    assert "Traceback" not in str(error)
    if isinstance(error, SaturatedError):
        assert error.retry_after_s == 2.5


@pytest.mark.parametrize(("lost_after", "came"), [(0, None), (1, "1 token of it came"), (3, "3 tokens of it came")])
def test_a_server_that_goes_away_in_mid_stream_is_told_with_what_came_and_what_to_do(lost_after, came, capsys):
    with fake_triton(fixed(0.0, 0.001, 8), lost_after=lost_after) as server:
        assert main(["generate", "hi", "--url", server.address]) == 1
    out, err = capsys.readouterr()
    assert out == (" word" * lost_after + "\n" if lost_after else "")
    lead = f"the answer is incomplete, {came}: " if came else ""
    assert err.startswith(f"trtpd generate: {lead}the server at {server.address} went away")
    assert "trtpd serve BUILD" in err
    assert err.count("\n") == 1


def test_a_server_that_is_stopped_says_so_and_what_to_do():
    error = _translated(InferenceServerException("code=shutting_down the server is stopping"), "host:1")
    assert "host:1 is going away" in str(error)
    assert "trtpd status" in str(error)


def test_a_refused_request_is_the_requests_fault():
    error = InferenceServerException("max_tokens is 0", status="StatusCode.INVALID_ARGUMENT")
    assert isinstance(_translated(error, "host:1"), RequestError)


def test_values_that_do_not_fit_their_type_are_bad_input(closed_url):
    with pytest.raises(RequestError, match="max_tokens is 99999999999"):
        next(iter(generate(closed_url, prompt="x", max_tokens=99999999999)))
    for temperature in (float("nan"), float("inf"), 1e300):
        with pytest.raises(RequestError, match=r"temperature is .*finite"):
            next(iter(generate(closed_url, prompt="x", temperature=temperature)))
    with pytest.raises(RequestError, match="text_input"):
        next(iter(generate(closed_url, prompt="\ud800")))


SLIPS = [
    "",
    "nonsense",
    "127.0.0.1",
    "http://127.0.0.1:8001",
    "127.0.0.1:99999",
    "127.0.0.1:0",
    ":8001",
    "a b:1",
    "x:1\n",
]


@pytest.mark.parametrize("url", SLIPS)
def test_what_is_no_address_is_bad_input_and_never_dialled(url, capfd):
    with pytest.raises(InputError, match=r"HOST:PORT|a port is"):
        status(url)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "localhost:1", "[::1]:8001", "gpu-1.example.org:65535", "a_b:7"])
def test_an_address_is_taken_as_it_is(url):
    assert server_address(url) == url


def test_why_a_server_was_not_reached_is_said_in_plain_words(closed_url):
    with pytest.raises(ServeError, match="nothing listens there"):
        status(closed_url)
    with pytest.raises(ServeError, match="no host has that name"):
        status("no-such-host.invalid:8001")


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("code=saturated retry_after_s=1.0 7 requests wait already; try again in 1.0 s", "try again in 1.0 s"),
        ("code=saturated retry_after_s=1.0 7 requests wait already", "try again in 1.0 s"),
        ("code=no_instance nobody has served 'm' for 9 s; see `trtpd status`", "see `trtpd status`"),
        ("code=no_instance no prefill instance", "see `trtpd status`"),
    ],
)
def test_what_to_do_is_said_once(message, advice):
    assert str(_translated(InferenceServerException(message), "host:1")).count(advice) == 1
