from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from trtpd_testing.kv import Pair, make_pair


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    """make_pair, with everything closed after the test."""
    made: list[Pair] = []

    def make(transport: str = "shm", **options: object) -> Pair:
        if transport == "nixl":
            pytest.importorskip("nixl_cu12")
        made.append(make_pair(transport, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def shm(pairs: Callable[..., Pair]) -> Pair:
    return pairs("shm")
