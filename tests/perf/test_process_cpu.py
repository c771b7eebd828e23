from __future__ import annotations

import os
from urllib.parse import urlsplit

import pytest
from trtpd_testing.fake_servers import fake_openai, fixed

from trtpd.errors import InputError
from trtpd.perf.bench import Target
from trtpd.perf.process_cpu import server_process


def test_a_server_here_is_found_by_every_form_of_address_that_a_transport_takes():
    with fake_openai(fixed(0.0, 0.0, 1)) as server:
        port = urlsplit(server.address).port
        for address in ("http://127.0.0.1:{}/v1", "http://localhost:{}/v1/", "http://127.0.0.1:{}/", "127.0.0.1:{}"):
            url = address.format(port)
            if "://" in url:
                Target(url=url, openai=True)
            found = server_process(url)
            assert found is not None, url
            assert found.pid == os.getpid()


@pytest.mark.parametrize(
    "address", ["http://192.0.2.1/v1", "https://example.invalid", "example.invalid:80", "[2001:db8::1]:8001"]
)
def test_a_server_elsewhere_is_not_looked_for_here(address):
    assert server_process(address) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:http", "127.0.0.1:99999", "", "http://:8000"])
def test_what_is_no_address_is_named(address):
    with pytest.raises(InputError, match="not HOST:PORT"):
        server_process(address)
