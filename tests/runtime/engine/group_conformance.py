"""The conformance suite on engines of several ranks, and what is a group's own. Run by test_group.py inside a group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.runtime.engine.conformance import MakeEngine
from tests.runtime.engine.driver import GREEDY, SEEDED, Driver, prompt, request
from tests.runtime.engine.paged_conformance import PagedConformance
from tests.runtime.engine.serving_conformance import ServingConformance
from tests.runtime.engine.test_conformance import Stock
from trtpd_testing.groups import Groups


@pytest.fixture(scope="module")
def stock(groups: Groups) -> Iterator[Stock]:
    stock = Stock(groups.load)
    yield stock
    stock.close()


class TestGroup(PagedConformance, ServingConformance):
    @pytest.fixture
    def make_engine(self, stock: Stock) -> Iterator[MakeEngine]:
        yield stock.make
        stock.take_back()

    @pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    def test_a_group_answers_as_one_rank_does(self, groups, driver, sampling):
        one = Driver(groups.load_alone())
        for number, tokens in enumerate((1, 31, 70, 200)):
            what = request(number, prompt(tokens), sampling=sampling)
            assert driver.run(what) == one.run(what)
        one.engine.shutdown()

    def test_every_rank_has_a_pool_of_the_same_blocks(self, groups, driver):
        addresses = [driver.kv.pool.address, *driver.kv.others]
        assert [address.tp_rank for address in addresses] == list(range(groups.control.size))
        assert len({(address.num_blocks, address.generation) for address in addresses}) == 1
        assert len({address.name for address in addresses}) == len(addresses)
