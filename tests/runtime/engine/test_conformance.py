"""Both engines keep to the seam."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.runtime.engine import tiny
from tests.runtime.engine.conformance import EngineConformance, MakeEngine

from trtpd.runtime.engine.base import Engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """An engine directory of the tiny Llama in f32."""
    return tiny.save(tmp_path_factory.mktemp("tiny"), tiny.stored(tiny.weights(tiny.architecture()), "f32"))


class TestOpenVINO(EngineConformance):
    @pytest.fixture
    def make_engine(self, directory: Path) -> Iterator[MakeEngine]:
        engines: list[Engine] = []

        def make(**overrides: int) -> Engine:
            profile = replace(tiny.PROFILE, **overrides)
            engines.append(tiny.load_openvino(tiny.config(tiny.architecture(), profile=profile), directory))
            return engines[-1]

        yield make
        for engine in engines:
            engine.shutdown()


class TestEmulated(EngineConformance):
    @pytest.fixture
    def make_engine(self) -> Iterator[MakeEngine]:
        engines: list[Engine] = []

        def make(**overrides: int) -> Engine:
            profile = replace(tiny.PROFILE, **overrides)
            engines.append(tiny.load_emulated(tiny.config(tiny.architecture(), engine="emulated", profile=profile)))
            return engines[-1]

        yield make
        for engine in engines:
            engine.shutdown()
