from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec.structs import replace
from tests.runtime.engine.sampling_reference import reference_token

from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.penalties import History, Logits
from trtpd.runtime.engine.sampling import draw, log_softmax_at, uniform

FINITE = st.floats(-30, 30, width=32)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    log_probs=st.booleans(),
)


TOKEN = st.integers(0, 39)
EVERYTHING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 1000]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9]),
    seed=st.integers(-(2**63), 2**64 - 1),
    end_ids=st.lists(TOKEN, max_size=3).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.25]),
    prompt_ignore_length=st.integers(0, 12),
    logit_bias=st.lists(st.tuples(TOKEN, st.sampled_from([-100.0, -1.5, 3.0])), max_size=4).map(tuple),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
    min_tokens=st.integers(0, 6),
)
SEQUENCES = st.tuples(st.lists(TOKEN, min_size=1, max_size=12), st.lists(TOKEN, max_size=8))


def logits(rows: int, vocabulary: int) -> st.SearchStrategy[Logits]:
    return npst.arrays(np.float32, (rows, vocabulary), elements=FINITE)


def tokens(row: Logits, sampling: Sampling, count: int) -> list[int]:
    """Draws at output indexes 0 ... from one and the same distribution."""
    return [draw(row[None], [sampling], [index])[0].token for index in range(count)]


@given(logits(4, 200), st.lists(SAMPLINGS, min_size=4, max_size=4), st.integers(0, 10_000))
def test_a_row_does_not_depend_on_its_batch(rows, samplings, index):
    together = draw(rows, samplings, [index] * 4)
    alone = [draw(rows[i : i + 1], [samplings[i]], [index])[0] for i in range(4)]
    assert together == alone


@given(logits(1, 300), SAMPLINGS, st.integers(0, 2**40))
def test_a_draw_is_a_function_of_seed_and_index(row, sampling, index):
    before = row.copy()
    assert draw(row, [sampling], [index]) == draw(row.copy(), [sampling], [index])
    np.testing.assert_array_equal(row, before)


@given(logits(1, 300), SAMPLINGS, st.integers(0, 50))
def test_a_drawn_token_is_one_that_top_k_and_top_p_leave(row, sampling, index):
    token = draw(row, [sampling], [index])[0].token
    if sampling.temperature == 0:
        assert token == row[0].argmax()
        return
    scaled = (row[0].astype(np.float64) - row[0].max()) / sampling.temperature
    weights = np.exp(np.maximum(scaled, -700.0))
    order = np.lexsort((np.arange(300), -weights))[: sampling.top_k or 300]
    mass = np.cumsum(weights[order])
    kept = order[: int(np.searchsorted(mass, sampling.top_p * mass[-1] * (1 + 1e-9))) + 1]
    assert token in kept


@given(logits(3, 40), st.lists(EVERYTHING, min_size=3, max_size=3), st.lists(SEQUENCES, min_size=3, max_size=3))
def test_a_batch_with_every_setting_is_drawn_as_a_plain_reference_draws_each_row(rows, samplings, sequences):
    whole = [prompt + answer for prompt, answer in sequences]
    indexes = [len(answer) for _, answer in sequences]
    histories = [
        History(ids, prompt_tokens=len(prompt), sampling=sampling)
        for ids, (prompt, _), sampling in zip(whole, sequences, samplings, strict=True)
    ]
    drawn = [found.token for found in draw(rows, samplings, indexes, histories)]
    assert drawn == [
        reference_token(row.tolist(), sampling, len(answer), prompt + answer, len(prompt))
        for row, sampling, (prompt, answer) in zip(rows, samplings, sequences, strict=True)
    ]


@given(SEQUENCES, st.integers(0, 30), st.integers(0, 20))
def test_a_history_counts_the_same_however_it_grew(sequence, ignored, seen):
    prompt, answer = sequence
    sampling = Sampling(presence_penalty=1.0, prompt_ignore_length=ignored)
    grown = [*prompt, *answer][: max(seen, 1)]
    history = History(grown, prompt_tokens=len(prompt), sampling=sampling)
    history.counts()
    grown.extend([*prompt, *answer][len(grown) :])
    tokens, counts = history.counts()
    assert sorted(tokens.tolist()) == sorted(set(grown))
    counted = grown[min(ignored, len(prompt)) :]
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {t: counted.count(t) for t in set(grown)}


