from __future__ import annotations

import pytest
from tests.runtime.serve.test_request import LIMITS, asked
from tokenizers import Tokenizer, models, pre_tokenizers

from trtpd.errors import RequestError
from trtpd.runtime.serve.sampling_inputs import Words, with_words
from trtpd.runtime.serve.text import TextLayer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "red": 1, "sea": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return TextLayer(directory)


def test_every_setting_reaches_the_sampler_by_its_name():
    given = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "prompt_ignore_length": 7,
        "min_tokens": 3,
        "top_log_probs": 4,
    }
    sampling = asked(**given).sampling
    assert {name: getattr(sampling, name) for name in given} == given


def test_without_settings_nothing_is_asked_of_the_sampler():
    sampling = asked().sampling
    assert not sampling.penalises
    assert (sampling.logit_bias, sampling.bad_words, sampling.min_tokens, sampling.top_log_probs) == ((), (), 0, 0)


def test_a_bias_is_given_by_ids_and_values():
    assert asked(logit_bias_ids=[5, 6], logit_bias_values=[1.5, -2.0]).sampling.logit_bias == ((5, 1.5), (6, -2.0))
    for wrong in (
        {"logit_bias_ids": [5], "logit_bias_values": [1.0, 2.0]},
        {"logit_bias_ids": [5]},
        {"logit_bias_ids": [5, 5], "logit_bias_values": [1.0, 2.0]},
    ):
        with pytest.raises(RequestError, match="logit_bias_ids"):
            asked(**wrong)


def test_stop_token_ids_come_on_top_of_the_end_token():
    assert asked(stop_token_ids=[9, 2]).sampling.end_ids == (2, 9)
    assert asked(stop_token_ids=[9], end_id=-1).sampling.end_ids == (9,)


def test_min_length_is_the_older_name_of_min_tokens():
    assert asked(min_length=2).sampling.min_tokens == 2
    with pytest.raises(RequestError, match="min_tokens is 1 and min_length is 2"):
        asked(min_tokens=1, min_length=2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"min_tokens": 5}, "min_tokens is 5 and max_tokens 4"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"top_log_probs": 33}, "top_log_probs is 33"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"num_return_sequences": 17}, "num_return_sequences is 17"),
        ({"stop_token_ids": [100]}, "end_ids names token id 100"),
        ({"logit_bias_ids": [-1], "logit_bias_values": [1.0]}, "logit_bias names token id -1"),
        ({"bad_words": ["x"] * 257}, "bad_words holds 257"),
        ({"bad_words": "x" * 257}, "bad_words holds a word of more than 256"),
        ({"embedding_bias_words": "red"}, "embedding_bias_words holds 1 words and embedding_bias_weights 0"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values, message):
    with pytest.raises(RequestError, match=message):
        asked(**values)


def test_words_become_their_tokens(text):
    request = asked(
        bad_words=["red sea", "sea", ""], embedding_bias_words=["red sea", "red"], embedding_bias_weights=[1.0, 0.5]
    )
    sampling = with_words(request.sampling, request.words, text, vocab_size=LIMITS.vocab_size)
    assert sampling.bad_words == ((1, 2), (2,))
    assert sampling.logit_bias == ((1, 1.5), (2, 1.0))


def test_no_words_change_nothing(text):
    sampling = asked().sampling
    assert with_words(sampling, Words(), text, vocab_size=100) is sampling
