from __future__ import annotations

import pytest

from trtpd.errors import ServeError
from trtpd.runtime.core.lifecycle import AttemptRecord, Instant, Timeline
from trtpd.runtime.serve.timeline import from_json, render, report, to_json


def record() -> Timeline:
    first = AttemptRecord(number=1, kind="pair", prefill="prefill_0", decode="decode_0", why="w", outcome="decode lost")
    second = AttemptRecord(number=2, kind="pair", prefill="prefill_0", decode="decode_1", why="w", outcome="delivered")
    second.bytes_moved, second.chunks, second.transfer_s, second.exposed_s, second.path = (
        2_000_000,
        3,
        0.5,
        0.125,
        "shm",
    )
    at = {
        Instant.ARRIVED: 10.0,
        Instant.PLACED: 10.25,
        Instant.PREFILL_BEGIN: 10.5,
        Instant.FIRST_TOKEN: 11.0,
        Instant.LAST_TOKEN: 13.0,
    }
    return Timeline(request_id=1, prompt_tokens=7, output_tokens=5, instants=at, attempts=[first, second])


def test_instants_become_durations_in_ms():
    made = report(record(), finish="stop", second_token_s=11.75)
    assert (made.queue_ms, made.prefill_ms, made.ttft_ms) == (500.0, 500.0, 1000.0)
    assert (made.second_token_ms, made.tpot_ms, made.total_ms) == (750.0, 500.0, 3000.0)
    assert made.retries == 1
    assert made.transfer is not None
    assert (made.transfer.bytes, made.transfer.ms, made.transfer.exposed_ms) == (2_000_000, 500.0, 125.0)


def test_a_request_that_never_came_far_has_no_such_durations():
    made = report(Timeline(request_id=1, prompt_tokens=7), finish="cancelled", second_token_s=None)
    assert (made.ttft_ms, made.tpot_ms, made.transfer, made.attempts) == (None, None, None, ())
    assert "cancelled" in render(made)


def test_json_keeps_everything_and_nonsense_is_refused():
    made = report(record(), finish="stop", second_token_s=11.75)
    assert from_json(to_json(made)) == made
    with pytest.raises(ServeError, match="timeline"):
        from_json("{}")


def test_the_rendering_names_instances_transfer_and_what_was_given_up():
    text = render(report(record(), finish="stop", second_token_s=11.75))
    for part in ("prefill_0", "decode_1", "2.00 MB", "shm", "decode_0: decode lost"):
        assert part in text


def test_a_transfer_that_had_to_wait_its_turn_is_not_told_as_a_part_of_its_copying():
    waited = record()
    waited.attempts[-1].transfer_s, waited.attempts[-1].exposed_s = 0.003, 0.0125
    text = render(report(waited, finish="stop", second_token_s=11.75))
    line = next(line for line in text.splitlines() if "MB" in line)
    assert "3.0 ms" in line
    assert line.endswith("; waited for 12.5 ms after the prefill")
    assert "of it" not in line
