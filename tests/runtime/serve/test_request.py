from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from trtpd.build import repository
from trtpd.errors import RequestError
from trtpd.runtime.serve.request import HONOURED, NEUTRAL, ModelLimits, parse, query_of, tokenise
from trtpd.runtime.serve.text import TextLayer

LIMITS = ModelLimits(max_seq_tokens=64, vocab_size=100, end_ids=(2,))


def tensors(**values):
    made = {}
    for name, value in values.items():
        if isinstance(value, bytes | str) or (isinstance(value, list) and isinstance(value[0], bytes | str)):
            items = value if isinstance(value, list) else [value]
            made[name] = np.array([[i.encode() if isinstance(i, str) else i for i in items]], dtype=np.object_)
        else:
            made[name] = np.atleast_2d(np.asarray(value))
    return made


def asked(*, parameters=None, **values):
    return parse(tensors(**{"text_input": "hi", "max_tokens": 4} | values), parameters or {}, LIMITS, drawn_seed=7)


def test_a_bare_request_is_greedy_unstreamed_and_echoes_its_prompt():
    request = asked()
    assert (request.prompt, request.max_tokens, request.stream, request.echo) == ("hi", 4, False, True)
    assert (request.sampling.temperature, request.sampling.end_ids, request.sampling.seed) == (0.0, (2,), 7)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.7}, (0.7, 0, 1.0)),
        ({"temperature": 0.0, "top_k": 5}, (0.0, 5, 1.0)),
        ({"top_k": 1, "top_p": 0.0, "temperature": 1.0}, (0.0, 0, 1.0)),
        ({"top_k": 0, "top_p": 0.0}, (0.0, 0, 1.0)),
        ({"top_k": 40}, (1.0, 40, 1.0)),
        ({"top_p": 0.5}, (1.0, 0, 0.5)),
    ],
)
def test_sampling_means_what_it_means_to_the_tensorrt_llm_backend(given, expected):
    sampling = asked(**given).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == pytest.approx(expected)


def test_streaming_never_echoes_and_exclusion_is_honoured():
    assert not asked(stream=True).echo
    assert not asked(exclude_input_in_output=True).echo


def test_seed_and_its_older_name_are_one_input():
    assert asked(random_seed=5).sampling.seed == asked(seed=5).sampling.seed == 5
    with pytest.raises(RequestError, match=r"seed is 5 and random_seed is 6"):
        asked(seed=5, random_seed=6)


def test_end_id_replaces_the_models_own_and_minus_one_means_none():
    assert asked(end_id=9).sampling.end_ids == (9,)
    assert asked(end_id=-1).sampling.end_ids == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": 64}, "max_tokens is 64"),
        ({"text_input": ""}, "text_input is empty"),
        ({"text_input": b"ab\xff"}, r"text_input is not valid UTF-8 \(byte 2 of 3\)"),
        ({"stop_words": [b"ok", b"\xc3"]}, "stop_words is not valid UTF-8"),
        ({"stop_words": ["x"] * 65}, "stop_words holds 65"),
        ({"stop_words": "x" * 1025}, "stop_words holds a string"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -0.1, "top_k": 1}, "temperature is -0.1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"end_id": 100}, "end_id is 100"),
        ({"deadline_ms": 0.0}, "deadline_ms is 0"),
        ({"ttft_ms": float("inf")}, "ttft_ms is inf"),
        ({"priority": 9}, "priority is 9; it must lie between -8 and 8"),
        ({"tenant": "x" * 65}, "tenant has 65 characters"),
        ({"messages": "[]"}, "text_input and messages"),
        ({"temperature": np.array([0.1, 0.2])}, "temperature holds 2 values"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_that_names_it(values, message):
    with pytest.raises(RequestError, match=message) as caught:
        asked(**values)
    assert "\n" not in str(caught.value)


def test_missing_prompt_and_missing_max_tokens_are_named():
    with pytest.raises(RequestError, match="text_input is missing"):
        parse(tensors(max_tokens=1), {}, LIMITS, drawn_seed=0)
    with pytest.raises(RequestError, match="max_tokens is missing"):
        parse(tensors(text_input="x"), {}, LIMITS, drawn_seed=0)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_an_input_not_honoured_is_refused_by_name_and_its_neutral_value_taken(name):
    odd = "no such thing" if isinstance(next(iter(NEUTRAL[name]), 0), str) else 17
    with pytest.raises(RequestError, match=f"^{name} is not supported yet"):
        asked(**{name: odd})
    for neutral in NEUTRAL[name]:
        asked(**{name: neutral})


def test_priority_and_tenant_are_taken_and_may_be_left_out():
    assert (asked().priority, asked().tenant) == (0, "")
    taken = asked(priority=-2, tenant="gold")
    assert (taken.priority, taken.tenant) == (-2, "gold")


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    with pytest.raises(RequestError, match="temprature is no input of this model; did you mean temperature"):
        asked(parameters={"temprature": 1})
    asked(parameters={"triton_enable_empty_final_response": True})


@given(st.dictionaries(st.sampled_from(["max_tokens", "top_k", "end_id", "priority"]), st.integers(-(2**31), 2**31)))
def test_any_integers_either_parse_or_are_refused_as_bad_input(values):
    with contextlib.suppress(RequestError):
        assert 1 <= asked(**values).max_tokens < LIMITS.max_seq_tokens


def test_a_query_is_recognised_and_an_unknown_one_refused():
    assert query_of(tensors(query="status")) == "status"
    assert query_of(tensors(text_input="status")) is None
    with pytest.raises(RequestError, match="'stats'"):
        query_of(tensors(query="stats"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return TextLayer(directory)


def test_prompt_and_answer_must_fit_the_context_together(text):
    assert len(tokenise(asked(text_input="word " * 60), text, LIMITS)) == 60
    with pytest.raises(RequestError, match="has 61 tokens and max_tokens is 4"):
        tokenise(asked(text_input="word " * 61), text, LIMITS)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(text, monkeypatch):
    monkeypatch.setattr(text, "encode", lambda _: pytest.fail("was tokenised"))
    with pytest.raises(RequestError, match="10,485,760 bytes"):
        tokenise(asked(text_input="x" * (10 << 20)), text, LIMITS)


def test_a_prompt_without_tokens_is_refused(text):
    with pytest.raises(RequestError, match="gives no token"):
        tokenise(asked(text_input="  "), text, LIMITS)


def test_the_model_declares_exactly_the_inputs_that_are_honoured_or_refused_by_name():
    config = (Path(repository.__file__).resolve().parents[1] / "model_repo/pd/config.pbtxt").read_text()
    inputs = config[config.index("\ninput [") : config.index("\noutput [")]
    assert sorted(re.findall(r'name: "(\w+)"', inputs)) == sorted([*HONOURED, *NEUTRAL])
