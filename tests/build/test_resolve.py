from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing.tiny import CONFIG, GIB, make_machine

from trtpd.build.hf_config import architecture_from_config
from trtpd.build.machine import Machine
from trtpd.build.resolve import ResolvedPipeline, resolve
from trtpd.build.spec import parse_spec

ARCHITECTURE = architecture_from_config(CONFIG, Path("config.json"))
BOTH: dict[str, Any] = {"prefill": {}, "decode": {}}
WITH_BF16 = make_machine(cpu_features=("avx2", "bf16"))


def resolved(machine: Machine | None = None, **keys: Any) -> ResolvedPipeline:
    spec = parse_spec({"model": "/models/tiny", "pools": BOTH} | keys)
    return resolve(spec, ARCHITECTURE, machine or make_machine())


def test_two_cores_go_one_to_each_role() -> None:
    roles = resolved().roles
    assert roles["prefill"].profile.cores == (0,)
    assert roles["decode"].profile.cores == (1,)


def test_a_single_core_is_shared() -> None:
    roles = resolved(make_machine(cores=(5,))).roles
    assert roles["prefill"].profile.cores == roles["decode"].profile.cores == (5,)


def test_what_one_role_names_is_not_given_to_another() -> None:
    pools = {"prefill": {"cores": [1, 2]}, "decode": {}}
    roles = resolved(make_machine(cores=(0, 1, 2, 3)), pools=pools).roles
    assert roles["decode"].profile.cores == (0, 3)


def test_a_pool_that_only_stands_by_takes_no_cores_from_the_others() -> None:
    roles = resolved(pools=BOTH | {"mixed": {"instances": 0}}).roles
    assert roles["prefill"].profile.cores == (0,)
    assert roles["mixed"].profile.cores == (0, 1)
    assert roles["mixed"].instances == ()


def test_instances_are_numbered_and_have_their_own_cores() -> None:
    pools = {"prefill": {"cores": [0]}, "decode": {"instances": 2, "cores": [1, 2, 3]}}
    decode = resolved(make_machine(cores=(0, 1, 2, 3)), pools=pools).roles["decode"]
    assert decode.cores == {"decode_0": (1, 2), "decode_1": (3,)}
    assert decode.profile.threads == 1


@pytest.mark.parametrize(
    ("machine", "keys", "precision", "kv_dtype"),
    [
        (make_machine(), {}, "f32", "f32"),
        (make_machine(), {"precision": "bf16"}, "bf16", "f32"),
        (make_machine(), {"precision": "int8"}, "int8", "f32"),
        (WITH_BF16, {}, "bf16", "bf16"),
        (WITH_BF16, {"precision": "f32"}, "f32", "f32"),
        (WITH_BF16, {"kv": {"dtype": "f32"}}, "bf16", "f32"),
        (WITH_BF16, {"engine": "emulated"}, "f32", "f32"),
    ],
)
def test_precision_and_kv_follow_the_cpu(machine: Machine, keys: dict[str, Any], precision: str, kv_dtype: str) -> None:
    decode = resolved(machine, **keys).roles["decode"]
    assert (decode.precision, decode.layout.dtype) == (precision, kv_dtype)


def test_one_f32_role_makes_the_kv_of_all_f32() -> None:
    roles = resolved(WITH_BF16, pools={"prefill": {"precision": "f32"}, "decode": {}}).roles
    assert {role.layout.dtype for role in roles.values()} == {"f32"}


def test_kv_pools_share_what_memory_allows() -> None:
    small = make_machine(shm_bytes=1 << 20)
    roles = resolved(small).roles
    assert 0.7 * (1 << 20) < sum(role.pool_bytes for role in roles.values()) <= 0.8 * (1 << 20)


def test_kv_pools_do_not_outgrow_their_cap() -> None:
    profile = resolved(make_machine(shm_bytes=1000 * GIB, memory_bytes=1000 * GIB)).roles["decode"].profile
    assert profile.kv_blocks * 32 == 16_384


def test_the_longest_sequence_is_the_models_as_far_as_the_pools_hold_it() -> None:
    assert resolved().max_seq_tokens == CONFIG["max_position_embeddings"]
    pools = {"prefill": {}, "decode": {"kv_tokens": 100}}
    assert resolved(pools=pools).max_seq_tokens == 96


def test_what_is_free_now_changes_nothing() -> None:
    busy = make_machine(memory_free_bytes=1, shm_free_bytes=1)
    assert resolved(busy) == resolved()


def test_an_emulated_engine_has_a_small_layout_and_the_models_vocabulary() -> None:
    pipeline = resolved(engine="emulated")
    layout = pipeline.roles["prefill"].layout
    assert (layout.num_layers, layout.kv_heads, layout.head_dim, layout.tokens_per_block) == (2, 2, 16, 16)
    assert pipeline.architecture.vocab_size == CONFIG["vocab_size"]
    assert pipeline.architecture.num_hidden_layers == 2


def test_settings_hold_what_was_found_in_place_of_auto() -> None:
    settings: dict[str, Any] = resolved().settings()
    assert settings["pools"]["decode"]["kv_tokens"] == 16_384
    assert settings["kv"] == {
        "dtype": "f32",
        "tokens_per_block": 32,
        "max_seq_tokens": 256,
        "growth_kept": 0.5,
        "prefix_cache": "all",
    }
    assert settings["name"] == "tiny"


def test_settings_are_a_pipeline_file_that_resolves_to_the_same() -> None:
    first = resolved(pools=BOTH | {"mixed": {"instances": 0}})
    again = resolve(parse_spec(first.settings()), ARCHITECTURE, make_machine())
    assert replace(again, spec=first.spec) == first


def test_a_measurement_reaches_the_roles() -> None:
    spec = parse_spec({"model": "m", "pools": BOTH, "slo": {"tpot_ms": 20}})
    pipeline = resolve(spec, ARCHITECTURE, make_machine(), measure=lambda _role, n: n / 1000)
    assert pipeline.roles["decode"].profile.max_batch == 16
