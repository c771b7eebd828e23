"""What engines that we schedule must do beyond the seam's plain life of a request: preemption and the prefix cache; and
what any engine that takes all of Sampling must do with it.

Test classes inherit these as they do EngineConformance.
"""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec.structs import replace
from tests.runtime.engine.conformance import EngineTests
from tests.runtime.engine.driver import (
    CONTEXT_ONLY,
    GENERATION_ONLY,
    GREEDY,
    SEEDED,
    Driver,
    blocks_of,
    copy_blocks,
    prompt,
    request,
)

from trtpd.errors import RequestError
from trtpd.runtime.core.events import Preempted, Tokens
from trtpd.runtime.engine.base import PrefillBegan, PrefillChunk, Sampling
from trtpd.runtime.engine.prefix import BlockHasher

EVERYTHING = Sampling(
    temperature=0.9,
    top_k=60,
    top_p=0.97,
    min_p=0.001,
    seed=99,
    end_ids=(7, 8, 9),
    log_probs=True,
    top_log_probs=3,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    prompt_ignore_length=5,
    logit_bias=((11, 1.5), (12, -2.0)),
    bad_words=((13,), (14, 15), (16, 17, 18)),
    min_tokens=9,
)


def cached(driver, key) -> int:
    return driver.of(key, PrefillBegan)[0].cached_tokens


class SamplingConformance(EngineTests):
    def test_an_answer_with_every_setting_goes_on_from_its_journal(self, driver):
        what = request(1, prompt(40), sampling=EVERYTHING)
        expected = driver.run(what)
        told = [(e.ids, e.log_probs, e.top_log_probs) for e in driver.of((1, 1), Tokens)]
        for cut in (1, 6):
            resumed = request(10 + cut, (*what.prompt_ids, *expected[:cut]), sampling=EVERYTHING, first_index=cut)
            assert driver.run(resumed) == expected[cut:]
            again = [(e.ids, e.log_probs, e.top_log_probs) for e in driver.of(resumed.key, Tokens)]
            for (ids, log_probs, top), (same_ids, same, same_top) in zip(again, told[cut:], strict=True):
                assert ids == same_ids
                assert log_probs == pytest.approx(same, abs=1e-4)
                assert [token for token, _ in top[0]] == [token for token, _ in same_top[0]]

    def test_a_bias_can_decide_and_a_bad_word_forbids(self, driver):
        biased = Sampling(logit_bias=((42, 1000.0),))
        assert driver.run(request(1, prompt(20), max_tokens=4, sampling=biased)) == [42] * 4
        barred = replace(biased, bad_words=((42, 42),))
        output = driver.run(request(2, prompt(20), max_tokens=8, sampling=barred))
        assert output[0] == 42
        assert (42, 42) not in itertools.pairwise(output)

    def test_no_end_token_comes_before_min_tokens(self, driver):
        plain = driver.run(request(1, prompt(30)))
        ends = Sampling(end_ids=tuple(plain), min_tokens=5)
        output = driver.run(request(2, prompt(30), max_tokens=20, sampling=ends))
        assert len(output) >= 6
        assert not set(output[:5]) & set(plain)

    def test_penalties_keep_what_came_from_coming_again(self, driver):
        hard = Sampling(frequency_penalty=100.0, prompt_ignore_length=1000)
        output = driver.run(request(1, prompt(30), max_tokens=40, sampling=hard))
        assert len(set(output)) == 40
        without_prompt = driver.run(request(2, prompt(30), max_tokens=40, sampling=Sampling(presence_penalty=100.0)))
        assert not set(without_prompt) & set(prompt(30))

    def test_the_likeliest_tokens_come_with_their_log_probabilities(self, driver):
        driver.run(request(1, prompt(10), sampling=Sampling(log_probs=True, top_log_probs=5)))
        for event in driver.of((1, 1), Tokens):
            ((token, log_prob), *rest) = event.top_log_probs[0]
            assert (token, log_prob) == (event.ids[0], pytest.approx(event.log_probs[0]))
            assert len(rest) == 4
            assert [value for _, value in rest] == sorted((value for _, value in rest), reverse=True)
        done = driver.prefill(request(2, prompt(10), kind=CONTEXT_ONLY, sampling=Sampling(top_log_probs=5)))
        assert done.top_log_probs == driver.of((1, 1), Tokens)[0].top_log_probs[0]
        driver.engine.release((2, 1))

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            (Sampling(min_p=1.5), "min_p is 1.5"),
            (Sampling(repetition_penalty=0.0), "repetition_penalty is 0.0"),
            (Sampling(presence_penalty=float("nan")), "presence_penalty is nan"),
            (Sampling(frequency_penalty=-101.0), "frequency_penalty is -101"),
            (Sampling(min_tokens=-1), "min_tokens is -1"),
            (Sampling(top_log_probs=33), "top_log_probs is 33"),
            (Sampling(logit_bias=((199, 1.0),)), "logit_bias names token id 199"),
            (Sampling(logit_bias=((1, float("inf")),)), "logit_bias adds inf"),
            (Sampling(bad_words=((),)), "an entry without a token"),
            (Sampling(bad_words=((1, -1),)), "bad_words names token id -1"),
            (Sampling(bad_words=tuple((token,) for token in range(199))), "could leave none of the 199 tokens"),
        ],
        ids=lambda what: what if isinstance(what, str) else "",
    )
    def test_sampling_out_of_range_is_refused_by_name(self, driver, wrong, named):
        with pytest.raises(RequestError, match=named):
            driver.engine.submit(request(1, prompt(9), sampling=wrong))


