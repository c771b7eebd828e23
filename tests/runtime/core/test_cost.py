"""The linear step model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.errors import InputError
from trtpd.runtime.core.cost import LinearStepTime

MODEL = LinearStepTime(
    fixed_s=0.01, prefill_token_s=1e-4, prefill_pair_s=1e-8, decode_sequence_s=1e-3, decode_kv_token_s=1e-6
)
counts = st.integers(0, 4096)


def step_s(**work: int) -> float:
    nothing = {"n_prefill": 0, "prefill_tokens": 0, "prefill_kv_tokens": 0, "n_decode": 0, "decode_kv_tokens": 0}
    return MODEL.step_s(**{**nothing, **work})


def test_a_step_without_work_costs_nothing() -> None:
    assert step_s() == 0.0


def test_each_kind_of_work_has_its_rate() -> None:
    assert step_s(n_decode=4, decode_kv_tokens=2000) == pytest.approx(0.01 + 0.004 + 0.002)
    assert step_s(n_prefill=1, prefill_tokens=512, prefill_kv_tokens=256) == pytest.approx(
        0.01 + 0.0512 + 512 * 256 * 1e-8
    )


def test_a_prompt_twice_as_long_costs_more_than_twice() -> None:
    def prompt_s(tokens: int) -> float:
        return step_s(n_prefill=1, prefill_tokens=tokens, prefill_kv_tokens=tokens // 2) - MODEL.fixed_s

    assert prompt_s(4096) > 2 * prompt_s(2048)


@given(n=st.integers(1, 64), tokens=counts, kv=counts, more=counts)
def test_more_work_never_takes_less_time(n: int, tokens: int, kv: int, more: int) -> None:
    base = step_s(n_prefill=n, prefill_tokens=tokens, prefill_kv_tokens=kv, n_decode=n, decode_kv_tokens=kv)
    work = step_s(
        n_prefill=n, prefill_tokens=tokens + more, prefill_kv_tokens=kv, n_decode=n, decode_kv_tokens=kv + more
    )
    assert work >= base


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(InputError, match="fixed_s"):
        LinearStepTime(
            fixed_s=-1.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_sequence_s=0.0, decode_kv_token_s=0.0
        )
