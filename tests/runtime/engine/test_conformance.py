"""Both engines keep to the seam."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace
from tests.runtime.engine import tiny
from tests.runtime.engine.conformance import MakeEngine
from tests.runtime.engine.paged_conformance import PagedConformance
from tests.runtime.engine.serving_conformance import (
    PreemptionConformance,
    PrefixCacheConformance,
    SamplingConformance,
    ServingConformance,
)

from trtpd.build.manifest import RoleProfile
from trtpd.errors import EngineError
from trtpd.runtime.engine.base import Engine

ARCH = tiny.architecture()


class Stock:
    """Engines of one kind, made when asked for; those a test left clean serve the next."""

    def __init__(self, load: Callable[[RoleProfile], Engine]) -> None:
        self._load = load
        self._idle: list[tuple[RoleProfile, Engine]] = []
        self._used: list[tuple[RoleProfile, Engine]] = []

    def make(self, **overrides: float | None) -> Engine:
        profile = replace(tiny.PROFILE, **overrides)
        fitting = [entry for entry in self._idle if entry[0] == profile]
        entry = fitting[0] if fitting else (profile, self._load(profile))
        self._idle = [other for other in self._idle if other is not entry]
        self._used.append(entry)
        return entry[1]

    def take_back(self) -> None:
        for entry in self._used:
            try:
                load = entry[1].poll(0.0).load
                clean = load.kv_blocks_free == entry[1].limits.kv_blocks and not load.cached_blocks
            except EngineError:
                clean = False
            if clean:
                self._idle.append(entry)
            else:
                entry[1].shutdown()
        self._used = []

    def close(self) -> None:
        self.take_back()
        for _, engine in self._idle:
            engine.shutdown()


@pytest.fixture(scope="module")
def openvino_stock(tmp_path_factory) -> Iterator[Stock]:
    directory = tiny.save(tmp_path_factory.mktemp("tiny"), tiny.stored(tiny.weights(ARCH), "f32"))
    stock = Stock(lambda profile: tiny.load_openvino(tiny.config(ARCH, profile=profile), directory))
    yield stock
    stock.close()


@pytest.fixture(scope="module")
def emulated_stock() -> Iterator[Stock]:
    stock = Stock(lambda profile: tiny.load_emulated(tiny.config(ARCH, engine="emulated", profile=profile)))
    yield stock
    stock.close()


@pytest.fixture(scope="module")
def openvino_ranks_stock(tmp_path_factory) -> Iterator[Stock]:
    """Three KV heads on two ranks: two and one."""
    arch = replace(ARCH, num_attention_heads=6, num_key_value_heads=3)
    settings = tiny.config(arch, tp=2)
    directory = tiny.save_ranks(tmp_path_factory.mktemp("ranks"), tiny.stored(tiny.weights(arch), "f32"), settings)
    stock = Stock(lambda profile: tiny.load_local(replace(settings, profile=profile), directory))
    yield stock
    stock.close()


class TestOpenVINO(PagedConformance):
    @pytest.fixture
    def make_engine(self, openvino_stock: Stock) -> Iterator[MakeEngine]:
        yield openvino_stock.make
        openvino_stock.take_back()


class TestEmulated(PagedConformance, ServingConformance):
    @pytest.fixture
    def make_engine(self, emulated_stock: Stock) -> Iterator[MakeEngine]:
        yield emulated_stock.make
        emulated_stock.take_back()


class TestOpenVINOOfTwoRanks(PagedConformance):
    @pytest.fixture
    def make_engine(self, openvino_ranks_stock: Stock) -> Iterator[MakeEngine]:
        yield openvino_ranks_stock.make
        openvino_ranks_stock.take_back()


class TestServingOfOpenVINO(SamplingConformance, PrefixCacheConformance):
    @pytest.fixture
    def make_engine(self, openvino_stock: Stock) -> Iterator[MakeEngine]:
        yield openvino_stock.make
        openvino_stock.take_back()


@pytest.mark.slow
class TestPreemptionOfOpenVINO(PreemptionConformance):
    @pytest.fixture
    def make_engine(self, openvino_stock: Stock) -> Iterator[MakeEngine]:
        yield openvino_stock.make
        openvino_stock.take_back()


@pytest.mark.slow
class TestServingOfTwoRanks(ServingConformance):
    @pytest.fixture
    def make_engine(self, openvino_ranks_stock: Stock) -> Iterator[MakeEngine]:
        yield openvino_ranks_stock.make
        openvino_ranks_stock.take_back()
