"""Messages are values: equal and hashed by what they hold, without a place for anything else."""

from __future__ import annotations

import pytest

from trtpd.runtime.core.events import Cancel, Drained


def test_equal_fields_make_equal_messages_of_one_hash() -> None:
    one, other = Drained(request_id=1, attempt=2), Drained(request_id=1, attempt=2)
    assert one == other
    assert len({one, other, Drained(request_id=1, attempt=3)}) == 2


def test_messages_of_two_kinds_are_never_equal() -> None:
    assert Drained(request_id=1, attempt=2) != Cancel(instance="p0", request_id=1, attempt=2)


def test_a_message_takes_its_fields_by_name_and_no_others() -> None:
    with pytest.raises(TypeError):
        Drained(1, 2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Drained(request_id=1, attempt=2).extra = 3  # type: ignore[attr-defined]
