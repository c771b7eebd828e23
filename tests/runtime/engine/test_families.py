"""Every family's engine, from a Hugging Face folder on: against transformers (the golden logits and tokens of
tests/golden/families), and to the seam."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.runtime.engine import tiny
from tests.runtime.engine.conformance import EngineConformance, MakeEngine
from tests.runtime.engine.driver import SEEDED, Driver, hand_over, request
from tests.runtime.engine.test_conformance import Stock
from tests.runtime.engine.test_graph import logits_of, whole
from trtpd_testing.families import CONFIGS
from trtpd_testing.tiny import write_family

from trtpd.build.backends.openvino import write_weights
from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.manifest import EngineConfig
from trtpd.build.sharding import shard_of

FAMILIES = sorted(CONFIGS)
GOLDEN = Path(__file__).parents[2] / "golden" / "families"
MakeFolder = Callable[..., tuple[EngineConfig, Path]]


@cache
def golden(family: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{family}.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """engine_folder(family, tp=1): an f32 engine of the family's tiny model, built once, and its config."""

    @cache
    def made(family: str, tp: int = 1) -> tuple[EngineConfig, Path]:
        checkpoint = open_checkpoint(write_family(tmp_path_factory.mktemp(family) / "model", family))
        architecture, directory = checkpoint.architecture, tmp_path_factory.mktemp(f"{family}-engine")
        settings = tiny.config(architecture, tp=tp)
        shards = [shard_of(architecture, settings.layout, rank) for rank in range(tp)]
        write_weights(checkpoint, architecture, "f32", directory, shards=shards, key="", progress=lambda *_: None)
        return settings, directory

    return made


@pytest.fixture(scope="module")
def stocks(engine_folder: MakeFolder) -> Iterator[Callable[[str], Stock]]:
    @cache
    def stock_of(family: str) -> Stock:
        settings, directory = engine_folder(family)
        stock = Stock(lambda profile: tiny.load_openvino(replace(settings, profile=profile), directory))
        made.append(stock)
        return stock

    made: list[Stock] = []
    yield stock_of
    for stock in made:
        stock.close()


@pytest.fixture
def make_engine(stocks: Callable[[str], Stock], family: str) -> Iterator[MakeEngine]:
    yield stocks(family).make
    stocks(family).take_back()


each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_logits_are_those_of_transformers(engine_folder, family):
    settings, directory = engine_folder(family)
    steps = [step for entry in golden(family) for step in whole(entry["ids"], (5, 0, 3, 6)) if step[0].ids]
    found = np.concatenate(logits_of(settings.architecture, directory, family, steps))
    expected = [logits for entry in golden(family) for logits in entry["logits"].values()]
    np.testing.assert_allclose(found, expected, atol=2e-4)


@each_family
def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(make_engine, family):
    driver = Driver(make_engine())
    requests = [request(n, tuple(entry["ids"]), max_tokens=16) for n, entry in enumerate(golden(family))]
    expected = [entry["output_ids"] for entry in golden(family)]
    assert [driver.run(what) for what in requests] == expected
    keys = []
    for what in requests:  # some decode while others are still in prefill
        keys.append(driver.submit(replace(what, attempt=2)))
        driver.step()
    driver.finish(*keys)
    assert [driver.output(key) for key in keys] == expected


@each_family
def test_greedy_tokens_stay_the_same_after_a_hand_over(make_engine, family):
    source, sink = Driver(make_engine()), Driver(make_engine())
    for number, entry in enumerate(golden(family)):
        assert hand_over(source, sink, request(number, tuple(entry["ids"]), max_tokens=16)) == entry["output_ids"]


@each_family
def test_random_traffic_ends_clean_and_an_answer_goes_on_from_its_journal(make_engine, family):
    suite, driver = EngineConformance(), Driver(make_engine())
    suite.test_random_traffic_with_cancels_ends_clean_and_right(driver, 0)
    suite.test_an_answer_goes_on_from_its_journal(Driver(make_engine()), SEEDED)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_two_ranks_answer_as_one_does(engine_folder, family):
    settings, directory = engine_folder(family, 2)
    driver = Driver(tiny.load_local(settings, directory))
    for number, entry in enumerate(golden(family)[::2]):
        assert driver.run(request(number, tuple(entry["ids"]), max_tokens=16)) == entry["output_ids"]
    long = golden(family)[-1]
    assert driver.run(request(9, tuple(long["ids"]), max_tokens=4)) == long["output_ids"][:4]
    driver.engine.shutdown()


@pytest.mark.slow
@each_family
class TestFamilies(EngineConformance):
    @pytest.fixture
    def make_engine(self, make_engine: MakeEngine) -> MakeEngine:
        return make_engine