def test_the_likeliest_tokens_are_told_of_equals_the_lower_first_and_of_the_models_own_distribution():
    row = np.array([[1.0, 3.0, 3.0, 0.0, 2.0]], np.float32)
    sampling = Sampling(temperature=2.0, top_k=1, top_log_probs=3, logit_bias=((3, 50.0),))
    found = draw(row, [sampling], [0])[0]
    assert (found.token, found.log_prob) == (3, None)
    assert [token for token, _ in found.top] == [1, 2, 4]
    expected = row[0] - np.logaddexp.reduce(row[0].astype(np.float64))
    np.testing.assert_allclose([value for _, value in found.top], expected[[1, 2, 4]], atol=1e-6)


def test_the_likeliest_token_is_drawn_without_temperature_the_lowest_id_of_equals():
    row = np.array([[1.0, 5.0, 5.0, 0.0]], np.float32)
    assert draw(row, [Sampling()], [0])[0].token == 1
    assert set(tokens(row[0], Sampling(temperature=1.0, top_k=1), 20)) == {1}


@pytest.mark.parametrize(
    ("restriction", "kept"),
    [
        ({}, 5),
        ({"top_k": 3}, 3),
        ({"top_p": 0.8}, 3),
        ({"top_k": 4, "top_p": 0.85}, 3),
        ({"top_k": 4, "top_p": 0.9}, 4),
    ],
)
def test_frequencies_follow_the_distribution(restriction, kept):
    probabilities = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    row = np.log(probabilities * 2).astype(np.float32) * np.float32(2)
    expected = np.where(np.arange(5) < kept, probabilities, 0)
    expected /= expected.sum()
    drawn = tokens(row, Sampling(temperature=2.0, seed=7, **restriction), 2000)
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 2000, expected, atol=0.04)


def test_a_large_nucleus_is_found_in_a_large_vocabulary():
    row = np.random.default_rng(0).normal(0, 0.1, 20_000).astype(np.float32)
    drawn = tokens(row, Sampling(temperature=1.0, top_p=0.5, seed=1), 60)
    weights = np.exp(row.astype(np.float64))
    order = np.argsort(-weights, kind="stable")
    nucleus = order[: int(np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())) + 1]
    assert set(drawn) <= set(nucleus.tolist())
    assert len(set(drawn)) > 50


def test_uniform_numbers_are_uniform_and_differ_between_seeds_indexes_and_tokens():
    ids = np.arange(20)
    points = np.concatenate([uniform(seed, index, ids) for seed in range(20) for index in range(20)])
    assert len(set(points)) == 8000
    assert points.min() > 0
    assert points.max() < 1
    np.testing.assert_allclose(np.histogram(points, 10, (0, 1))[0] / 8000, 0.1, atol=0.015)


def test_seeded_draws_stay_what_they_were_in_former_versions():
    assert uniform(42, 7, np.array([0, 1, 49151])).tolist() == [
        0.5026635792890468,
        0.46220614741169125,
        0.9096745411906202,
    ]


@given(st.integers(0, 2**32), st.sampled_from([{}, {"top_k": 40}, {"top_p": 0.95}]))
def test_the_noise_of_another_order_of_summation_does_not_change_the_token(seed, restriction):
    generator = np.random.default_rng(seed)
    row = generator.normal(0, 2, (1, 5_000)).astype(np.float32)
    other = row + generator.normal(0, 1e-6, row.shape).astype(np.float32)
    sampling = Sampling(temperature=0.9, seed=seed, **restriction)
    assert draw(row, [sampling], [3])[0].token == draw(other, [sampling], [3])[0].token


@given(logits(3, 50))
def test_log_probabilities_are_those_of_the_model(rows):
    ids = rows.argmin(axis=1)
    expected = [row[i] - np.logaddexp.reduce(row) for row, i in zip(rows.astype(np.float64), ids, strict=True)]
    np.testing.assert_allclose(log_softmax_at(rows, ids), expected, atol=1e-9)


def test_log_probabilities_ignore_temperature_and_come_only_when_asked_for():
    row = np.array([[0.0, 2.0, 1.0]], np.float32)
    hot = Sampling(temperature=3.0, top_k=1, log_probs=True)
    with_it, cold = draw(row, [hot], [0])[0], draw(row, [Sampling(log_probs=True)], [0])[0]
    assert with_it == cold
    assert draw(row, [replace(hot, log_probs=False)], [0])[0].log_prob is None
