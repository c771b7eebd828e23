"""Both ways to drive TensorRT-LLM keep to the seam, over the stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.runtime.engine import tiny
from tests.runtime.engine.conformance import EngineConformance, MakeEngine
from tests.runtime.engine.test_conformance import Stock
from trtpd_testing import tensorrt

from trtpd.build.backends.tensorrt_llm.llm_args import MODEL_DIR, llm_args, write_llm_args
from trtpd.build.manifest import RoleProfile
from trtpd.runtime.engine.base import Engine
from trtpd.runtime.engine.tensorrt_llm.load import load

ARCH = tiny.architecture()
HELD_MS = 250
"""How long the stand-in keeps KV that nobody fetches."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tensorrt.write_hugging_face(tmp_path_factory.mktemp("hf") / "model", ARCH, tiny.weights(ARCH))


@pytest.fixture(scope="module")
def compiled_stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    home = tmp_path_factory.mktemp("compiled")
    config = tensorrt.engine_config(ARCH, tiny.PROFILE, tensorrt.settings(kv_transfer_timeout_ms=HELD_MS))
    with tensorrt.installed(home):
        directory = tensorrt.compile_engine(model, home / "engine", config)
        stock = Stock(lambda profile: load(replace(config, profile=profile), directory, pool_name="t", generation="g"))
        yield stock
        stock.close()


@pytest.fixture(scope="module")
def llm_stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    home = tmp_path_factory.mktemp("llm")
    trt = tensorrt.settings("llm_api", release="1.3", kv_transfer_timeout_ms=HELD_MS)

    def make(profile: RoleProfile) -> Engine:
        config = tensorrt.engine_config(ARCH, profile, trt)
        arguments = llm_args(trt, "mixed", profile, tp=1, block=32, max_seq_len=config.max_seq_tokens)
        arguments["kv_cache_config"]["max_tokens"] = profile.kv_blocks * 32
        directory = home / f"engine-{profile.kv_blocks}-{profile.chunk_tokens}"
        directory.mkdir(exist_ok=True)
        write_llm_args(directory, arguments)
        if not (directory / MODEL_DIR).exists():
            (directory / MODEL_DIR).symlink_to(model)
        return load(config, directory, pool_name="t", generation="g")

    with tensorrt.installed(home, version="1.3.0"):
        stock = Stock(make)
        yield stock
        stock.close()


class TestCompiled(EngineConformance):
    @pytest.fixture
    def make_engine(self, compiled_stock: Stock) -> Iterator[MakeEngine]:
        yield compiled_stock.make
        compiled_stock.take_back()


@pytest.mark.slow
class TestLlmApi(EngineConformance):
    @pytest.fixture
    def make_engine(self, llm_stock: Stock) -> Iterator[MakeEngine]:
        yield llm_stock.make
        llm_stock.take_back()
