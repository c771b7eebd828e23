from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.build.manifest import RoleName
from trtpd.build.roles import LOCAL_PREFILL_TOKENS, RoleRoom, RoleWishes, profile_for, split_cores
from trtpd.kv_transfer.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=4, tokens_per_block=32, dtype="f32")
ROOM = RoleRoom(cores=(0, 1), instances=1, kv_tokens=4096)
NO_WISHES = RoleWishes()
ROLES = st.sampled_from(["prefill", "decode", "mixed"])


def test_prefill_takes_large_steps_and_decode_small_ones() -> None:
    prefill = profile_for("prefill", NO_WISHES, ROOM, LAYOUT)
    decode = profile_for("decode", NO_WISHES, ROOM, LAYOUT)
    assert prefill.max_step_tokens > 4 * decode.max_step_tokens
    assert decode.max_batch > prefill.max_batch
    assert decode.max_step_tokens == decode.max_batch + LOCAL_PREFILL_TOKENS


def test_mixed_has_the_steps_of_prefill_and_the_batch_of_decode() -> None:
    mixed = profile_for("mixed", NO_WISHES, ROOM, LAYOUT)
    assert mixed.max_step_tokens == profile_for("prefill", NO_WISHES, ROOM, LAYOUT).max_step_tokens
    assert mixed.max_batch == profile_for("decode", NO_WISHES, ROOM, LAYOUT).max_batch


@given(role=ROLES, batch=st.integers(1, 10_000))
def test_a_wished_batch_always_gets_a_step_that_holds_it(role: RoleName, batch: int) -> None:
    profile = profile_for(role, RoleWishes(max_batch=batch), ROOM, LAYOUT)
    assert profile.max_batch == batch
    assert profile.max_step_tokens >= batch


@given(role=ROLES, step=st.integers(1, 10_000))
def test_a_chunk_nobody_asked_for_fits_into_the_step(role: RoleName, step: int) -> None:
    profile = profile_for(role, RoleWishes(max_step_tokens=step), ROOM, LAYOUT)
    assert profile.max_step_tokens == step
    assert profile.chunk_tokens <= step


def test_wishes_are_kept_as_they_are() -> None:
    wishes = RoleWishes(max_batch=9, max_step_tokens=5, chunk_tokens=7, kv_tokens=320, threads=3)
    profile = profile_for("decode", wishes, ROOM, LAYOUT)
    assert (profile.max_batch, profile.max_step_tokens, profile.chunk_tokens) == (9, 5, 7)
    assert (profile.kv_blocks, profile.threads) == (10, 3)


@pytest.mark.parametrize(("kv_tokens", "blocks"), [(31, 1), (32, 1), (63, 1), (64, 2)])
def test_kv_is_rounded_down_to_blocks_but_never_to_none(kv_tokens: int, blocks: int) -> None:
    assert profile_for("decode", RoleWishes(kv_tokens=kv_tokens), ROOM, LAYOUT).kv_blocks == blocks


def test_threads_are_an_instances_share_of_the_cores() -> None:
    room = RoleRoom(cores=(0, 1, 2, 3, 4), instances=2, kv_tokens=64)
    assert profile_for("decode", NO_WISHES, room, LAYOUT).threads == 2


def test_a_measured_step_is_the_smallest_that_saturates() -> None:
    """Time is a floor plus work: at 1,024 tokens the floor no longer matters."""
    profile = profile_for("prefill", NO_WISHES, ROOM, LAYOUT, measure=lambda _role, n: max(n, 1000) / 1e4)
    assert profile.max_step_tokens == 1024


def test_a_measured_batch_is_the_largest_that_keeps_the_target() -> None:
    profile = profile_for("decode", NO_WISHES, ROOM, LAYOUT, tpot_s=0.020, measure=lambda _role, n: n / 1e3)
    assert profile.max_batch == 16


def test_a_wish_is_not_overruled_by_a_measurement() -> None:
    wishes = RoleWishes(max_batch=3, max_step_tokens=100)
    for role in ("prefill", "decode"):
        profile = profile_for(role, wishes, ROOM, LAYOUT, tpot_s=1.0, measure=lambda _role, n: n / 1e3)
        assert (profile.max_batch, profile.max_step_tokens) == (3, 100)


@given(cores=st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True), parts=st.integers(1, 12))
def test_cores_are_dealt_out_evenly_and_once(cores: list[int], parts: int) -> None:
    runs = split_cores(cores, parts)
    sizes = [len(run) for run in runs]
    assert len(runs) == parts
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if len(cores) >= parts:
        assert [core for run in runs for core in run] == cores
