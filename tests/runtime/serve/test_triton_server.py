from __future__ import annotations

import resource

import pytest

from trtpd.runtime.serve.triton_server import STACK_BYTES, stack_limit

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (8 << 20, NONE, STACK_BYTES),
        (8 << 20, 64 << 20, 64 << 20),
        (1 << 30, NONE, 1 << 30),
        (NONE, NONE, STACK_BYTES),
    ],
)
def test_the_servers_threads_get_a_large_stack_as_far_as_the_host_allows(soft, hard, expected):
    assert stack_limit(soft, hard) == expected