class PreemptionConformance(EngineTests):
    @pytest.mark.parametrize("sampling", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
    def test_preempted_sequences_lose_no_token(self, make_engine, driver, sampling):
        sampling = replace(sampling, end_ids=())
        requests = [request(n, prompt(20, n), max_tokens=100, sampling=sampling) for n in range(1, 4)]
        expected = [driver.run(replace(what, attempt=2)) for what in requests]
        tight = Driver(make_engine(kv_blocks=5, growth_kept=0.0))
        before = tight.step().load.preemptions
        keys = [tight.submit(what) for what in requests]
        tight.finish(*keys)
        assert [tight.output(key) for key in keys] == expected
        assert not tight.of(keys[0], Preempted)
        preemptions = sum(len(tight.of(key, Preempted)) for key in keys)
        assert preemptions == tight.step().load.preemptions - before > 0

    def test_the_lowest_priority_is_preempted_first_whoever_came_first(self, make_engine):
        tight = Driver(make_engine(kv_blocks=6, growth_kept=0.0))
        low = tight.submit(request(1, prompt(20, 1), max_tokens=100))
        high = tight.submit(replace(request(2, prompt(20, 2), max_tokens=100), priority=1))
        tight.finish()
        assert tight.of(low, Preempted)
        assert not tight.of(high, Preempted)

    def test_a_sequence_that_came_by_transfer_is_preempted_and_computed_here(self, make_engine, driver):
        source, tight = Driver(make_engine()), Driver(make_engine(kv_blocks=5, growth_kept=0.0))
        older = tight.submit(request(1, prompt(20, 1), max_tokens=100))
        tight.step()
        what = request(2, prompt(40, 2), max_tokens=60)
        expected = driver.run(what)
        done = source.prefill(replace(what, kind=CONTEXT_ONLY))
        reserved = tight.kv.reserve(what.key, 40, peak_tokens=100)
        assert reserved is not None
        copy_blocks(source, blocks_of(source, what.key), tight, list(reserved[:2]))
        tight.submit(replace(what, kind=GENERATION_ONLY, first_token=done.token))
        tight.finish()
        assert tight.of(what.key, Preempted)
        assert not tight.of(what.key, PrefillBegan)
        assert [done.token, *tight.output(what.key)] == expected
        assert len(tight.output(older)) == 100
        source.engine.cancel(what.key)
        source.finish()

    def test_what_is_held_for_others_is_never_preempted(self, make_engine):
        tight = Driver(make_engine(kv_blocks=5, growth_kept=0.0))
        tight.prefill(request(1, prompt(60, 1), kind=CONTEXT_ONLY))
        running = tight.submit(request(2, prompt(20, 2), max_tokens=120))
        tight.until(lambda: bool(tight.of(running, Preempted)))
        for _ in range(5):
            assert tight.step().load.kv_blocks_held == 2
        tight.engine.release((1, 1))
        tight.finish()
        assert len(tight.output(running)) == 120


class PrefixCacheConformance(EngineTests):
    @pytest.fixture
    def caching(self, make_engine) -> Driver:
        return Driver(make_engine(prefix_cache=True))

    @pytest.mark.parametrize(("tokens", "found"), [(1, 0), (32, 0), (33, 32), (64, 32), (65, 64), (90, 64)])
    def test_a_prompt_that_was_here_is_found_but_for_its_last_token(self, caching, driver, tokens, found):
        what = request(1, prompt(tokens), sampling=SEEDED)
        expected = driver.run(what)
        assert caching.run(what) == expected
        again = replace(what, request_id=2)
        assert caching.run(again) == expected
        assert (cached(caching, (1, 1)), cached(caching, (2, 1))) == (0, found)
        assert [e.ready_tokens for e in caching.of((2, 1), PrefillChunk)][:1] == ([found] if found else [])
        assert caching.of((2, 1), Tokens)[0].cached_tokens == found

    def test_only_a_common_beginning_is_shared(self, caching, driver):
        first, second = prompt(100), (*prompt(100)[:70], *prompt(30, 5))
        caching.run(request(1, first))
        assert caching.run(request(2, second)) == driver.run(request(2, second))
        assert cached(caching, (2, 1)) == 64
        caching.run(request(3, (first[0] + 1, *first[1:])))
        assert cached(caching, (3, 1)) == 0

    def test_an_answer_is_found_as_part_of_the_next_prompt(self, caching, driver):
        turn = request(1, prompt(40), max_tokens=40)
        answer = caching.run(turn)
        following = request(2, (*turn.prompt_ids, *answer, *prompt(10, 3)))
        assert caching.run(following) == driver.run(following)
        assert cached(caching, (2, 1)) == 64

    def test_blocks_are_shared_while_both_run_and_outlive_either(self, caching, driver):
        what = request(1, prompt(90), max_tokens=30)
        expected = driver.run(what)
        keys = [caching.submit(what)]
        caching.until(lambda: bool(caching.of(keys[0], Tokens)))
        keys += [caching.submit(replace(what, request_id=n)) for n in (2, 3)]
        caching.until(lambda: all(caching.of(key, Tokens) for key in keys))
        assert len({blocks_of(caching, key)[0] for key in keys}) == 1
        caching.engine.cancel(keys[0])
        caching.finish()
        assert [caching.output(key) for key in keys[1:]] == [expected] * 2

    def test_a_decode_engine_shares_what_it_has_of_a_prompt_that_comes(self, make_engine, caching, driver):
        source = Driver(make_engine())
        for number, present in ((1, 0), (2, 2)):
            what = request(number, prompt(90), sampling=SEEDED)
            done = source.prefill(replace(what, kind=CONTEXT_ONLY))
            reserved = caching.kv.reserve(what.key, 90, peak_tokens=102, prompt_ids=what.prompt_ids)
            assert reserved is not None
            assert caching.kv.present_blocks(what.key) == present
            missing = blocks_of(source, what.key)[present:]
            copy_blocks(source, missing, caching, list(reserved[present:3]))
            rest = caching.run(replace(what, kind=GENERATION_ONLY, first_token=done.token))
            assert [done.token, *rest] == driver.run(what)
            source.engine.cancel(what.key)
            source.finish()

    def test_reserved_blocks_are_found_only_once_their_request_has_joined(self, caching):
        caching.kv.reserve((1, 1), 90, prompt_ids=prompt(90))
        caching.kv.reserve((2, 1), 90, prompt_ids=prompt(90))
        assert caching.kv.present_blocks((2, 1)) == 0
        for key in ((1, 1), (2, 1)):
            caching.kv.free(key)
        caching.kv.reserve((3, 1), 90, prompt_ids=prompt(90))
        assert caching.kv.present_blocks((3, 1)) == 0
        caching.kv.free((3, 1))

    def test_kept_blocks_keep_their_epoch_until_they_are_used_for_something_else(self, caching):
        caching.run(request(1, prompt(90)))
        blocks = blocks_of(caching, (1, 1))[:2]
        epochs = caching.kv.pool.epochs_of(blocks)
        load = caching.step().load
        assert (load.kv_blocks_free, load.cached_blocks, load.evicted) == (24, 3, ())
        caching.run(request(2, prompt(200, 1), max_tokens=50))
        assert caching.kv.pool.epochs_of(blocks) == epochs
        evicted: set[int] = set()
        for number in (3, 4, 5):
            caching.submit(request(number, prompt(200, number), max_tokens=50))
        while not caching.ended.issuperset(caching.events):
            evicted |= set(caching.step().load.evicted)
        assert all(new > old for new, old in zip(caching.kv.pool.epochs_of(blocks), epochs, strict=True))
        assert evicted >= set(BlockHasher("", 32).summary(prompt(90)))
        caching.run(request(6, prompt(90)))
        assert cached(caching, (6, 1)) == 0

    def test_a_cancelled_prefill_leaves_what_it_has_computed(self, caching, driver):
        what = request(1, prompt(150), max_tokens=3)
        caching.submit(what)
        caching.until(lambda: len(caching.of((1, 1), PrefillChunk)) == 2)
        caching.engine.cancel((1, 1))
        assert caching.run(replace(what, request_id=2)) == driver.run(what)
        assert cached(caching, (2, 1)) == 64

    def test_a_request_may_stay_out_of_the_cache(self, caching):
        what = replace(request(1, prompt(90)), reuse=False)
        caching.run(what)
        caching.run(replace(what, request_id=2, reuse=True))
        caching.run(replace(what, request_id=3))
        assert [cached(caching, (n, 1)) for n in (1, 2, 3)] == [0, 0, 0]

    def test_no_more_is_kept_than_the_setting_says(self, make_engine):
        driver = Driver(make_engine(prefix_cache=True, prefix_cache_blocks=2))
        driver.run(request(1, prompt(150)))
        assert driver.step().load.cached_blocks == 2
        driver.run(request(2, prompt(150)))
        assert cached(driver, (2, 1)) == 64

    def test_off_means_that_nothing_is_kept(self, driver):
        driver.run(request(1, prompt(90)))
        driver.run(request(2, prompt(90)))
        assert cached(driver, (2, 1)) == 0
        assert driver.step().load.cached_blocks == 0

    @pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
    def test_random_traffic_with_shared_prompts_preemption_and_cancels_is_right(self, make_engine, driver, seed):
        rng = random.Random(seed)
        beginnings = [prompt(64, n) for n in range(3)]
        requests = [
            request(
                n,
                (*rng.choice(beginnings)[: rng.choice((32, 50, 64))], *prompt(rng.randint(1, 30), n)),
                max_tokens=rng.randint(1, 40),
                sampling=rng.choice([GREEDY, SEEDED, EVERYTHING]),
            )
            for n in range(14)
        ]
        expected = {what.key: driver.run(replace(what, attempt=7)) for what in requests}
        tight = Driver(make_engine(prefix_cache=True, growth_kept=rng.choice([0.0, 0.5]), kv_blocks=8))
        cancelled = set()
        for what in requests:
            tight.submit(what)
            for _ in range(rng.randint(0, 6)):
                tight.step()
            if rng.random() < 0.25:
                victim = rng.choice(requests[: what.request_id + 1]).key
                tight.engine.cancel(victim)
                cancelled.add(victim)
        tight.until(lambda: tight.ended.issuperset(tight.events), steps=3000)
        for key, output in expected.items():
            got = tight.output(key)
            assert got == output[: len(got)]
            assert key in cancelled or got == output
        assert tight.step().load.kv_blocks_free == 8


class ServingConformance(SamplingConformance, PreemptionConformance, PrefixCacheConformance):
    """All of it."""
